# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron checkpoints: queries and keys are those of the saved model; what is not supported is refused."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer import TransformerConfig

from megatron_mtraining import ConfigError
from megatron_mtraining.models import megatron_checkpoint
from megatron_mtraining.models.environment import single_process
from megatron_mtraining.models.megatron_checkpoint import MegatronCheckpoint
from megatron_mtraining.models.megatron_folder import TRACKER
from megatron_mtraining.models.text import read_indexed_dataset
from megatron_mtraining.models.types import ModelOptions
from megatron_mtraining.tools import cli
from tests.support.inspect_cases import byte_tokenizer

SEQ, VOCABULARY = 512, 384
BASE = dict(
    num_layers=2, hidden_size=128, ffn_hidden_size=192, num_attention_heads=4, kv_channels=64,
    num_query_groups=2, normalization="RMSNorm", layernorm_epsilon=1e-5, add_bias_linear=False,
    add_qkv_bias=True,
)  # fmt: skip
YARN = dict(
    rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=128, yarn_beta_fast=32.0,
    yarn_beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0, yarn_correction_range_round_to_int=True,
)  # fmt: skip


def case(config=None, swiglu=True, positions="rope", **args):
    """A model: what its TransformerConfig has, and more of a run's arguments."""
    return dict(config=config or {}, swiglu=swiglu, positions=positions, args=args)


CASES = {
    "rope, grouped queries": case(),
    "learned positions, LayerNorm, biases": case(
        dict(normalization="LayerNorm", add_bias_linear=True, num_query_groups=4),
        swiglu=False,
        positions="learned_absolute",
    ),
    "normed queries and keys": case(dict(qk_layernorm=True, add_qkv_bias=False), rotary_base=5e5),
    "yarn": case(positions="yarn", **YARN),
    "half of each head is rotated": case(rotary_percent=0.5, rotary_interleaved=False),
    "experts": case(dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64)),
}


def arguments(case) -> Namespace:
    """The arguments that a run of pretrain_gpt.py keeps of such a model, as far as they matter here."""
    values = {**BASE, **case["config"]}
    values["num_experts"] = values.pop("num_moe_experts", None)
    return Namespace(
        **values,
        **case["args"],
        group_query_attention=values["num_query_groups"] != 4,
        swiglu=case["swiglu"],
        position_embedding_type=case["positions"],
        max_position_embeddings=SEQ,
        padded_vocab_size=VOCABULARY,
        multi_latent_attention=False,
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="Qwen/Qwen2.5-3B",
    )


def build(case) -> GPTModel:
    """The model that is saved, built without any code that is tested; Megatron's groups are in force."""
    torch.manual_seed(3)
    act = dict(activation_func=torch.nn.functional.silu, gated_linear_unit=True)
    config = TransformerConfig(
        **{**BASE, **case["config"]},
        **(act if case["swiglu"] else {}),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        persist_layer_norm=False,
    )
    if case["positions"] == "yarn":
        for name, value in YARN.items():
            name = name if name.startswith("yarn_") else f"yarn_{name}"
            setattr(config, name, value)
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    positions = dict(position_embedding_type=case["positions"])
    positions |= {k: v for k, v in case["args"].items() if k in ("rotary_percent", "rotary_base")}
    return GPTModel(config, spec, VOCABULARY, SEQ, **positions).eval()


def token_ids(length=SEQ):
    return torch.from_numpy(np.random.default_rng(4).integers(0, VOCABULARY, length))


def run_and_save(case, folder: Path):
    """Save a model as pretrain_gpt.py does; its own queries and keys over :func:`token_ids`."""
    seen = []
    with single_process(torch.device("cpu")), torch.no_grad():
        model = build(case)
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.register_forward_pre_hook(
                lambda module, inputs: seen.append((*inputs[:2], module.softmax_scale))
            )
        ids = token_ids()[None]
        future = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
        model(ids, torch.arange(SEQ)[None], future)
        iteration = folder / "iter_0000007"
        iteration.mkdir(parents=True)
        state = {"args": arguments(case), "iteration": 7, "model": model.sharded_state_dict()}
        with mock.patch.object(torch.cuda, "synchronize"):  # saving waits for a GPU, always
            dist_checkpointing.save(state, str(iteration))
    (folder / TRACKER).write_text("7")
    return seen


