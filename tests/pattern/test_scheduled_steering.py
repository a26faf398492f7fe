# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a schedule changes from step to step: the price, the target, and which steps are dense."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import head_policies
from megatron_mtraining.cp_group import RankGroup, cp_group_of
from megatron_mtraining.pattern import Steering, search_pattern

CPU = torch.device("cpu")
ALONE = RankGroup(None)


def scheduled(steps=10, shape=(1, 1), run=None, **options):
    """A steering over a run of ``steps``, whose number of finished steps is its own."""
    config = run or MTrainingConfig.from_options(**options)
    found = Steering(config, shape=shape, share=lambda: found.step / steps)
    return found


class Untouched:
    """Ranks that nothing may be exchanged with."""

    def __getattr__(self, name):
        raise AssertionError(f"a dense step asks for {name}")


def test_a_schedule_has_the_price_of_each_step():
    steering, found = scheduled(schedule="0:1,0.4:1,0.4:0.4,0.8:0.1,0.8:0"), []
    assert steering.has_schedule and steering.changes and not steering.moves
    for step in range(10):
        assert steering.is_dense == (step >= 8) == (steering.scheduled() == 0)
        price = steering.price(CPU, 3, 2, 4)
        assert price.dtype == torch.float32 and price.shape == ()
        assert price.item() == pytest.approx(steering.now())
        found.append(steering.now())
        steering.observe(torch.rand(2, 4))  # no target: nothing to see, and no collective
        steering.advance(step + 1, Untouched())
        assert steering.state() is None and steering.typical() is None
    expected = [1] * 4 + [0.4, 0.4 / 2**0.5, 0.2, 0.1 * 2**0.5, 0, 0]
    assert found == pytest.approx(expected)


