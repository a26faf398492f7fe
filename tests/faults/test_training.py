# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron-LM's own training, killed while it saves a checkpoint: the run goes on from the one before.

MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/faults/test_training.py
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.pretrain_tree import losses
from tests.support.running import torchrun_command

STEPS, EACH = 7, 3
OURS = f"""
    --attention-backend mtraining --mtraining-block-size 64 --context-parallel-size 2 --train-iters {STEPS}
    --ckpt-format torch_dist --save-interval {EACH}
""".split()


def killed_while_saving(tree, folder: Path) -> str:
    """Kill all processes of a run as soon as its second checkpoint is begun; returns what it printed."""
    command, root = tree.command("launcher", *OURS, "--save", folder)
    command, environment = torchrun_command(2, *command, PYTHONPATH=str(root))
    begun, end = folder / f"iter_{2 * EACH:07d}", time.monotonic() + 240
    output = folder.with_name(
        "output"
    )  # a pipe that nobody reads would stop the run when it is full
    with output.open("w") as file:
        run = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        while not begun.exists():
            assert run.poll() is None and time.monotonic() < end, output.read_text()[-4000:]
            time.sleep(0.001)
    finally:
        parent = psutil.Process(run.pid) if run.poll() is None else None
        for process in [*(parent.children(recursive=True) if parent else []), parent]:
            if process is not None and process.is_running():
                process.kill()
        run.wait(60)
    return output.read_text()


def step_losses(printed: list[float]) -> list[float]:
    """The loss of each step of a run that logs every step.

    Megatron's ``training_log`` does not reset its sums after a run's first log line, so the second line is
    the mean of the first two steps.
    """
    first, mean_of_two, *others = printed
    return [first, 2 * mean_of_two - first, *others]


@pytest.mark.slow
def test_killed_while_saving_it_goes_on_with_the_same_losses(tree, tmp_path):
    run = tree.run("launcher", 2, *OURS, "--save", tmp_path / "whole")
    whole = step_losses(losses(run, STEPS))
    folder = tmp_path / "killed"
    printed = killed_while_saving(tree, folder)
    tracker = folder / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(EACH), "killed too late for this test"
    assert len(re.findall(r"lm loss: ", printed)) in (2 * EACH - 1, 2 * EACH)
    again = tree.run("launcher", 2, *OURS, "--save", folder, "--load", folder)
    # Lines have seven digits, and the second step's loss is computed from two of them.
    assert step_losses(losses(again, STEPS - EACH)) == pytest.approx(whole[EACH:], abs=4e-6, rel=0)
    assert tracker.read_text() == str(STEPS)
