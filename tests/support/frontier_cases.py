# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rows of ``benchmarks/model/frontier.py`` with made-up numbers."""

COMMON = dict(
    model="m", block_size=128, gpu="NVIDIA H200", torch="2.11", triton="3.6", commit="abc",
    command="python -m benchmarks.model.frontier zero", versions={"torch": "2.11"},
)  # fmt: skip


def zero_row(policy, wanted, over, density=None):
    return dict(
        stage="zero", seq=16384, policy=policy, wanted=wanted, setting={"policy": policy},
        density=density or wanted or 1.0, recall=0.9, zero_over_dense=over, needle=0.5, answer_loss=2.0,
        dense_needle=0.6, dense_answer_loss=1.9, **COMMON,
    )  # fmt: skip


def train_row(policy, wanted, seed, own, dense, steps=300):
    return dict(
        stage="train", seq=16384, policy=policy, wanted=wanted, seed=seed, steps=steps, lr=3e-5, own=own,
        dense=dense, density=0.9 * (wanted or 1.0), recall=0.95, setting={"policy": policy}, needle_own=0.4,
        needle_dense=0.5, answer_loss_own=1.5, answer_loss_dense=1.4, **COMMON,
    )  # fmt: skip


def time_row(policy, wanted, seq, forward):
    return dict(
        stage="time", seq=seq, policy=policy, wanted=wanted, density=wanted, forward_ms=forward,
        backward_ms=2 * forward, search_ms=1.0, dense_forward_ms=100.0, dense_backward_ms=200.0,
        setting={"policy": policy}, **{**COMMON, "commit": "def"},
    )  # fmt: skip


def layer_row(price, ours, number=0, threshold=0.0, text="code", gpu="H100"):
    """Of ``benchmarks/model/real_operands.py``; dense attention takes 100 ms."""
    return dict(
        model="coder.gguf", text=text, seq=131072, gpu=gpu, layer=number, price=price,
        backward_threshold=threshold, search_ms=0.1 * ours, forward_ms=0.3 * ours, backward_ms=0.6 * ours,
        dense_forward_ms=40.0, dense_backward_ms=60.0,
    )  # fmt: skip
