# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: conversion to Megatron and back, bit for bit, and what is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from megatron_mtraining.tools.convert import megatron_args, to_hf, torch_dist
from megatron_mtraining.tools.convert.families import model_of
from megatron_mtraining.tools.convert.mapping import Region, interleave, locations, mapped, part_of
from tests.support.convert_cases import (
    CASES,
    MOE_CONFIG,
    case_id,
    change_args,
    config_of,
    convert,
    flags_of,
    refused,
    same,
    save,
    to_megatron,
    weights,
)

HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", CASES, ids=case_id)
def test_round_trip_is_bit_identical(name, tmp_path):
    folder = save(name, tmp_path / "hf", torch.float32 if "qwen3" in name else torch.bfloat16)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert to_megatron(folder, tmp_path / "meg") == 0
    assert (
        convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back", "--shard-size", "0.3MB") == 0
    )
    same(weights(folder), weights(tmp_path / "back"))
    assert config_of(folder) == config_of(tmp_path / "back")
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    for tensor, file in index["weight_map"].items():
        assert tensor in load_file(tmp_path / "back" / file)
    # transformers finds all its tensors, and no others.
    from transformers import AutoModelForCausalLM

    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_files_that_are_written(plain, tmp_path):
    folder, checkpoint = plain
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert config_of(checkpoint / "hf") == config_of(folder)
    words = flags_of(checkpoint)
    assert words[words.index("--num-query-groups") + 1] == "2"
    assert words[words.index("--tokenizer-model") + 1] == f"{checkpoint}/hf"
    assert "--add-qkv-bias" in words and "--qk-layernorm" not in words
    assert convert("megatron-to-hf", checkpoint / "release", tmp_path / "back") == 0
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_text() == (folder / name).read_text()
    assert [file.name for file in (tmp_path / "back").glob("*.safetensors")] == [
        "model.safetensors"
    ]


def test_script_finds_its_folder(plain):
    """Also sourced by a relative path where CDPATH is set, with which cd prints where it goes."""
    checkpoint = plain[1]
    environment = {**os.environ, "CDPATH": "."}
    script = f'source {checkpoint.name}/megatron_args.sh && echo "${{MEGATRON_ARGS[*]}}"'
    words = ["bash", "-c", script]
    done = subprocess.run(
        words, cwd=checkpoint.parent, env=environment, capture_output=True, text=True, check=True
    )
    assert f"--load {checkpoint} --ckpt-format torch_dist" in done.stdout


