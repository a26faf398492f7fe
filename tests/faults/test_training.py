# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron-LM's own training, killed while it saves a checkpoint: the run goes on from the one before.

MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/faults/test_training.py
"""

from __future__ import annotations

import re

import pytest

from tests.support.pretrain_tree import losses, step_losses

STEPS, EACH = 7, 3
OURS = f"""
    --attention-backend mtraining --mtraining-block-size 64 --context-parallel-size 2 --train-iters {STEPS}
    --ckpt-format torch_dist --save-interval {EACH}
""".split()


@pytest.mark.slow
def test_killed_while_saving_it_goes_on_with_the_same_losses(tree, tmp_path):
    run = tree.run("launcher", 2, *OURS, "--save", tmp_path / "whole")
    whole = step_losses(losses(run, STEPS))
    folder = tmp_path / "killed"
    is_begun = (folder / f"iter_{2 * EACH:07d}").exists
    printed = tree.run_until(is_begun, tmp_path / "output", 2, *OURS, "--save", folder)
    tracker = folder / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(EACH), "killed too late for this test"
    assert len(re.findall(r"lm loss: ", printed)) in (2 * EACH - 1, 2 * EACH)
    again = tree.run("launcher", 2, *OURS, "--save", folder, "--load", folder)
    # Lines have seven digits, and the second step's loss is computed from two of them.
    assert step_losses(losses(again, STEPS - EACH)) == pytest.approx(whole[EACH:], abs=4e-6, rel=0)
    assert tracker.read_text() == str(STEPS)
