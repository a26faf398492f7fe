# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sliding windows and learnable softmax offsets in Megatron-LM's own pretrain_gpt.py on CPU: runs of dense
attention by Megatron, and of ours (see test_pretrain.py)."""

import re

import pytest

from tests.support.pretrain_tree import check_same

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