def test_single_file_beside_an_index(plain, tmp_path, capsys):
    """The single file is converted, as transformers loads it, also if files of the index are missing."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(plain[0], tmp_path / "hf")
    others = sorted(folder.glob("*.safetensors"))
    newer = {name: tensor + 1 for name, tensor in weights(folder).items()}
    save_file(newer, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(theirs["model.norm.weight"], newer["model.norm.weight"])
    for number in range(2):
        capsys.readouterr()
        assert to_megatron(folder, tmp_path / f"meg{number}") == 0
        assert f"{folder} has model.safetensors and {INDEX}" in capsys.readouterr().err
        assert convert("megatron-to-hf", tmp_path / f"meg{number}", tmp_path / f"back{number}") == 0
        same(newer, weights(tmp_path / f"back{number}"))
        others[number].unlink()
    # An index that names the file itself is read.
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(newer, "model.safetensors")})
    )
    assert to_megatron(folder, tmp_path / "meg") == 0
    assert INDEX not in capsys.readouterr().err


def test_interleave(plain):
    """Megatron has the query heads, the key and the value of each query group together."""
    model = model_of(config_of(plain[0]), plain[0] / "config.json")
    heads = [torch.full((model.head_dim,), float(n)) for n in range(8)]
    query, key, value = torch.cat(heads[:4]), torch.cat(heads[4:6]), torch.cat(heads[6:])
    rows = interleave(model, query, key, value)
    assert rows.view(-1, model.head_dim)[:, 0].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    for part, expected in zip("qkv", (query, key, value)):
        assert torch.equal(part_of(model, rows, part), expected)


def test_vocabulary_padding(plain, tmp_path, capsys):
    folder, _ = plain
    assert to_megatron(folder, tmp_path / "meg", "--padded-vocab-size", 384) == 0
    reader = torch_dist.Reader(tmp_path / "meg" / "release")
    rows = reader.read(Region("output_layer.weight", (384, 128), (0, 0), (384, 128)))
    assert rows[:320].all(1).any() and not rows[320:].any()
    assert to_hf.read_args(tmp_path / "meg" / "release").padded_vocab_size == 384
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(folder), weights(tmp_path / "back"))
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "more", "--vocab-size", 400) == 2
    assert "fewer than --vocab-size (400)" in capsys.readouterr().err
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "more", "--vocab-size", 330) == 0
    assert config_of(tmp_path / "more")["vocab_size"] == 330
    assert weights(tmp_path / "more")["lm_head.weight"].shape[0] == 330


def test_metadata_for_older_versions_of_torch(plain, monkeypatch):
    """Versions before 2.15 know five properties of a tensor, and cannot read more."""
    seen, read = [], torch_dist.TensorProperties.__setstate__

    def setstate(self, state):
        seen.append(len(state))
        read(self, state)

    monkeypatch.setattr(torch_dist.TensorProperties, "__setstate__", setstate)
    assert torch_dist.Reader(plain[1] / "release").tensors
    assert set(seen) == {5}


def test_large_tensors_are_written_in_parts(plain, tmp_path, monkeypatch):
    from megatron_mtraining.tools.convert import to_megatron as module

    monkeypatch.setattr(module, "PART_BYTES", 5000)
    assert to_megatron(plain[0], tmp_path / "meg") == 0
    chunks = torch_dist.dcp.FileSystemReader(tmp_path / "meg" / "release").read_metadata()
    assert len(chunks.state_dict_metadata["embedding.word_embeddings.weight"].chunks) == 17
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(plain[0]), weights(tmp_path / "back"))


def test_layers_and_experts_under_keys_of_their_own(tmp_path):
    """Checkpoints of runs with singleton_local_shards can be converted."""
    folder = save("qwen3 moe", tmp_path / "hf")
    assert to_megatron(folder, tmp_path / "meg") == 0
    model = model_of(config_of(folder), folder / "config.json")
    reader = torch_dist.Reader(tmp_path / "meg" / "release")
    parts = {}
    for tensor in mapped(model):
        *_, region = locations(tensor)
        content = reader.read(tensor.region)
        parts[region] = torch_dist.Part(region, content.dtype, lambda content=content: content)
    release = tmp_path / "meg" / "release"
    for file in (".metadata", "__0_0.distcp", "integrity.json"):
        (release / file).unlink()
    torch_dist.write(release, list(parts.values()), [], lambda size: None)
    keys = torch_dist.Reader(release).tensors
    assert "decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_v" in keys
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(folder), weights(tmp_path / "back"))


def test_dtypes(plain, tmp_path, capsys):
    folder, checkpoint = plain
    assert to_megatron(folder, tmp_path / "f32", "--dtype", "float32") == 0
    assert (
        torch_dist.Reader(tmp_path / "f32" / "release").tensors["output_layer.weight"][1]
        == torch.float32
    )
    words = ("megatron-to-hf", tmp_path / "f32", tmp_path / "back", "--dtype", "bfloat16")
    refused(capsys, tmp_path / "back", words, ["word_embeddings", "float32", "--allow-dtype-loss"])
    assert convert(*words, "--allow-dtype-loss") == 0
    same(weights(folder), weights(tmp_path / "back"))
    assert "bfloat16" in (
        config_of(tmp_path / "back").get("dtype"),
        config_of(folder).get("torch_dtype"),
    )
    words = ("hf-to-megatron", folder, tmp_path / "f16", "--dtype", "float16")
    refused(capsys, tmp_path / "f16", words, ["model.", ".safetensors", "bfloat16"])


def test_dtype_in_config_of_mixed_dtypes(plain, tmp_path):
    """The dtype in config.json stays if any tensor has it, also if the embedding has another."""
    folder = tmp_path / "hf"
    shutil.copytree(plain[0], folder)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if "embed_tokens" in name:
                tensors[name] = tensors[name].float()
        save_file(tensors, shard, metadata={"format": "pt"})
    assert to_megatron(folder, tmp_path / "meg") == 0
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(folder), weights(tmp_path / "back"))
    assert config_of(tmp_path / "back") == config_of(folder)
    # If no tensor has it, the dtype of most bytes is written.
    config = {**config_of(folder), "dtype": "float16"}
    (tmp_path / "meg" / "hf" / "config.json").write_text(json.dumps(config))
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "other") == 0
    assert config_of(tmp_path / "other")["dtype"] == "bfloat16"


def test_flags_have_all_digits():
    """Floats keep their value in megatron_args.sh, as the way back compares them with config.json."""
    values = {"norm_epsilon": 1.2345678e-05, "rotary_scaling_factor": 87381 / 32768, "mscale": 0.1}
    args = dict(position_embedding_type="yarn", rope_scaling_factor=8.0, rotary_base=10000)
    args |= dict(use_rope_scaling=False, max_position_embeddings=64, mscale_all_dim=0.0)
    args |= dict(yarn_beta_fast=32.0, yarn_beta_slow=1.0, yarn_original_max_position_embeddings=32)
    args |= dict(yarn_correction_range_round_to_int=True)
    model = model_of(MOE_CONFIG, Path("config.json"))
    args = Namespace(**{**vars(megatron_args.namespace(model, args)), **values})
    words = [word for line in megatron_args.flags(args) for word in line]
    for name, value in values.items():
        assert float(words[words.index("--" + name.replace("_", "-")) + 1]) == value


def test_model_without_tokenizer(plain, tmp_path, capsys):
    """A warning, and no flags for a tokenizer; chat templates are copied."""
    folder = tmp_path / "hf"
    shutil.copytree(plain[0], folder)
    (folder / "tokenizer.json").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    assert to_megatron(folder, tmp_path / "meg") == 0
    assert "no tokenizer" in capsys.readouterr().err
    assert not {"--tokenizer-model", "--tokenizer-type"} & set(flags_of(tmp_path / "meg"))
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    template = tmp_path / "back" / "additional_chat_templates" / "tools.jinja"
    assert template.read_text() == "{{ tools }}"


def test_same_bits(monkeypatch):
    """All parts are compared, by bits: 0.0 and -0.0 differ."""
    monkeypatch.setattr(torch_dist, "PART_BYTES", 100)
    first = torch.randn(23, 4)
    second, asked = first.clone(), []

    def read(begin, end):
        asked.append((begin, end))
        return first[begin:end], second[begin:end]

    assert torch_dist.same_bits(23, 16, read)
    assert asked == [(0, 6), (6, 12), (12, 18), (18, 23)]
    first[22, 3], second[22, 3] = 0.0, -0.0
    assert not torch_dist.same_bits(23, 16, read)


def test_output_layer_beside_tied_embedding(plain, tmp_path, capsys):
    """An output layer is dropped if it equals the embedding that it is tied to, else refused."""
    folder = tmp_path / "hf"
    shutil.copytree(plain[0], folder)
    config = {**config_of(folder), "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    words = ("hf-to-megatron", folder, tmp_path / "meg")
    refused(capsys, tmp_path / "meg", words, ["lm_head.weight", "embed_tokens", ".safetensors"])
    shard = next(path for path in folder.glob("*.safetensors") if HEAD in load_file(path))
    tensors = load_file(shard)
    head = weights(folder)["model.embed_tokens.weight"]
    save_file({**tensors, HEAD: head[:-1].clone()}, shard)
    refused(capsys, tmp_path / "meg", words, ["lm_head.weight"])
    save_file({**tensors, HEAD: head}, shard)
    assert convert(*words) == 0
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    assert HEAD not in weights(tmp_path / "back")
    # The checkpoint of an untied model, with the config.json of a tied one.
    shutil.rmtree(tmp_path / "meg")
    shutil.copytree(plain[1], tmp_path / "meg")
    (tmp_path / "meg" / "hf" / "config.json").write_text(json.dumps(config))
    change_args(tmp_path / "meg", untie_embeddings_and_output_weights=None)
    words = ("megatron-to-hf", tmp_path / "meg", tmp_path / "out")
    refused(capsys, tmp_path / "out", words, ["output_layer.weight", "word_embeddings"])
