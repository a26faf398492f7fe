# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What changes from step to step: schedules, targets by feedback, the refresh of slashes."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.pattern import Steering
from megatron_mtraining.pattern.steering import LOST

CPU = torch.device("cpu")


def test_dense_steps_then_a_price_that_goes_evenly_in_ratio():
    steering = Steering(MTrainingConfig(price=0.4, price_start=0.1, price_steps=4, dense_steps=2))
    found = []
    for step in range(8):
        assert steering.step == step
        found.append((steering.dense, round(steering.price(CPU).item(), 4)))
        steering.advance(step + 1)
    prices = [round(0.1 * 4 ** (i / 4), 4) for i in (0, 0, 0, 1, 2, 3, 4, 4)]
    assert found == [(step < 2, price) for step, price in enumerate(prices)]
    assert steering.now() == 0.4


def test_without_a_schedule_the_price_is_the_settings():
    steering = Steering(MTrainingConfig(price=0.4))
    assert steering.price(CPU) is None and not steering.dense and steering.chooses_slashes
    assert steering.now() == 0.4 and steering.state() is None
    assert Steering(MTrainingConfig(vertical=9)).now() is None


@pytest.mark.parametrize("start", [0.03, 3.0])
@pytest.mark.parametrize("target", ["target_recall", "target_density"])
def test_a_target_is_met(target, start):
    """With a model whose recall and density go with the price as trained models' do, and noise."""
    torch.manual_seed(1)
    aim = {"target_recall": 0.95, "target_density": 0.08}[target]
    steering = Steering(MTrainingConfig(price=start, **{target: aim}))
    reached = []
    for step in range(80):
        price = steering.price(CPU).item()
        for _ in range(3):  # layers
            noise = torch.exp(0.1 * torch.randn(2, 4))
            density = (0.1 * price**-0.55 * noise).clamp(max=1)
            recall = (1 - 0.09 * price**0.75 * noise).clamp(min=0)
            steering.observe(density, recall)
        reached.append((recall if target == "target_recall" else density).mean().item())
        steering.advance(step + 1)
    late = sum(reached[40:]) / 40
    assert abs(late - aim) < 0.1 * min(aim, 1 - aim), late
    assert abs(reached[0] - aim) > 3 * abs(late - aim)
    # It goes on from what a checkpoint has kept.
    other = Steering(steering.config)
    other.restore(steering.state())
    torch.testing.assert_close(other.price(CPU), steering.price(CPU), atol=0, rtol=1e-6)


def test_a_target_that_cannot_be_met_leaves_a_price():
    steering = Steering(MTrainingConfig(price=1.0, target_recall=0.99))
    for step in range(60):
        steering.observe(torch.ones(1, 2), torch.zeros(1, 2))
        steering.advance(step + 1)
    assert steering.price(CPU).item() == pytest.approx(1e-4, rel=1e-3)


def test_steps_without_attention_move_nothing():
    steering = Steering(MTrainingConfig(price=1.0, target_recall=0.9))
    before = steering.price(CPU)
    steering.advance(1)
    assert torch.equal(steering.price(CPU), before)
    # All was kept (dense steps, an index of everything): nothing is lost, so the price rises.
    steering.observe(torch.ones(1, 2), None)
    steering.advance(2)
    assert steering.price(CPU) > before


def _steer(rank, world):
    steering = Steering(MTrainingConfig(price=1.0, target_recall=0.9))
    for step in range(3):
        if rank < 2:  # the others are a pipeline stage without attention
            steering.observe(torch.ones(1, 2), torch.full((1, 2), 0.8 + 0.15 * rank))
        steering.advance(step + 1)
    return steering.price(CPU)


def test_all_ranks_have_one_price():
    found = run_ranks(3, _steer)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    alone = Steering(MTrainingConfig(price=1.0, target_recall=0.9))
    for step in range(3):
        alone.observe(torch.ones(1, 2), torch.tensor([[0.8, 0.95]]))
        alone.advance(step + 1)
    torch.testing.assert_close(found[0], alone.price(CPU))


def test_slashes_are_chosen_every_so_many_steps_and_when_recall_falls():
    steering = Steering(MTrainingConfig(slash_refresh=4, dense_steps=2))
    chosen = []
    for step in range(11):
        chosen.append(steering.chooses_slashes)
        steering.advance(step + 1)
    assert [step for step, c in enumerate(chosen) if c] == [2, 6, 10]
    steering.advance(11)
    assert not steering.watch(0.95) and not steering.chooses_slashes
    assert not steering.watch(0.95 - LOST / 2)
    assert steering.watch(0.95 - 2 * LOST) and steering.chooses_slashes
    steering.advance(12)
    assert not steering.chooses_slashes
    # What is lost then counts from there.
    assert not steering.watch(0.95 - 2 * LOST)
    assert not Steering(MTrainingConfig()).watch(0.1)
    assert math.isclose(LOST, 0.02)
