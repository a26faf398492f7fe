# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan layouts``: its predictions beside measured steps, what it proposes, and its errors."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import jobs, record
from benchmarks.lib.planned import newest, planned
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.common.sizes import tokens_of
from megatron_mtraining.tools.plan import shapes
from megatron_mtraining.tools.plan.layouts import default_batch, words_of
from tests.support.convert_cases import save

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
SMALL = "--hf Qwen2.5-3B --seq 512K --gpus 4 --gpu h200 --batch 1"


def planned_json(capsys, words: str) -> dict:
    assert main(["plan", "layouts", "--json", *words.split()]) == 0
    return json.loads(capsys.readouterr().out)


def test_predictions_are_near_measured_steps():
    rows = newest(jobs.read(record.RESULTS / "pretrain.jsonl"))
    errors = [abs(planned(row).total / (row["iter_ms"] / 1000) - 1) for row in rows]
    assert len(rows) > 20 and statistics.median(errors) < 0.1 and max(errors) < 0.2


def test_the_page_shows_what_the_command_prints(capsys):
    command = "mtraining plan layouts --hf Qwen2.5-7B --seq 256K --gpus 16 --gpu h100-80g"
    text = PAGE.read_text(encoding="utf-8")
    assert f"    {command}\n" in text
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr().out.split("\n\n", 1)[1]
    assert printed.strip() in text


def test_layouts_fit_and_the_flags_of_the_first_make_it(capsys):
    found = planned_json(capsys, SMALL)
    times = [each["step_s"] for each in found["layouts"]]
    assert times == sorted(times) and found["dense"][0]["step_s"] > 3 * times[0]
    first = found["layouts"][0]
    assert (first["tensor"], first["context"], first["groups"]) == (1, 4, [4, 1])
    parts = [f"{part}_s" for part in ("attention", "layers", "loss", "communication", "bubble")]
    assert sum(first[part] for part in parts) < first["step_s"] < 1.01 * sum(map(first.get, parts))
    model = words_of(shapes.shape_of("Qwen2.5-3B"), 524288)
    flags = [*model, "--seq-length", "524288", "--vocab-size", "151936", *first["flags"].split()]
    assert main(["plan", "memory", "--json", "--gpu", "h200", "--", *flags]) == 0
    memory = json.loads(capsys.readouterr().out)
    assert memory["step"] == {
        "gpu": "h200", "measured_gpu": True, "density": 0.15, "tokens_per_s_gpu": first["tokens_per_s_gpu"],
        **{name: first[name] for name in ("step_s", *parts)},
    }  # fmt: skip
    assert memory["fits"] and memory["needed"] / 2**30 == pytest.approx(first["need_gib"], abs=0.1)


def test_keys_are_gathered_in_hosts_and_a_slow_link_shows(capsys):
    words = "--hf Qwen2.5-7B --seq 1M --gpus 32 --gpu h100-80g --batch 1 --top 99 --link"
    fast, slow = (planned_json(capsys, f"{words} {link}")["layouts"] for link in (50, 0.5))

    def of(found):
        sizes = ("tensor", "pipeline", "context", "recompute")
        return {tuple(each[name] for name in sizes): each for each in found}

    for sizes, each in of(fast).items():
        own = 8 // sizes[0]
        assert each["groups"][0] == min(own, sizes[2])
        if own == 1 < sizes[2]:
            assert "--mtraining-gathered-ranks 1" in each["flags"]
    whole = (1, 1, 32, "layers, attention kept")
    assert of(slow)[whole]["communication_s"] > of(fast)[whole]["communication_s"]
    assert of(slow)[whole]["attention_s"] == of(fast)[whole]["attention_s"]


