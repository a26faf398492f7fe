# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan memory``: its table, JSON, searches and errors, and the tables of docs/memory.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.plan import memory, report
from tests.support.plan_cases import EXAMPLE, OURS, SMALL, made

ROOT = Path(__file__).parents[3]


def plan_json(capsys, *words: str) -> dict:
    assert main(["plan", "memory", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_flags_that_megatron_does_not_have_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(report, "flags_of_megatron", lambda: {"--lr": None})
    found = plan_json(capsys, *SMALL.split(), "--lr", "1", "--lrr", "2")
    assert (found["passed_over"], found["unknown"]) == (["--lr"], ["--lrr"])


def test_the_longest_sequence_that_fits(capsys):
    flags = (EXAMPLE + OURS).split()
    found = plan_json(capsys, "--gpu-memory-gib", "100", "--find", "seq-length", "--", *flags)
    length = found["seq_length"]
    assert found["fits"] and length % 512 == 0 and length > 131072
    longer = str(length + 512)
    status = main(
        [
            "plan",
            "memory",
            "--gpu-memory-gib",
            "100",
            *flags,
            "--seq-length",
            longer,
            "--max-position-embeddings",
            longer,
        ]
    )
    assert status == 1 and "does not fit" in capsys.readouterr().out


def test_the_fewest_gpus(capsys):
    flags = (EXAMPLE + OURS + "--seq-length 524288 --max-position-embeddings 524288").split()
    search = ("--gpu-memory-gib", "79", "--find", "context-parallel-size")
    found = plan_json(capsys, *search, *flags)
    assert found["world_size"] == 8 and found["fits"]
    sizes = ("--hierarchical-context-parallel-sizes", "4", "4")
    pinned = plan_json(capsys, *search, *flags, *sizes)
    assert pinned.pop("found_with") == f"--context-parallel-size 8, {sizes[0]} 4 2"
    found.pop("found_with")
    assert pinned["world_size"] == 8
    half = plan_json(capsys, *flags)
    assert half["world_size"] == 4 and half["fits"] is None
    assert half["needed"] > 79 * memory.GIB >= found["needed"]


def test_a_table_and_errors_of_the_command(capsys, tmp_path):
    file = tmp_path / "flags"
    file.write_text("# a model\n" + SMALL.replace(" --seq", " \\\n  --seq"))
    assert main(["plan", "memory", "--flags-file", str(file), "--bf16", "--lr", "1"]) == 0
    text = capsys.readouterr().out
    assert "attention saved for recomputation" in text and "to change memory: --lr" in text
    assert main(["plan", "memory", "--gpu", "a100-40g", "--", *SMALL.split(), "--bf16"]) == 0
    text = capsys.readouterr().out
    assert "It fits a GPU of 39.4 GiB" in text and "with 15% of the pairs takes about" in text
    assert "no step was measured on this GPU" in text
    (tmp_path / "empty").write_text("# a run.sh --dry-run that failed\n")
    for words, message in (
        (["--flags-file", str(tmp_path / "empty")], "empty has no flags: the command that wrote it may"),
        (["--find", "seq-length"], "--find needs --gpu or --gpu-memory-gib"),
        (["--gpu", "h20"], "--gpu is h20: known are h200,"),
        (["--density", "0.5", *SMALL.split()], "--density is of a step's time: give --gpu, too"),
        (["--gpu", "h200", *SMALL.split(), "--window-size", "64,0"], "no step with --window-size"),
        (["--gpu", "h200", "--nodes", "3", *SMALL.split()], "3 nodes do not share"),
        (["--gpu-memory-gib", "-1"], "must be positive"),
        (["--flags-file", str(tmp_path / "none")], "cannot be read"),
        (["--gpu-memory-gib", "1", "--find", "seq-length", *EXAMPLE.split(), *OURS.split()], "no seq-length"),
    ):  # fmt: skip
        assert main(["plan", "memory", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_step_of_a_command(capsys):
    """With all pairs where all are kept; over the nodes that torchrun is told of."""
    kept = [*EXAMPLE.split(), *OURS.split(), "--mtraining-price", "0"]
    assert plan_json(capsys, "--gpu", "h200", *kept)["step"]["density"] == 1
    script = ["torchrun", "--nproc-per-node", "2", "--nnodes", "2", "pretrain_gpt.py"]
    two, one = (
        plan_json(capsys, "--gpu", "h200", *nodes, "--", *script, *EXAMPLE.split(), *OURS.split())
        for nodes in ((), ("--nodes", "1"))
    )
    assert two["step"]["communication_s"] > one["step"]["communication_s"]


def test_more_gpus_than_torchrun_starts_are_on_more_hosts(capsys):
    script = ["--", "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py"]
    flags = [*EXAMPLE.split(), *OURS.split()]
    words = ["--gpu", "h200", "--world-size", "4"]
    four, given = (
        plan_json(capsys, *words, *more, *flags) for more in (script, ["--nodes", "2", *script])
    )
    assert four["step"] == given["step"]
    one = plan_json(capsys, *words, "--nodes", "1", *script, *flags)
    assert four["step"]["communication_s"] > one["step"]["communication_s"]


DOCUMENTED = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_documented_table_is_the_tools(capsys):
    flags = EXAMPLE + OURS + "--seq-length 524288 --max-position-embeddings 524288"
    assert main(["plan", "memory", "--gpu-memory-gib", "139", *flags.split()]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed).strip() in DOCUMENTED


@pytest.mark.parametrize("tokens", [131072, 262144, 524288, 1048576])
def test_the_documented_peaks_are_the_tools(tokens):
    peaks = []
    for more in ("", "--mtraining-recompute-attention", "--mtraining-loss-chunk 0"):
        length = f"--seq-length {tokens} --max-position-embeddings {tokens} "
        (stage,) = memory.plan(made(EXAMPLE + OURS + length + more))
        peaks.append(f"{stage.allocated / memory.GIB:.1f}")
    assert f"| {tokens} | {' | '.join(peaks)} |" in DOCUMENTED
