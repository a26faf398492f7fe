# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Converted checkpoints in Megatron: loaded and resharded by Megatron-Core, with Hugging Face's logits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from megatron_mtraining.tools import cli
from tests.support.convert_cases import CASES, case_id, save
from tests.support.ranks import run_script

NORM = "model.norm.weight"
SUPPORT = Path(__file__).parents[2] / "support"


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(tokens).logits


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder for each case: the model in both formats, tokens, and transformers' logits."""
    root = tmp_path_factory.mktemp("models")
    tokens = torch.randint(300, (2, 96), generator=torch.manual_seed(2))
    folders = []
    for number, name in enumerate(CASES):
        folder = root / f"{number}-{case_id(name)}"
        save(name, folder / "hf")
        padding = ["--padded-vocab-size", "384"] if name == "qwen2" else []
        assert (
            cli.main(["convert", "hf-to-megatron", f"{folder}/hf", f"{folder}/meg", *padding]) == 0
        )
        torch.save(tokens, folder / "tokens.pt")
        torch.save(logits(folder / "hf", tokens), folder / "logits.pt")
        folders.append(folder)
    return folders


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)], ids=["tp1-pp1", "tp2-pp2"])
def test_logits_equal_those_of_transformers(tp, pp, converted):
    done = run_script(tp * pp, SUPPORT / "convert_worker.py", tp, pp, *converted)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("ok: ") == len(converted), done.stdout


def test_verify(converted, tmp_path, capsys):
    """PASS for the same model, with attention backend mtraining at a dense budget; FAIL for others."""
    import json

    import numpy as np

    folder = next(path for path in converted if path.name.endswith("qwen3"))
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, 300, 256))
    words = ["--text", f"{tmp_path}/ids.npy", "--device", "cpu", "--output", f"{tmp_path}/out.json"]
    words.append("--overwrite")
    assert cli.main(["convert", "verify", f"{folder}/hf", f"{folder}/meg", *words]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tokens"] == 256 and len(found["ranges"]) == 8
    assert found["all"]["max"] < 1e-4 and found["all"]["top1"] == 1
    assert "Perplexity" in capsys.readouterr().out
    # Another model.
    other = next(path for path in converted if path.name.endswith("llama-3"))
    assert cli.main(["convert", "verify", f"{other}/meg", f"{folder}/hf", *words]) == 1
    assert json.loads((tmp_path / "out.json").read_text())["all"]["top1"] < 0.9
    assert "they are not the same model" in capsys.readouterr().out
    shutil.copytree(folder / "hf", tmp_path / "hf")
    # Logits that are not finite.
    shard = next(
        path for path in (tmp_path / "hf").glob("*.safetensors") if NORM in load_file(path)
    )
    tensors = load_file(shard)
    tensors[NORM][3] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    pair = f"{folder}/hf", f"{tmp_path}/nan"
    assert cli.main(["convert", "hf-to-megatron", f"{tmp_path}/hf", pair[1]]) == 0
    assert cli.main(["convert", "verify", *pair, *words]) == 1
    assert "logits of DST are not finite at 256 of 256 positions" in capsys.readouterr().out
    shard = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    shard.unlink()
    assert cli.main(["convert", "verify", f"{tmp_path}/hf", f"{folder}/meg", *words]) == 2
    assert f"{shard} is missing" in capsys.readouterr().err


def test_checkpoint_saved_by_megatron(converted, tmp_path):
    """A checkpoint that Megatron-Core has saved, without hf/, converts back with --like."""
    from unittest import mock

    from megatron.core import dist_checkpointing

    from megatron_mtraining.models.environment import single_process
    from tests.support.convert_cases import weights
    from tests.support.convert_worker import build, load

    folder = next(path for path in converted if path.name.endswith("qwen2-tied"))
    release = str(folder / "meg" / "release")
    with single_process(torch.device("cpu")):
        args = dist_checkpointing.load_common_state_dict(release)["args"]
        args.rotary_base = 5000000
        model = build(args, 1, 1)
        load(model, release)
        (tmp_path / "run" / "iter_0000003").mkdir(parents=True)
        state = {"args": args, "iteration": 3, "model": model.sharded_state_dict()}
        with mock.patch.object(torch.cuda, "synchronize"):
            dist_checkpointing.save(state, str(tmp_path / "run" / "iter_0000003"))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    words = ["convert", "megatron-to-hf", f"{tmp_path}/run", f"{tmp_path}/hf"]
    assert cli.main(words) == 2  # whose config.json?
    assert cli.main([*words, "--like", f"{folder}/hf"]) == 0
    before, after = weights(folder / "hf"), weights(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    from transformers import AutoConfig

    changed = AutoConfig.from_pretrained(tmp_path / "hf").rope_parameters
    assert changed == {"rope_type": "default", "rope_theta": 5e6}