def test_ranks_that_hosts_do_not_share_evenly_take_the_slow_link(capsys):
    """Of 6 GPUs a host, the second 4 are on two hosts; so are 4 x 4 ranks of hosts of 8."""
    words = "--hf Qwen2.5-3B --seq 128K --gpus 12 --nodes 2 --gpu h200 --batch 12 --top 99 --link"
    fast, slow = (planned_json(capsys, f"{words} {link}")["layouts"] for link in (150, 1))

    def exposed(found):
        return {
            (each["tensor"], each["context"]): each["communication_s"]
            for each in found
            if each["pipeline"] == 1
        }

    more = {sizes: exposed(slow)[sizes] - seconds for sizes, seconds in exposed(fast).items()}
    of_gradients = more[1, 1]
    for sizes, seconds in more.items():
        assert (seconds * sizes[0] > 1.2 * of_gradients) == (sizes[0] * sizes[1] == 4), sizes
    flags = [*words_of(shapes.shape_of("Qwen2.5-3B"), 131072), "--seq-length", "131072"]
    flags += "--vocab-size 151936 --micro-batch-size 1 --bf16 --attention-backend mtraining".split()
    flags += "--tensor-model-parallel-size 4 --context-parallel-size 4 --sequence-parallel".split()
    times = []
    for link in ("150", "1"):
        assert main(["plan", "memory", "--json", "--gpu", "h200", "--link", link, "--", *flags]) < 2
        times.append(json.loads(capsys.readouterr().out)["step"]["communication_s"])
    assert times[1] > 10 * times[0]


@pytest.mark.parametrize(
    ("seq", "batch"), [("1M", 4), ("1536K", 4), ("96K", 64), ("4M", 1), ("8M", 1)]
)
def test_a_step_has_the_tokens_that_help_says(seq, batch):
    length = tokens_of(seq)
    assert default_batch(length) == batch and batch * length >= 4 * 2**20


def test_a_sparser_pattern_and_a_folder(capsys, tmp_path):
    folder = save("qwen2 tied", tmp_path)
    words = f"--hf {folder} --seq 8K --gpus 2 --gpu H200 --density"
    dense, sparse = (planned_json(capsys, f"{words} {share}")["layouts"] for share in (1, 0.1))
    assert sparse[0]["attention_s"] < dense[0]["attention_s"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(num_key_value_heads="2"), "config.json has a value of the wrong type"),
        (dict(architectures=5), "config.json has a value of the wrong type"),
        (dict(head_dim=80), "is 80, for which attention backend mtraining has no kernels"),
        (dict(vocab_size=10**30), "--vocab-size is 1000000000000000000000000000000: it must be at most"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_planned(changes, said, tmp_path, capsys):
    folder = save("qwen2 tied", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert main(["plan", "layouts", *f"--hf {folder} --seq 8K --gpus 2 --gpu h200".split()]) == 2
    assert said in capsys.readouterr().err


def test_a_model_whose_config_is_no_json(tmp_path, capsys):
    for content in ("[" * 100_000, "{"):
        (tmp_path / "config.json").write_text(content)
        assert (
            main(["plan", "layouts", *f"--hf {tmp_path} --seq 8K --gpus 2 --gpu h200".split()]) == 2
        )
        assert "config.json is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SMALL.replace("h200", "h300"), "--gpu is h300: known are h200, h100-80g"),
        (SMALL.replace("3B", "9B"), "--hf is Qwen2.5-9B: give a folder with a config.json, or one of"),
        (SMALL.replace("512K", "512k5"), "'512k5' is no number of tokens such as 131072, 128K or 1M"),
        (SMALL + " --density 0", "--density is 0: use a share above 0, up to 1"),
        (SMALL + " --nodes 3", "3 nodes do not share 4 GPUs evenly"),
        (SMALL.replace("512K", "500"), "no layout divides --seq 500, the GPUs, --batch 1, heads and layers"),
        (
            "--hf Qwen2.5-72B --seq 1M --gpus 8 --gpu h100-80g",
            "the smallest layout needs 395.1 GiB a GPU, 316.0 more than there are; 128 GPUs would do",
        ),
    ],
)  # fmt: skip
def test_refusals(words, said, capsys):
    try:
        status = main(["plan", "layouts", *words.split()])
    except SystemExit as error:
        status = error.code
    assert status == 2 and said in capsys.readouterr().err


def test_megatron_is_not_imported():
    """Its import takes several times as long as the rest of the command."""
    words = "plan layouts --hf qwen2.5-0.5b --seq 32K --gpus 4 --gpu h200".split()
    script = (
        "import sys; from megatron_mtraining.tools.cli import main; "
        f"assert main({words}) == 0; print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    imported = run.stdout.split()
    assert "torch" in imported
    for name in ("megatron.core", "transformers", "torch.distributed.checkpoint"):
        assert name not in imported
