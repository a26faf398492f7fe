# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient norms of Megatron-LM's pretrain_gpt.py on CPU where ranks have unequal loss tokens, or experts;
and the operations that it counts.

MEGATRON_LM_PATH=/path/to/Megatron-LM[:/another] pytest tests/megatron/test_pretrain_normalization.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_mtraining.checkout import read_version
from megatron_mtraining.relayout import zigzag
from tests.support.pretrain_tree import (
    MOCK,
    MODEL,
    SEQUENCE,
    SHIM,
    TRAINING,
    check_same,
    losses,
    norms,
)

STEPS, BLOCK, EOD = 3, 64, 99
OURS = f"--train-iters {STEPS} --attention-backend mtraining --mtraining-block-size {BLOCK} "
DENSE = OURS + "--mtraining-slash all "
CP, PER_TOKEN = "--context-parallel-size 2 ", "--calculate-per-token-loss "
WARNING = "[mtraining] warning: "


@pytest.fixture(scope="module")
def uneven(tree, tmp_path_factory):
    """Data in which the second of two ranks has no loss tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("uneven")
    random, masked = np.random.default_rng(3), zigzag(torch.arange(SEQUENCE), 1, 2, 0)
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), np.uint16)
    for _ in range(40):
        document = random.integers(EOD, size=SEQUENCE)
        document[masked.numpy()] = EOD
        builder.add_document(document, [SEQUENCE])
    builder.finalize(str(folder / "data.idx"))
    return (
        f"--data-path {folder / 'data'} --data-cache-path {folder / 'cache'} --split 1,0,0 "
        f"{tree.null_tokenizer(EOD)} --eod-mask-loss"
    )


def test_only_a_mean_over_tokens_is_the_same_on_ranks_with_unequal_loss_tokens(tree, uneven):
    def run(ranks, *words):
        return tree.run("launcher", ranks, *" ".join([DENSE, *words]).split(), data=uneven)

    one = run(1, PER_TOKEN)
    check_same(run(2, CP, PER_TOKEN), one, steps=STEPS)
    wrong = run(2, CP)
    assert losses(wrong, STEPS)[0] == pytest.approx(losses(one, STEPS)[0], abs=1e-5)
    assert norms(wrong, STEPS)[0] == pytest.approx(norms(one, STEPS)[0] / 2, rel=2e-3)
    assert f"{WARNING}--context-parallel-size is 2, and Megatron divides the loss" in wrong.stdout
    assert WARNING not in one.stdout


# With 1, auxiliary losses are as large as the other: their gradients are seen in the norm.
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
EXPERTS += "--moe-aux-loss-coeff {} "


def test_auxiliary_losses_of_experts_do_not_depend_on_ranks(tree):
    """Before 0.19, the coefficient must be what the warning says."""

    def run(ranks, words):
        return tree.run("launcher", ranks, *words.split())

    one = run(1, DENSE + PER_TOKEN + EXPERTS.format(1))
    version = read_version(tree.roots["launcher"])
    old = (version["MAJOR"], version["MINOR"]) < (0, 19)
    two = run(2, DENSE + PER_TOKEN + CP + EXPERTS.format(2 if old else 1))
    check_same(two, one, steps=STEPS)
    assert ("give --moe-aux-loss-coeff 2 times as large" in two.stdout) == old


OPERATIONS = """
import json
from megatron.training import training
from megatron.training.arguments import parse_args, validate_args
from megatron_mtraining.megatron.run_state import RUN

args = parse_args()
args = validate_args(args) or args
args.padded_vocab_size = 512
counts = []
for RUN.computed in 1.0, 0.5, 0.0:
    for args.seq_length, samples in (512, 4), (1024, 2):
        counts.append(training.num_floating_point_operations(args, samples))
print(json.dumps(counts))
"""


def test_throughput_without_attention_is_linear_in_the_length(tree, tmp_path):
    """What is taken off is all that this Megatron counts for attention."""
    (tmp_path / "operations.py").write_text(OPERATIONS)
    words = [*MODEL.split(), *TRAINING.split(), *MOCK.split(), *OURS.split()]
    command = [sys.executable, SHIM, tmp_path / "operations.py", *words]
    path = os.pathsep.join([str(tree.roots["patch"]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    dense, dense_long, half, half_long, rest, rest_long = json.loads(run.stdout.splitlines()[-1])
    assert rest == pytest.approx(rest_long) and rest > 0
    assert dense_long - rest == pytest.approx(2 * (dense - rest)) and dense > rest
    assert (half, half_long) == pytest.approx(((dense + rest) / 2, (dense_long + rest) / 2))
