# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""examples/pretrain_qwen2.5_3b.sh starts what its page says."""

from __future__ import annotations

import pytest

from tests.support.recipes import EXAMPLES, command, stand_in, start

TORCHRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@"
"""
FIXED = ["--mtraining-vertical", "1000", "--mtraining-slash", "100"]
CASES = {
    # what is given: environment, words, the arguments that select the pattern
    "random weights": ({}, [], FIXED),
    "a checkpoint": ({"CHECKPOINT": "run"}, [], ["--mtraining-price", "0.25"]),
    "a folder for checkpoints": ({"CHECKPOINT": "new"}, [], FIXED),
    "both": (
        {"VERTICAL": "7"},
        ["--mtraining-slash", "5"],
        ["--mtraining-vertical", "7", *FIXED[2:], "--mtraining-slash", "5"],
    ),
    "a price": ({"PRICE": "0.5"}, [], ["--mtraining-price", "0.5"]),
    "columns": ({"VERTICAL": "7"}, [], ["--mtraining-vertical", "7", *FIXED[2:]]),
    "another option": ({}, ["--mtraining-sink", "0"], [*FIXED, "--mtraining-sink", "0"]),
    "a target": ({}, ["--mtraining-target-recall", "0.9"], ["--mtraining-target-recall", "0.9"]),
    "dense": ({"ATTENTION": "fused"}, [], []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_selects_the_pattern(case, tmp_path):
    environment, words, expected = CASES[case]
    checkout = stand_in(tmp_path / "Megatron-LM")
    command(tmp_path / "commands", "torchrun", TORCHRUN)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    if "CHECKPOINT" in environment:
        environment = {"CHECKPOINT": str(tmp_path / environment["CHECKPOINT"])}
    script = EXAMPLES / "pretrain_qwen2.5_3b.sh"
    run = start(script, checkout, *words, commands=tmp_path / "commands", **environment)
    assert run.returncode == 0, run.stderr
    given = run.stdout.splitlines()
    at = given.index("--attention-backend")
    assert given[at + 1] == environment.get("ATTENTION", "mtraining")
    assert given[at + 2 :] == expected


def test_no_checkout(tmp_path):
    run = start(EXAMPLES / "pretrain_qwen2.5_3b.sh", tmp_path, commands=tmp_path)
    assert run.returncode == 2 and f"there is no pretrain_gpt.py in {tmp_path}" in run.stderr
