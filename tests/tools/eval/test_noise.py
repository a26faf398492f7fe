# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Means, their intervals, and differences of the same samples."""

from __future__ import annotations

import pytest

from megatron_mtraining.tools.eval.noise import mean_of


def test_hand_made():
    assert mean_of([0.25]) == (0.25, None, None, 1)
    assert mean_of([1, 1, 1]) == (1, 1, 1, 3)
    assert mean_of([1, 3], [3, 1]).value == 1.5
    with pytest.raises(ValueError, match="no samples"):
        mean_of([])


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
    alone = [each for each in samples if each["attention"] == "dense"]
    assert differences_of(alone) == []
