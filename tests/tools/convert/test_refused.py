# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: what cannot be converted is refused, and the file and field are named."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.convert import megatron_args
from megatron_mtraining.tools.convert.families import model_of
from tests.support.convert_cases import (
    MOE_CONFIG,
    case_id,
    change_args,
    config_of,
    refused,
)

INDEX = "model.safetensors.index.json"


BAD_CONFIGS = {
    "architecture": (
        dict(architectures=["MambaForCausalLM"]),
        ["MambaForCausalLM", "Qwen2ForCausalLM"],
    ),
    "sliding window": (
        dict(layer_types=["full_attention", "sliding_attention"]),
        ["layer_types", "sliding_attention"],
    ),
    "old sliding window": (
        dict(layer_types=None, use_sliding_window=True, sliding_window=64, max_window_layers=2),
        ["use_sliding_window", "64"],
    ),
    "sliding window of experts": (
        dict(
            architectures=["Qwen3MoeForCausalLM"],
            layer_types=None,
            use_sliding_window=True,
            sliding_window=64,
            max_window_layers=4,
        ),
        ["use_sliding_window", "64"],
    ),
    "sliding window of experts that ignore layer_types": (
        dict(
            architectures=["Qwen3MoeForCausalLM"],
            layer_types=["full_attention"] * 4,
            use_sliding_window=True,
            sliding_window=64,
        ),
        ["use_sliding_window", "64"],
    ),
    "sliding window of transformers' own size": (
        dict(layer_types=None, use_sliding_window=True, sliding_window=None, max_window_layers=0),
        ["use_sliding_window", "4096"],
    ),
    "rope type": (
        dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        ["rope_type", "longrope"],
    ),
    "rope base": (
        dict(rope_parameters={"rope_type": "default", "rope_theta": 1.5}),
        ["rope_theta"],
    ),
    "yarn attention factor": (
        dict(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4,
                "attention_factor": 1.0,
            }
        ),
        ["attention_factor"],
    ),
    "llama 3 factors": (
        dict(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4,
                "low_freq_factor": 2.0,
            }
        ),
        ["low_freq_factor"],
    ),
    "rope field": (
        dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "new_field": 3}),
        ["new_field", "3"],
    ),
    "activation": (dict(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "heads": (dict(num_key_value_heads=3), ["num_key_value_heads", "3"]),
    "layers": (dict(num_hidden_layers="4"), ["num_hidden_layers"]),
    "shape": (dict(intermediate_size=160), ["gate_proj.weight", "[176, 128]", ".safetensors"]),
    "fewer layers": (
        dict(num_hidden_layers=3, layer_types=None),
        ["model.layers.3.", ".safetensors"],
    ),
    "quantised": (dict(quantization_config={"bits": 4}), ["quantization_config"]),
}


@pytest.mark.parametrize("case", BAD_CONFIGS, ids=case_id)
def test_inexpressible_configs(case, plain, tmp_path, capsys):
    changes, named = BAD_CONFIGS[case]
    shutil.copytree(plain[0], tmp_path / "hf")
    config = {**config_of(plain[0]), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    refused(capsys, tmp_path / "out", ("hf-to-megatron", tmp_path / "hf", tmp_path / "out"), named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            dict(num_experts_per_tok=1, norm_topk_prob=True),
            ["norm_topk_prob", "num_experts_per_tok 1"],
        ),
        (dict(num_experts_per_tok=5), ["num_experts_per_tok is 5", "4 experts"]),
    ],
)
def test_routers_that_megatron_core_cannot_build(changes, named, plain, tmp_path, capsys):
    """Both ways; one expert with its own weight can be converted."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**MOE_CONFIG, **changes}))
    out = tmp_path / "out"
    refused(capsys, out, ("hf-to-megatron", tmp_path / "hf", out), named)
    words = ("megatron-to-hf", plain[1], out, "--like", tmp_path / "hf")
    refused(capsys, out, words, named)
    one = dict(num_experts_per_tok=1, norm_topk_prob=False)
    model = model_of({**MOE_CONFIG, **one}, Path("config.json"))
    assert megatron_args.namespace(model, {}).moe_router_pre_softmax


def value_id(value) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value, default=repr)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 5), ("head_dim", "16"), ("hidden_size", True), ("num_hidden_layers", 0),
        ("rms_norm_eps", float("nan")), ("rope_theta", "abc"), ("rope_parameters", "yarn"),
        ("rope_scaling", {"rope_type": "yarn", "factor": "x"}),
    ],
    ids=value_id,
)  # fmt: skip
def test_fields_of_wrong_types(field, value, plain, tmp_path, capsys):
    shutil.copytree(plain[0], tmp_path / "hf")
    config = {**config_of(plain[0]), field: value}
    config.pop("rope_parameters") if field == "rope_theta" else None
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    words = ("hf-to-megatron", tmp_path / "hf", tmp_path / "out")
    refused(capsys, tmp_path / "out", words, ["config.json"])


@pytest.mark.parametrize("field", ["max_position_embeddings", "rms_norm_eps"])
def test_missing_fields(field, plain, tmp_path, capsys):
    shutil.copytree(plain[0], tmp_path / "hf")
    config = config_of(plain[0])
    del config[field]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    words = ("hf-to-megatron", tmp_path / "hf", tmp_path / "out")
    refused(capsys, tmp_path / "out", words, ["config.json", f"{field} is missing"])


def test_invalid_index(plain, tmp_path, capsys):
    """The index names files outside the folder, or a tensor is in two files."""
    folder = tmp_path / "hf"
    shutil.copytree(plain[0], folder)
    words = ("hf-to-megatron", folder, tmp_path / "out")
    index = json.loads((folder / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    for other in (f"../hf/{file}", 3):
        index["weight_map"][name] = other
        (folder / INDEX).write_text(json.dumps(index))
        refused(capsys, tmp_path / "out", words, [folder / INDEX, name, repr(other)])
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))
    shard = next(path for path in folder.glob("*.safetensors") if path.name != file)
    twice = {name: load_file(folder / file)[name], **load_file(shard)}
    save_file(twice, shard)
    refused(capsys, tmp_path / "out", words, [name, file, shard.name])


INEXPRESSIBLE = [
    ("window_size", (64, 0)), ("softmax_type", "off-by-one"), ("no_rope_freq", 4), ("quick_geglu", True),
    ("squared_relu", True), ("openai_gelu", True), ("glu_linear_offset", 1.0), ("softmax_scale", 0.5),
    ("activation_func_clamp_value", 7.0), ("qk_l2_norm", True), ("attention_output_gate", True),
    ("use_mup", True), ("mtp_num_layers", 1), ("apply_residual_connection_post_layernorm", True),
    ("moe_router_score_function", "sigmoid"), ("moe_router_topk_scaling_factor", 2.5),
    ("moe_router_enable_expert_bias", True), ("moe_router_group_topk", 2), ("moe_layer_freq", [0, 1]),
    ("moe_router_load_balancing_type", "sinkhorn"), ("moe_shared_expert_intermediate_size", 64),
    ("moe_mlp_glu_interleave_size", 8), ("moe_apply_probs_on_input", True), ("spec", ["module", "name"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), INEXPRESSIBLE, ids=value_id)
def test_inexpressible_arguments(name, value):
    """Arguments that change what a model computes; those of experts are ignored in dense models."""
    moe = model_of(MOE_CONFIG, Path("config.json"))
    plain = ("window_size", (-1, 0)), ("softmax_scale", moe.head_dim**-0.5), ("moe_layer_freq", [1])
    args = vars(megatron_args.namespace(moe, {})) | dict(plain)
    args |= dict(mtp_num_layers=None, moe_router_load_balancing_type=["aux_loss"])
    megatron_args.check_same(moe, Namespace(**args), "run", "config.json")
    with pytest.raises(ConfigError, match=f"run: {name} is .* cannot express"):
        megatron_args.check_same(moe, Namespace(**{**args, name: value}), "run", "config.json")
    if name.startswith("moe"):
        dense = {**MOE_CONFIG, "architectures": ["Qwen3ForCausalLM"]}
        dense = model_of(dense, Path("config.json"))
        args = vars(megatron_args.namespace(dense, {})) | {name: value}
        megatron_args.check_same(dense, Namespace(**args), "run", "config.json")


def test_checkpoint_with_inexpressible_arguments(plain, tmp_path, capsys):
    shutil.copytree(plain[1], tmp_path / "meg")
    change_args(tmp_path / "meg", window_size=(64, 0))
    words = ("megatron-to-hf", tmp_path / "meg", tmp_path / "out")
    refused(capsys, tmp_path / "out", words, [tmp_path / "meg", "window_size is (64, 0)"])


def test_missing_and_truncated_files(plain, tmp_path, capsys):
    folder = tmp_path / "hf"
    words = ("hf-to-megatron", folder, tmp_path / "out")
    refused(capsys, tmp_path / "out", words, [folder / "config.json"])
    shutil.copytree(plain[0], folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    refused(capsys, tmp_path / "out", words, [shard, "is missing", "model."])
    shard.write_bytes(content[:-100])
    refused(capsys, tmp_path / "out", words, [shard, "not a complete safetensors file"])
    tensors = load_file(plain[0] / shard.name)
    name, tensor = tensors.popitem()
    save_file(tensors, shard)
    refused(capsys, tmp_path / "out", words, [shard, name])
    save_file({**tensors, name: tensor.float()}, shard)
    if "norm" not in name:
        refused(capsys, tmp_path / "out", words, [shard.name, name, "--dtype"])
    shard.write_bytes(content)
    (folder / INDEX).write_text("{")
    refused(capsys, tmp_path / "out", words, [folder / INDEX, "not JSON"])
    shutil.rmtree(folder)
    shutil.copytree(plain[1], folder)
    words = ("megatron-to-hf", folder, tmp_path / "out")
    data = folder / "release" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    refused(capsys, tmp_path / "out", words, [data, "cut off"])
    data.unlink()
    refused(capsys, tmp_path / "out", words, [data, "missing"])
    shutil.rmtree(folder / "hf")
    refused(capsys, tmp_path / "out", words, [folder, "--like"])


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/a.jinja"])
def test_links_that_lead_nowhere(name, plain, tmp_path, capsys):
    """As in a cache that is not whole: files beside the weights would be left out in silence."""
    folder = shutil.copytree(plain[0], tmp_path / "hf")
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere")
    refused(capsys, tmp_path / "out", ("hf-to-megatron", folder, tmp_path / "out"), [file])


def test_config_of_another_model(plain, tmp_path, capsys):
    config = {**config_of(plain[0]), "num_hidden_layers": 3, "layer_types": None}
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    words = ("megatron-to-hf", plain[1], tmp_path / "out", "--like", tmp_path / "like")
    refused(capsys, tmp_path / "out", words, ["num_layers is 4", tmp_path / "like"])
