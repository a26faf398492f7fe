# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sliding windows and learnable softmax offsets in Megatron-LM's own pretrain_gpt.py on CPU: runs of dense
attention by Megatron, and of ours (see test_pretrain.py)."""

import re

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from tests.support.pretrain_tree import check_same, losses, step_losses

STEPS = 6
LIKE_GPT_OSS = "--window-size 100,0 --window-attn-skip-freq 2 --softmax-type learnable".split()
LIKE_GPT_OSS += ["--train-iters", str(STEPS)]
OURS = "--attention-backend mtraining --mtraining-block-size 64 --mtraining-price 0".split()


@pytest.fixture(scope="module")
def theirs(tree):
    return tree.plain(1, *LIKE_GPT_OSS)


def test_ranks_train_as_megatron_does(tree, theirs):
    run = tree.run("launcher", 2, *LIKE_GPT_OSS, *OURS, "--context-parallel-size", "2")
    check_same(run, theirs, steps=STEPS)
    found = re.findall(
        r"iteration (\d+) \| density (\S+) .*\| density of sliding windows (\S+)", run.stdout
    )
    assert len(found) == STEPS
    pairs = sum(min(token + 1, 101) for token in range(512)) / (512 * 513 / 2)
    assert {(density, window) for _, density, window in found} == {("1.0000", f"{pairs:.4f}")}


OFFSETS = "decoder.layers.self_attention.core_attention.softmax_offset"


def saved_offsets(folder) -> torch.Tensor:
    state = {OFFSETS: torch.empty(2, 4)}
    reader = FileSystemReader(folder / f"iter_{STEPS:07}")
    load(state, storage_reader=reader, no_dist=True)
    return state[OFFSETS]


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [False, True])
def test_a_checkpoint_of_either_attention_goes_on_with_the_other(tree, tmp_path, ours_first):
    """With its softmax offsets: at this learning rate, others than those that a run begins with."""
    half, kept = STEPS // 2, tmp_path / "kept"
    shared = [*LIKE_GPT_OSS, "--lr", "1e-2", "--ckpt-format", "torch_dist"]
    shared += ["--save-interval", str(half)]
    ours = ("launcher", 2, *shared, *OURS, "--context-parallel-size", "2")
    theirs = ("plain", 1, *shared)
    first, second = (ours, theirs) if ours_first else (theirs, ours)
    whole = step_losses(losses(tree.run(*first, "--save", kept), STEPS))
    (kept / "latest_checkpointed_iteration.txt").write_text(str(half))
    resumed = tree.run(*second, "--load", kept, "--save", tmp_path / "resumed")
    found = step_losses(losses(resumed, STEPS - half))
    assert found == pytest.approx(whole[half:], abs=1e-4, rel=0)
    torch.testing.assert_close(
        saved_offsets(tmp_path / "resumed"), saved_offsets(kept), rtol=0, atol=1e-3
    )
