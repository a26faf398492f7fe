# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: there and back, bit for bit, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from convert_cases import CASES, save, weights
from safetensors.torch import load_file, save_file

from megatron_mtraining import ConfigError, cli
from megatron_mtraining.convert import arguments, positions, target, to_hf, torch_dist
from megatron_mtraining.convert.families import model_of
from megatron_mtraining.convert.hf_folder import Shards
from megatron_mtraining.convert.names import interleave, part_of

INDEX = "model.safetensors.index.json"


def convert(*words) -> int:
    return cli.main(["convert", *map(str, words)])


def to_megatron(*words) -> int:
    return convert("hf-to-megatron", *words)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def same(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Hugging Face folder in bf16, and its checkpoint."""
    root = tmp_path_factory.mktemp("plain")
    folder = save("qwen2", root / "hf", torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"top_p": 0.5}')
    assert to_megatron(folder, root / "meg") == 0
    return folder, root / "meg"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_identical(name, dtype, tmp_path):
    folder = save(name, tmp_path / "hf", dtype)
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
    # transformers reads what came back, all of it.
    from transformers import AutoModelForCausalLM

    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_files_of_the_folders(plain, tmp_path):
    folder, checkpoint = plain
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert config_of(checkpoint / "hf") == config_of(folder)
    script = 'source "$1" && printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    words = subprocess.run(
        ["bash", "-c", script, "bash", checkpoint / "megatron_args.sh"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert words[words.index("--num-query-groups") + 1] == "2"
    assert words[words.index("--tokenizer-model") + 1] == f"{checkpoint}/hf"
    assert "--add-qkv-bias" in words and "--qk-layernorm" not in words
    assert convert("megatron-to-hf", checkpoint / "release", tmp_path / "back") == 0
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_text() == (folder / name).read_text()
    assert [file.name for file in (tmp_path / "back").glob("*.safetensors")] == [
        "model.safetensors"
    ]


def test_queries_keys_and_values_are_interleaved_by_group(plain):
    model = model_of(config_of(plain[0]), plain[0] / "config.json")
    heads = [torch.full((model.head_dim,), float(n)) for n in range(8)]
    query, key, value = torch.cat(heads[:4]), torch.cat(heads[4:6]), torch.cat(heads[6:])
    rows = interleave(model, query, key, value)
    assert rows.view(-1, model.head_dim)[:, 0].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    for part, expected in zip("qkv", (query, key, value)):
        assert torch.equal(part_of(model, rows, part), expected)


def test_padding_of_the_vocabulary(plain, tmp_path):
    folder, _ = plain
    assert to_megatron(folder, tmp_path / "meg", "--padded-vocab-size", 384) == 0
    reader = torch_dist.Reader(tmp_path / "meg" / "release")
    rows = reader.read("output_layer.weight", (0, 0), (384, 128))
    assert rows[:320].all(1).any() and not rows[320:].any()
    assert to_hf.read_args(tmp_path / "meg" / "release").padded_vocab_size == 384
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(folder), weights(tmp_path / "back"))
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "more", "--vocab-size", 400) == 2
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "more", "--vocab-size", 330) == 0
    assert config_of(tmp_path / "more")["vocab_size"] == 330
    assert weights(tmp_path / "more")["lm_head.weight"].shape[0] == 330


def test_what_was_read_does_not_keep_its_shard_in_memory(plain):
    shards = Shards(plain[0])
    read = {name: shards.read(name) for name in shards.tensors}
    rows = shards.read("lm_head.weight", (3, 9))
    assert torch.equal(rows, read["lm_head.weight"][3:9])
    shards.close()
    assert str(plain[0]) not in Path("/proc/self/maps").read_text()


def test_older_versions_of_torch_read_it(plain, monkeypatch):
    """Those before 2.15 know five properties of a tensor, no more."""
    seen, read = [], torch_dist.TensorProperties.__setstate__

    def setstate(self, state):
        seen.append(len(state))
        read(self, state)

    monkeypatch.setattr(torch_dist.TensorProperties, "__setstate__", setstate)
    assert torch_dist.Reader(plain[1] / "release").tensors
    assert set(seen) == {5}


def test_large_tensors_go_in_parts(plain, tmp_path, monkeypatch):
    from megatron_mtraining.convert import to_megatron as module

    monkeypatch.setattr(module, "PART_BYTES", 5000)
    assert to_megatron(plain[0], tmp_path / "meg") == 0
    chunks = torch_dist.FileSystemReader(tmp_path / "meg" / "release").read_metadata()
    assert len(chunks.state_dict_metadata["embedding.word_embeddings.weight"].chunks) == 17
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(plain[0]), weights(tmp_path / "back"))


def test_layers_and_experts_saved_one_by_one_are_found(tmp_path):
    """As runs with singleton_local_shards save them."""
    from megatron_mtraining.convert import to_megatron as module
    from megatron_mtraining.convert.names import mapped, places

    folder = save("qwen3 moe", tmp_path / "hf")
    assert to_megatron(folder, tmp_path / "meg") == 0
    model = model_of(config_of(folder), folder / "config.json")
    reader = torch_dist.Reader(tmp_path / "meg" / "release")
    pieces = {}
    for tensor in mapped(model):
        key, size, offset, region = list(places(tensor))[-1]
        whole = reader.read(tensor.key, tensor.offset, tensor.region)
        piece = torch_dist.Piece(key, size, whole.dtype, offset, region, lambda whole=whole: whole)
        pieces[key, offset] = piece
    release = tmp_path / "meg" / "release"
    for file in (".metadata", "__0_0.distcp"):
        (release / file).unlink()
    torch_dist.write(release, list(pieces.values()), [], lambda size: None)
    keys = torch_dist.Reader(release).tensors
    assert "decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_v" in keys
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    same(weights(folder), weights(tmp_path / "back"))
    assert module.PART_BYTES > 1 << 20


def test_types(plain, tmp_path, capsys):
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


def refused(capsys, folder: Path, words, named) -> None:
    """One line of error with these words in it, and no trace of the target."""
    before = sorted(folder.parent.iterdir())
    there = folder.exists() and sorted(
        (path, path.stat().st_mtime_ns) for path in folder.rglob("*")
    )
    assert convert(*words) == 2
    (error,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("mtraining convert:")
    ]
    for word in named:
        assert str(word) in error, error
    assert sorted(folder.parent.iterdir()) == before
    assert there == (
        folder.exists() and sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    )


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
    "more layers": (dict(num_hidden_layers=5), ["model.layers.4."]),
    "fewer layers": (dict(num_hidden_layers=3), ["model.layers.3.", ".safetensors"]),
    "quantised": (dict(quantization_config={"bits": 4}), ["quantization_config"]),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_that_cannot_be_expressed(case, plain, tmp_path, capsys):
    changes, named = BAD_CONFIGS[case]
    shutil.copytree(plain[0], tmp_path / "hf")
    config = {**config_of(plain[0]), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    refused(capsys, tmp_path / "out", ("hf-to-megatron", tmp_path / "hf", tmp_path / "out"), named)


def test_files_that_are_missing_or_cut_off(plain, tmp_path, capsys):
    folder = tmp_path / "hf"
    words = ("hf-to-megatron", folder, tmp_path / "out")
    refused(capsys, tmp_path / "out", words, [folder / "config.json"])
    shutil.copytree(plain[0], folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    refused(capsys, tmp_path / "out", words, [shard, "is missing", "model."])
    shard.write_bytes(content[:-100])
    refused(capsys, tmp_path / "out", words, [shard, "not a whole safetensors file"])
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


def test_another_models_config(plain, tmp_path, capsys):
    config = {**config_of(plain[0]), "num_hidden_layers": 3}
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    words = ("megatron-to-hf", plain[1], tmp_path / "out", "--like", tmp_path / "like")
    refused(capsys, tmp_path / "out", words, ["num_layers is 4", tmp_path / "like"])


def test_targets(plain, tmp_path, capsys, monkeypatch):
    words = ("hf-to-megatron", plain[0], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    refused(capsys, tmp_path / "out", words, [tmp_path / "out", "exists", "--overwrite"])
    refused(capsys, tmp_path / "out", (*words, "--overwrite"), ["config.json"])
    (tmp_path / "out" / "mine").unlink()
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(target.shutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
        refused(capsys, tmp_path / "out", words, ["free", "GiB", tmp_path / "out"])
    assert convert(*words) == 0  # an empty folder is none
    refused(capsys, tmp_path / "out", words, ["exists"])
    (tmp_path / "out" / "stale").write_text("")
    assert convert(*words, "--overwrite") == 0
    assert not (tmp_path / "out" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # What goes wrong later leaves the old one.
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError(28, "No space left on device")

        patch.setattr(Shards, "read", full)
        refused(
            capsys, tmp_path / "out", (*words, "--overwrite"), ["No space left", tmp_path / "out"]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "release" / ".metadata").is_file()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_no_target(how, plain, tmp_path):
    code = (
        "import signal, sys, time\n"
        # Ignored, if the tests run in a script's background.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from megatron_mtraining import cli\n"
        "from megatron_mtraining.convert import torch_dist\n"
        "write = torch_dist.write\n"
        "def slow(*args):\n"
        "    write(*args)\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
        "torch_dist.write = slow\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = ["convert", "hf-to-megatron", str(plain[0]), str(tmp_path / "out")]
    run = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stdout.readline() == "written\n"
    run.send_signal(how)
    assert run.wait(30) == (130 if how == signal.SIGINT else -how)
    left = [path.name for path in tmp_path.iterdir()]
    assert left == [] or (how == signal.SIGKILL and left[0].startswith(".out.partial-"))


def test_positions_go_there_and_back(plain, tmp_path):
    folder, _ = plain
    words = ("--yarn", 4, "--rotary-base", 5000000)
    assert to_megatron(folder, tmp_path / "meg", *words) == 0
    args = to_hf.read_args(tmp_path / "meg" / "release")
    assert (args.position_embedding_type, args.rotary_base) == ("yarn", 5000000)
    assert (args.rotary_scaling_factor, args.yarn_original_max_position_embeddings) == (4.0, 256)
    flags = [word for line in arguments.flags(args) for word in line]
    assert flags[flags.index("--rotary-scaling-factor") + 1] == "4"
    assert flags[flags.index("--max-position-embeddings") + 1] == "1024"
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    found = config_of(tmp_path / "back")
    assert found["max_position_embeddings"] == 1024
    assert found["rope_parameters"]["rope_type"] == "yarn"
    file = tmp_path / "back" / "config.json"
    # Read again, they are the same arguments.
    assert positions.arguments_of(found, file).items() <= vars(args).items()


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        },
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
        {"rope_type": "llama3", "factor": 8.0, **positions.LLAMA3},
    ],
)
def test_positions_of_both_kinds_of_config(rope, old):
    file = Path("config.json")
    config = {"max_position_embeddings": 40960}
    if old:
        config |= {"rope_theta": 10000.0, "rope_scaling": None}
        if rope["rope_type"] != "default":
            config["rope_scaling"] = rope
    else:
        config["rope_parameters"] = {**rope, "rope_theta": 10000.0}
    from argparse import Namespace

    found = positions.arguments_of(config, file)
    assert positions.into_config(config, Namespace(**found), file) is config
    # Another model of the family, brought to the same positions, and read again.
    plain = {"max_position_embeddings": 512, "rope_theta": 5.0}
    if not old:
        plain = {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 5.0}}
    again = positions.into_config(plain, Namespace(**found), file)
    assert positions.arguments_of(again, file) == found


def test_positions_that_are_scaled_already():
    file = Path("config.json")
    config = {"max_position_embeddings": 64, "rope_theta": 1e4}
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match="--yarn is 2"):
        positions.extended(positions.arguments_of(config, file), None, 2.0, None)


def test_the_benchmark_s_rows(tmp_path, monkeypatch):
    """Both ways of a model it makes; its conversions run in this process here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    script = Path(__file__).parent.parent / "benchmarks" / "convert.py"
    spec = importlib.util.spec_from_file_location("benchmark_convert", script)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "apart", lambda function, *words: function(*words))
    spoilt = False

    def converted(way, source, folder, *words):
        assert convert(way, source, folder, *words) == 0
        if spoilt and way == "megatron-to-hf":
            file = sorted(folder.glob("*.safetensors"))[0]
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        return 1.0, 5 * 10**9

    monkeypatch.setattr(benchmark, "converted", converted)
    words = ["time", "--shape", "tiny", "--layers", "3", "--shard-bytes", "100KB"]
    options = benchmark.parse([*words, "--folder", str(tmp_path)])
    row = benchmark.times(options)
    assert row["identical"] and row["shards"] > 2 and row["largest_shard"] < 110_000
    assert row["layers"] == 3 and not row["within_budget"]
    assert "bit-identical" in benchmark.line(row)
    spoilt = True
    assert not benchmark.times(options)["identical"]
    assert not list(tmp_path.iterdir())
