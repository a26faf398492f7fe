# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How prices follow the recall: as fast as before where it answers, and not away where it does not."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_mtraining.pattern.price_feedback import (
    FREE,
    GAIN,
    MAX_LOG_STEP,
    RANGE,
    SLOPE,
    PriceFeedback,
)

ALLOWED = torch.tensor(0.05)
ONE = torch.tensor(1.0)


def feedback_at(price, shape=()):
    return PriceFeedback(torch.full(shape, math.log(price)))


def answer(log_price, at=0.25, slope=SLOPE):
    """What a head loses that loses what is allowed at one price."""
    return (ALLOWED * torch.exp(slope * (log_price - math.log(at)))).clamp(max=0.9)


def steps_back(feedback):
    """Steps until such a head is within 0.02 of the target."""
    for step in range(60):
        lost = answer(feedback.log_prices)
        if lost < ALLOWED + 0.02:
            return step
        feedback.move(lost, ONE, ALLOWED)
    return 60


@pytest.mark.parametrize("lost", [0.0, 1e-4, 1e-3, 0.01, 0.04])
@pytest.mark.parametrize("stops", [False, True], ids=["in one run", "over checkpoints"])
def test_a_price_without_effect_does_not_run_away(lost, stops):
    """A head that is local, or a sequence with hardly a row beyond the window."""
    feedback = feedback_at(FREE)
    for step in range(90):
        if stops and step % 7 == 0:
            feedback = PriceFeedback(feedback.settled())
        feedback.move(torch.tensor(lost), ONE, ALLOWED)
        if step > 40:
            assert steps_back(PriceFeedback(feedback.log_prices)) <= (5 if stops else 4), step
    assert stops or feedback.log_prices < math.log(4.1 * FREE)


@pytest.mark.parametrize("slope", [1.0, 3.0, 6.0])
def test_a_steep_head_does_not_swing(slope):
    feedback = feedback_at(0.2)
    for step in range(120):
        lost = answer(feedback.log_prices, slope=slope)
        if step > 80:
            assert 0.8 * ALLOWED < lost < 1.2 * ALLOWED, step
        feedback.move(lost, ONE, ALLOWED)


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5])
def test_noise_is_no_answer(noise):
    torch.manual_seed(0)
    feedback = feedback_at(FREE, (100,))
    for _ in range(1500):
        lost = 0.1 * ALLOWED * torch.exp(noise * torch.randn(100))
        feedback.move(lost, torch.ones(100), ALLOWED)
    for prices in (feedback.log_prices, feedback.settled()):
        assert (prices - math.log(FREE)).quantile(0.75) < math.log(5)


def test_jobs_of_many_steps_do_not_wind_up():
    """Each goes on from the checkpoint of the one before, wherever in its cycle the price is."""
    feedback = feedback_at(FREE)
    for job in range(20):
        feedback = PriceFeedback(feedback.settled())
        for _ in range(100 + job):
            feedback.move(torch.tensor(0.0), ONE, ALLOWED)
    assert feedback.settled() < math.log(4.1 * FREE)


@pytest.mark.parametrize("price", (*RANGE[1:], 10.0))
def test_a_price_that_is_far_too_high_comes_back(price):
    """As checkpoints have them that were written before."""
    assert steps_back(feedback_at(price)) <= 5


@pytest.mark.parametrize("start", [1e-3, 0.25, 4.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_where_the_recall_answers_prices_move_as_an_integral(start, noise):
    """Over four orders of magnitude, in as many steps."""
    torch.manual_seed(1)
    feedback, plain = feedback_at(start), torch.tensor(math.log(start))
    for step in range(60):
        lost = answer(feedback.log_prices, at=20.0) * math.exp(noise * torch.randn(()).item())
        by = GAIN * (1 - lost / ALLOWED) / SLOPE
        plain = plain + by.clamp(-MAX_LOG_STEP, MAX_LOG_STEP)
        feedback.move(lost, ONE, ALLOWED)
        torch.testing.assert_close(feedback.log_prices, plain, msg=f"step {step}")
    assert abs(feedback.log_prices - math.log(20)) < (1.0 if noise else 0.01)


def test_a_head_that_keeps_all_pairs_becomes_sparse():
    """At a price so low that all is kept there is nothing to answer yet."""
    feedback = feedback_at(1e-3)
    for _ in range(60):
        lost = answer(feedback.log_prices, at=1.0) if feedback.log_prices > math.log(0.2) else 0
        feedback.move(torch.as_tensor(lost), ONE, ALLOWED)
    assert feedback.log_prices.item() == pytest.approx(0, abs=0.02)


def test_data_that_becomes_local_and_far_again():
    feedback, found = feedback_at(FREE), []
    for step in range(400):
        local = 100 <= step < 300
        lost = answer(feedback.log_prices) / (50 if local else 1)
        found.append(lost.item())
        feedback.move(lost, ONE, ALLOWED)
    assert found[299] > 2 * found[100], "it becomes sparser meanwhile"
    assert max(found[306:]) < 0.07


def test_steps_weigh_by_what_could_be_lost():
    """Nine steps of samples that lose next to nothing, one that follows the price."""
    feedback, far = feedback_at(FREE), []
    for step in range(300):
        if step % 10:
            feedback.move(torch.tensor(1e-5), torch.tensor(0.01), ALLOWED)
        else:
            lost = answer(feedback.log_prices)
            far.append(lost.item())
            feedback.move(lost, ONE, ALLOWED)
    # By weight, the loss over all rows is what is allowed.
    assert sum(far[-10:]) / 10 == pytest.approx(0.05 * 1.09, abs=0.006)


@pytest.mark.parametrize("sequences", [64, 1])
def test_a_run_goes_on_with_fewer_sequences_a_step(sequences):
    """All of their rows count, as before: prices follow as fast."""
    of_64 = 64 * ONE
    feedback = feedback_at(0.25, (1,))
    for _ in range(50):
        feedback.move(answer(feedback.log_prices, at=1.0) * of_64, of_64, ALLOWED)
    resumed = feedback_at(0.25, (1,))
    resumed.restore(feedback.state())
    # Longer ones lose more.
    for _ in range(5):
        lost = answer(resumed.log_prices)
        resumed.move(lost * sequences, ONE * sequences, ALLOWED)
    assert answer(resumed.log_prices) < ALLOWED + 0.02
