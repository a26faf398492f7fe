# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Means, their intervals, and differences of the same samples."""

from __future__ import annotations

import pytest

from megatron_mtraining.tools.eval.noise import mean_of


def test_hand_made():
    assert mean_of([0.25]) == (0.25, None, None, 1)
    assert mean_of([1, 1, 1]) == (1, 1, 1, 3)
    assert mean_of([1, 3], [3, 1]).value == 1.5


def test_the_interval_of_a_share():
    """Near the normal approximation's: 0.5 +- 1.96 * 0.05."""
    found = mean_of([0, 1] * 50)
    assert found.value == 0.5
    assert found.low == pytest.approx(0.402, abs=0.015) and found.high == pytest.approx(
        0.598, abs=0.015
    )
    assert mean_of([0, 1] * 50) == found


def test_differences_are_of_the_same_samples():
    """Far narrower than the difference of two means, where samples are hard for both."""
    from megatron_mtraining.tools.eval.results import differences_of, rows_of

    losses = [1.0, 5.0, 2.0, 9.0]
    samples = [
        {"task": "one", "length": 8, "attention": attention, "id": number, "loss": loss + more, "score": 0.0,
         "seconds": 1.0, "tokens": 9, "answer_tokens": number + 1}
        for attention, more in (("dense", 0), ("mtraining", 0.5))
        for number, loss in enumerate(losses)
    ]  # fmt: skip
    [row] = differences_of(samples)
    assert row["loss"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "samples": 4}
    dense, sparse = rows_of(samples)
    assert dense["loss"]["mean"] == pytest.approx((1 + 2 * 5 + 3 * 2 + 4 * 9) / 10)
    assert sparse["loss"]["high"] - sparse["loss"]["low"] > 2 and dense["seconds"] == 4
    # Sparse is better by 4 for one token, and worse by 0.5 for 198.
    uneven = [
        {"task": "one", "length": 8, "attention": attention, "id": number, "loss": loss, "key_loss": loss,
         "score": score, "seconds": 1.0, "tokens": 9, "answer_tokens": tokens, "key_tokens": tokens}
        for number, tokens, losses, scores in (
            (0, 1, (5.0, 1.0), (0, 1)), (1, 99, (1.0, 1.5), (1, 1)), (2, 99, (1.0, 1.5), (1, 1)),
        )
        for attention, loss, score in zip(("dense", "mtraining"), losses, scores)
    ]  # fmt: skip
    # No key token was found in this one.
    uneven += [
        {**each, "id": 3, "key_loss": None, "key_tokens": 0, "loss": 1.0} for each in uneven[2:4]
    ]
    [row], (dense, sparse) = differences_of(uneven), rows_of(uneven)
    for name, tokens, number in (("loss", 298, 4), ("key_loss", 199, 3)):
        apart = row[name]
        assert apart["mean"] == pytest.approx((-4 + 198 * 0.5) / tokens)
        assert apart["mean"] == pytest.approx(sparse[name]["mean"] - dense[name]["mean"])
        assert apart["low"] <= apart["mean"] <= apart["high"] and apart["samples"] == number
        assert apart == mean_of([-4, 0.5, 0.5, 0][:number], [1, 99, 99, 99][:number]).numbers()
    assert row["score"]["mean"] == 0.25
    alone = [each for each in samples if each["attention"] == "dense"]
    assert differences_of(alone) == []