def options(folder, **changes):
    values = dict(path=folder, device=torch.device("cpu"), dtype=torch.float32)
    return ModelOptions(**{**values, **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint's folder, and the queries and keys of the model that was saved."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_and_save(CASES["rope, grouped queries"], folder)


@pytest.mark.parametrize("name", CASES)
def test_queries_and_keys_are_those_of_the_model(name, tmp_path):
    expected = run_and_save(CASES[name], tmp_path)
    source = MegatronCheckpoint(options(tmp_path))
    shape = source.shape
    kv_heads = CASES[name]["config"].get("num_query_groups", 2)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, kv_heads, 64)
    assert (shape.positions, shape.vocabulary) == (SEQ, VOCABULARY)
    found = []
    with source.loaded() as run:
        run(token_ids(), found.append)
    assert [given.layer for given in found] == [0, 1] and len(expected) == 2
    for given, (query, key, scale) in zip(found, expected, strict=True):
        assert given.softmax_scale == scale
        # Attention of the layer before is another implementation.
        torch.testing.assert_close(given.query, query, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(given.key, key, atol=2e-5, rtol=1e-5)
    assert found[0].query.std() > 0.1


def inspect(*arguments):
    return cli.main(["inspect", *map(str, arguments)])


@pytest.mark.usefixtures("unrendered")
def test_the_command(saved, tmp_path, capsys):
    folder, _ = saved
    np.save(tmp_path / "ids.npy", token_ids().numpy().astype(np.uint16))
    out = tmp_path / "out"
    rest = ["--text", tmp_path / "ids.npy", "--output", out, "--rows", 64, "--device", "cpu"]
    for model in (folder, folder / "iter_0000007"):
        assert inspect(model, *rest, "--policy", "fixed", "--dtype", "float32") == 0
        numbers = json.loads((out / "results.json").read_text())
        assert numbers["layers"] == 2 and numbers["tokens"] == SEQ
        shutil.rmtree(out)


def test_indexed_datasets_are_token_ids(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16)
    for part in token_ids(300).split(100):
        builder.add_document(part, [len(part)])
    builder.finalize(str(tmp_path / "data.idx"))
    found = read_indexed_dataset(tmp_path / "data.bin", 250)
    assert found.tolist() == token_ids(300)[:250].tolist()
    (tmp_path / "lone.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="without lone.idx"):
        read_indexed_dataset(tmp_path / "lone.bin", 9)


def test_yarn_is_that_of_a_model_trained_with_it(saved, tmp_path):
    # The same weights, saved as of a model that had YaRN.
    as_yarn = case(positions="yarn", **{**YARN, "yarn_original_max_position_embeddings": SEQ})
    expected = MegatronCheckpoint(options(saved[0]))
    expected.args = arguments(as_yarn)
    scaled = MegatronCheckpoint(options(saved[0], yarn_factor=4.0))
    assert scaled.shape.positions == 4 * SEQ
    queries = []
    for source in (expected, scaled):
        with source.loaded() as run:
            run(token_ids(768), lambda given: queries.append(given.query))
    torch.testing.assert_close(queries[:2], queries[2:])
    assert not torch.allclose(queries[0][:SEQ], saved[1][0][0], atol=1e-3)


def copy_of(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def refused(capsys, folder, tmp_path, named, *more):
    np.save(tmp_path / "ids.npy", token_ids())
    rest = ["--text", tmp_path / "ids.npy", "--output", tmp_path / "out", "--device", "cpu"]
    assert inspect(folder, *rest, *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    for word in named:
        assert word in error, error
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_such_checkpoint(saved, tmp_path, capsys):
    folder = copy_of(saved, tmp_path)
    iteration = folder / "iter_0000007"
    (folder / TRACKER).write_text("9")
    refused(capsys, folder, tmp_path, ["MODEL", "'9'", "iter_0000009"])
    (folder / TRACKER).unlink()
    refused(capsys, folder, tmp_path, ["name an iteration's folder", "iter_0000007"])
    (iteration / ".metadata").rename(iteration / "away")
    refused(capsys, iteration, tmp_path, ["not whole", ".metadata", "--ckpt-format torch_dist"])
    (iteration / ".metadata").write_bytes(b"nothing")
    refused(capsys, iteration, tmp_path, [".metadata", str(iteration), "cannot be read"])
    (iteration / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(capsys, iteration, tmp_path, ["format zarr", "--ckpt-format torch_dist"])
    (iteration / "mp_rank_00").mkdir()
    refused(capsys, iteration, tmp_path, ["format torch:", "--ckpt-convert-format torch_dist"])


def test_text_takes_a_tokenizer_that_fits(saved, tmp_path, capsys):
    folder, _ = saved
    refused(
        capsys, folder, tmp_path, ["HuggingFaceTokenizer Qwen", "--tokenizer"], "--text", __file__
    )
    np.save(tmp_path / "large.npy", np.full(600, VOCABULARY))
    more = ["--text", tmp_path / "large.npy"]
    refused(capsys, folder, tmp_path, [str(VOCABULARY), "--tokenizer"], *more)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(window_size=(128, 0)), ["sliding windows", "128"]),
        (dict(hybrid_layer_pattern="M*M*"), ["M*M*"]),
        (dict(spec=["a", "b"]), ["specification"]),
        (dict(position_embedding_type="mrope"), ["mrope", "rope, yarn"]),
        (dict(softmax_type="learnable"), ["learnable"]),
        (dict(use_mup=True), ["MuP (use_mup True)", "Megatron-LM"]),
        (dict(num_experts=4, moe_mlp_glu_interleave_size=8), ["moe_mlp_glu_interleave_size 8"]),
        (dict(num_experts=4, moe_router_load_balancing_type=["sinkhorn"]), ["sinkhorn"]),
        (dict(use_rope_scaling=True, rope_scaling_factor=32.0), ["drops --rope-scaling-factor"]),
        (dict(padded_vocab_size=None), ["padded_vocab_size"]),
    ],
)
def test_runs_that_are_not_supported(changes, named, saved, tmp_path, monkeypatch):
    args = Namespace(**{**vars(arguments(case())), **changes})
    monkeypatch.setattr(megatron_checkpoint, "read_common", lambda folder, place: {"args": args})
    with pytest.raises(ConfigError) as refusal:
        MegatronCheckpoint(options(saved[0]))
    assert all(word in str(refusal.value) for word in named), refusal.value


def test_arguments_without_effect_are_allowed(saved, monkeypatch):
    """Defaults, and arguments of experts in a model that has none."""
    args = arguments(case())
    args.use_mup, args.glu_linear_offset, args.activation_func_clamp_value = False, 0.0, None
    args.moe_mlp_glu_interleave_size, args.moe_router_load_balancing_type = 8, "sinkhorn"
    monkeypatch.setattr(megatron_checkpoint, "read_common", lambda folder, place: {"args": args})
    assert MegatronCheckpoint(options(saved[0])).shape.layers == 2


def test_weights_of_another_model_are_named(saved):
    source = MegatronCheckpoint(options(saved[0]))
    source.args.qk_layernorm = True
    with pytest.raises(ConfigError, match=r"lacks 2 .*layernorm.*among those it has"):
        with source.loaded():
            pass
    source = MegatronCheckpoint(options(saved[0]))
    source.args.ffn_hidden_size = 256
    with pytest.raises(ConfigError, match="cannot be loaded"):
        with source.loaded():
            pass


@pytest.mark.parametrize("version", ["0.16.1", "0.18.0rc1"])
def test_a_checkpoint_of_a_newer_megatron(version, saved, tmp_path, monkeypatch):
    """Those before 0.19 look for common.pt, and fail at looking what there is instead."""
    newer = shutil.copytree(saved[0], tmp_path / "newer")
    for file in newer.rglob("common.pt"):
        file.unlink()
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(
        ConfigError, match=f"no common.pt: .*0.19 or later, .*{version} is installed"
    ):
        MegatronCheckpoint(options(newer))


def test_a_tokenizer_that_is_at_hand_is_opened(saved, tmp_path):
    source = MegatronCheckpoint(options(saved[0]))
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source.args.tokenizer_model = str(tmp_path / "tokenizer")
    assert source.tokenizer().encode("ab") == byte_tokenizer()("ab").input_ids
    source.args.tokenizer_type = "GPT2BPETokenizer"
    with pytest.raises(ConfigError, match="trained with GPT2BPETokenizer .*--tokenizer"):
        source.tokenizer()


def test_sensitivity_takes_a_converted_checkpoint(saved):
    with pytest.raises(ConfigError, match="MODEL .* is a Megatron checkpoint.*megatron-to-hf"):
        with MegatronCheckpoint(options(saved[0])).loaded(scored=True):
            pass