def test_a_price_is_float32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        price = scheduled(schedule="0:0.3").price(CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert price.dtype == torch.float32 and price.item() == pytest.approx(0.3)


@pytest.mark.parametrize("given", [dict(schedule="anneal"), dict(target_schedule="0:0.8,0.5:1")])
def test_a_schedule_that_is_not_told_its_share_says_so(given):
    steering = Steering(MTrainingConfig.from_options(**given))
    for ask in (
        steering.scheduled,
        steering.now,
        lambda: steering.is_dense,
    ):
        with pytest.raises(ConfigError, match="nothing says how long the run is"):
            ask()
    assert Steering(MTrainingConfig()).scheduled() is None
    assert not Steering(MTrainingConfig()).is_dense


def test_heads_with_prices_of_their_own_keep_their_ratio(tmp_path):
    """What is searched at a step's price is what is searched at the heads' prices in that ratio."""
    file = tmp_path / "settings.json"
    own = {"0": {"heads": {"1": {"price": 0.1}, "2": {"dense": True}}}}
    file.write_text(json.dumps({"price": 0.4, "block_size": 64, "window": 64, "layers": own}))
    config = MTrainingConfig.from_options(settings=str(file), schedule="0:1.6,0.5:0.2")
    steering, policies = scheduled(run=config), head_policies(config, 0, 1, 4)
    torch.manual_seed(3)
    query, key = (2 * torch.randn(512, 1, heads, 64) for heads in (4, 2))
    densities = []
    for step in (0, 5):
        steering.step = step
        found = search_pattern(
            query,
            key,
            config,
            cp_group_of(None),
            0.125,
            head_policies=policies,
            price=steering.price(CPU),
        )
        at = steering.now()
        fixed = MTrainingConfig.from_options(block_size=64, window=64, price=at)
        ratios = (1, 0.25, 0, 1)
        expected = search_pattern(
            query, key, fixed, cp_group_of(None), 0.125,
            head_policies=[replace(fixed.policy, price=at * ratio) for ratio in ratios],
        )  # fmt: skip
        assert found.member.equal(expected.member) and found.columns.equal(expected.columns)
        densities.append(found.density()[0])
    assert (
        densities[0][1] > densities[0][0]
        and (densities[1][[0, 1, 3]] > densities[0][[0, 1, 3]]).all()
    )
    assert densities[0][2] == densities[1][2]


@pytest.mark.parametrize("scope", ["head", "model"])
def test_a_target_schedule_moves_the_aim(scope):
    """Each phase meets its own recall; dense steps see nothing, exchange nothing and move nothing."""
    steering = scheduled(
        200, target_schedule="0:0.8,0.4:0.8,0.4:0.95,0.8:0.95,0.8:1", target_scope=scope
    )
    assert steering.moves and steering.changes
    recalls = []
    for step in range(200):
        if step == 160:
            before = steering.state()
        if step >= 160:
            assert steering.is_dense and steering.now() == 0
            steering.observe(torch.full((1, 1), 0.9))
            steering.advance(step + 1, Untouched())
            continue
        recalls.append(1 - 0.2 * steering.price(CPU).reshape(1, 1) ** 0.7)
        steering.observe(1 - recalls[-1])
        steering.advance(step + 1, ALONE)
    assert recalls[79].item() == pytest.approx(0.8, abs=0.005)
    assert recalls[159].item() == pytest.approx(0.95, abs=0.005)
    assert steering.state() == before
    assert steering.typical().item() == pytest.approx(torch.tensor(before).item())


def test_an_aim_that_falls_is_followed_closely():
    steering = scheduled(300, target_schedule="0:0.8,0.9:0.98")
    for step in range(270):
        lost = 0.2 * steering.price(CPU).reshape(1, 1) ** 0.7
        if step > 60:
            assert lost.item() == pytest.approx(steering.scheduled(), rel=0.1)
        steering.observe(lost)
        steering.advance(step + 1, ALONE)
    assert lost.item() == pytest.approx(0.02, rel=0.1)


def test_heads_with_targets_of_their_own_keep_their_ratio(tmp_path):
    """Of what may be lost: a head that may lose half as much as the others always may lose half."""
    file = tmp_path / "targets.json"
    own = {"0": {"heads": {"1": {"target_recall": 0.9}, "2": {"dense": True}}}}
    file.write_text(json.dumps({"layers": own}))
    config = MTrainingConfig.from_options(
        target_schedule="0:0.8,0.5:0.8,0.5:0.96", settings=str(file)
    )
    steering, lost = scheduled(200, (1, 3), config), []
    for step in range(200):
        lost.append(0.2 * steering.price(CPU, 0, 0, 3) ** 0.7)
        steering.observe(lost[-1][None])
        steering.advance(step + 1, ALONE)
    assert lost[99][:2].tolist() == pytest.approx([0.2, 0.1], abs=0.004)
    assert lost[199][:2].tolist() == pytest.approx([0.04, 0.02], abs=0.004)
    assert steering.state()[0][2] == pytest.approx(0.25), "it has no price to move"


@pytest.mark.parametrize("stop", [0, 3, 6, 8], ids=["first", "sparse", "falling", "dense"])
def test_a_target_schedule_goes_on_from_a_checkpoint(stop):
    """In each phase, with prices that have gone through JSON."""

    def go(steering, steps):
        prices = []
        for step in steps:
            prices.append(0.0 if steering.is_dense else steering.price(CPU).item())
            steering.observe(0.2 * torch.tensor([[prices[-1]]]) ** 0.7)
            steering.advance(step + 1, ALONE)
        return prices

    given = dict(target_schedule="0:0.8,0.4:0.9,0.8:0.95,0.8:1", target_scope="model")
    whole = go(scheduled(**given), range(10))
    first = scheduled(**given)
    go(first, range(stop))
    state, history = json.loads(json.dumps([first.state(), first.history()]))
    assert state > 0, "also where a step is dense"
    second = scheduled(**given)
    second.step = stop
    second.restore(state, history)
    assert go(second, range(stop, 10)) == whole[stop:]
    old = scheduled(**given)
    old.step = stop
    old.restore(state)  # of a checkpoint without a history: the slope is measured anew
    found = go(old, range(stop, 10))
    assert found[0] == pytest.approx(whole[stop])
    assert found == pytest.approx(whole[stop:], rel=0.2)


def test_what_is_left_of_a_schedule():
    dense = scheduled(schedule="0:1,0.5:0.25,0.9:0.25,0.9:0")
    said = dense.unfinished(0.25)
    assert "after 25.0% of its schedule, at a price of 0.5, before the dense steps from 90%" in said
    assert "at a price of 0.25, before the dense steps" in dense.unfinished(0.9), "none was trained"
    assert dense.unfinished(0.91) is None and dense.unfinished(1) is None
    denser = scheduled(schedule="0:1,0.5:0.25")
    assert "at a price of 0.5, before the denser steps from 50%" in denser.unfinished(0.25)
    recall = scheduled(target_schedule="0:0.8,0.5:0.95")
    assert "at a recall of 0.9, before the denser steps" in recall.unfinished(0.25)
    for none in (scheduled(), scheduled(schedule="0:1"), scheduled(target_recall=0.9)):
        assert none.unfinished(0) is None
