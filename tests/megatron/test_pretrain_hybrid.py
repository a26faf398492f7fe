# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron-LM's own pretrain_hybrid.py on CPU, through the launcher (Megatron 0.18 or later)."""

import re

import pytest

from tests.support.pretrain_tree import check_same, losses

pytestmark = pytest.mark.slow
SCRIPT, STEPS = "pretrain_hybrid.py", 4
HYBRID = f"--spec tests.support.hybrid_models hybrid_stack_spec --train-iters {STEPS}".split()
OURS = ["--attention-backend", "mtraining", "--mtraining-block-size", "64"]
EVERYTHING = [*OURS, "--mtraining-slash", "all"]
CP = "--context-parallel-size 2 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type allgather "
)
GATED = (
    "--deterministic-mode --linear-key-head-dim 16 --linear-value-head-dim 32 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 "
)
STAGES = "--pipeline-model-parallel-size 2 "
CASES = {
    # pattern, processes, and what else; of the run of dense attention: processes, and what else
    "CP 2": ("*-*-", 2, CP + "--mtraining-loss-chunk 100", 1, ""),
    "experts, CP 2, recomputed": ("*E-*E", 2, CP + FULL + EXPERTS, 1, EXPERTS),
    "gated delta nets, CP 2": ("G-*-", 2, CP + GATED, 1, GATED),
    # Stages draw weights of their own.
    "CP 2 x PP 2": ("*-|-*", 4, CP + STAGES, 2, STAGES),
}


@pytest.fixture(scope="module", autouse=True)
def script(tree):
    if not (tree.roots["launcher"] / SCRIPT).exists():
        pytest.skip(f"this Megatron-LM has no {SCRIPT}")


def densities(run) -> list[float]:
    found = re.findall(r"\[mtraining\] iteration \d+ \| density (\S+) ", run.stdout)
    return [float(density) for density in found]


@pytest.mark.parametrize("name", CASES)
def test_with_everything_kept_steps_are_those_of_dense_attention(name, tree, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # Megatron asks for it with --deterministic-mode
    pattern, processes, words, dense_processes, dense_words = CASES[name]
    given = [*HYBRID, "--hybrid-layer-pattern", pattern]
    dense = tree.run("plain", dense_processes, *given, *dense_words.split(), script=SCRIPT)
    run = tree.run("launcher", processes, *given, *words.split(), *EVERYTHING, script=SCRIPT)
    check_same(run, dense, steps=STEPS)
    assert densities(run) == [1.0] * STEPS


def test_a_pattern_trains(tree):
    """With a target of each head, in the layers that have some."""
    words = "--context-parallel-size 2 --mtraining-target-recall 0.9 --mtraining-target-scope head".split()
    pattern = ["--hybrid-layer-pattern=-*-*", "--train-iters", "12"]
    run = tree.run("launcher", 2, *HYBRID, *pattern, *OURS, *words, script=SCRIPT)
    found = losses(run, 12)
    assert found[-1] < found[0] - 0.05
    assert 0.1 < min(densities(run)) < 0.95, densities(run)
    prices = [float(price) for price in re.findall(r"\[mtraining\].* \| price (\S+)", run.stdout)]
    assert prices[-1] != prices[0]
