# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What changes from step to step: dense steps, and prices that feedback moves to a target recall."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import head_policies
from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.pattern import Steering
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
ALONE = RankGroup(None)


def test_without_a_target_the_price_is_the_settings(tmp_path):
    steering = Steering(MTrainingConfig.from_options(price=0.4))
    assert steering.price(CPU) is None and not steering.moves
    assert steering.now() == 0.4 and steering.state() is None
    assert Steering(MTrainingConfig.from_options(vertical=9)).now() is None
    (tmp_path / "patterns.json").write_text("[]")
    config = MTrainingConfig(settings=str(tmp_path / "patterns.json"))
    assert Steering(config).now() is None, "no head has one"


def aimed(price=1.0, **target):
    """One price for all."""
    return MTrainingConfig.from_options(price=price, **target, target_scope="model")


@pytest.mark.parametrize("start", [0.03, 3.0])
def test_a_target_is_met(start):
    """With a model whose recall goes with the price as trained models' does, and noise."""
    torch.manual_seed(1)
    aim = 0.95
    steering = Steering(aimed(start, target_recall=aim))
    reached = []
    for step in range(80):
        price = steering.price(CPU).item()
        for _ in range(3):  # layers
            noise = torch.exp(0.1 * torch.randn(2, 4))
            recall = (1 - 0.09 * price**0.75 * noise).clamp(min=0)
            steering.observe(1 - recall)
        reached.append(recall.mean().item())
        steering.advance(step + 1, ALONE)
    late = sum(reached[40:]) / 40
    assert abs(late - aim) < 0.1 * min(aim, 1 - aim), late
    assert abs(reached[0] - aim) > 3 * abs(late - aim)
    # It goes on from what a checkpoint has kept.
    other = Steering(steering.config)
    other.restore(steering.state())
    torch.testing.assert_close(other.price(CPU), steering.price(CPU), atol=0, rtol=1e-6)


def test_a_target_that_cannot_be_met_leaves_a_price():
    steering = Steering(aimed(target_recall=0.99))
    for step in range(60):
        steering.observe(torch.ones(1, 2))
        steering.advance(step + 1, ALONE)
    assert steering.price(CPU).item() == pytest.approx(1e-4, rel=1e-3)


def test_steps_without_attention_move_nothing():
    steering = Steering(aimed(target_recall=0.9))
    before = steering.price(CPU)
    steering.advance(1, ALONE)
    assert torch.equal(steering.price(CPU), before)
    # All was kept (dense steps, an index of everything): nothing is lost, so the price rises.
    steering.observe(torch.zeros(1, 2))
    steering.advance(2, ALONE)
    assert steering.price(CPU) > before


LOSSES = torch.tensor([[0.02, 0.3, 1e-7], [0.1, 0.5, 0.9]])
"""What a head loses at a price of 1."""


def test_each_head_meets_its_target():
    torch.manual_seed(2)
    config = MTrainingConfig.from_options(target_recall=0.95, price=0.5)
    assert config.policy.target_scope == "head"
    steering, found = Steering(config, shape=(2, 3)), []
    for step in range(150):
        for layer in range(2):
            # Two tensor-parallel ranks' heads, two sequences.
            for first, count in ((0, 2), (2, 1)):
                price = steering.price(CPU, layer, first, count)
                assert price.shape == (count,)
                noise = torch.exp(0.3 * torch.randn(2, count))
                kept = 1 - LOSSES[layer, first : first + count] * price**0.7 * noise
                steering.observe(1 - kept, layer, first)
        steering.advance(step + 1, ALONE)
        found.append(torch.stack([steering.price(CPU, layer, 0, 3) for layer in range(2)]))
    prices = torch.stack(found[60:])
    mean = (LOSSES * prices**0.7 * math.exp(0.3**2 / 2)).mean(0)
    torch.testing.assert_close(mean[LOSSES > 1e-6], torch.full((5,), 0.05), atol=0.006, rtol=0)
    assert 0.5 <= found[-1][0, 2] < 4, "no price changes what this head loses"
    assert steering.now() == pytest.approx(found[-1].flatten().sort().values[2:4].mean().item())
    # What a checkpoint keeps is a table of numbers, read by runs of either scope.
    state = json.loads(json.dumps(steering.state()))
    other = Steering(config, shape=(2, 3))
    other.restore(state)
    torch.testing.assert_close(other.price(CPU, 1, 1, 2), found[-1][1, 1:])
    one = Steering(aimed(target_recall=0.95), shape=(2, 3))
    one.restore(state)
    assert one.price(CPU).item() == pytest.approx(steering.now())
    other.restore(0.7)
    assert other.price(CPU, 0, 0, 3).tolist() == pytest.approx([0.7] * 3)
    with pytest.raises(ConfigError, match="2 layers and 3 heads, but the model has 2 and 4"):
        Steering(config, shape=(2, 4)).restore(state)


def test_layers_without_attention_have_no_price():
    config = MTrainingConfig.from_options(target_recall=0.95, price=0.5)
    steering = Steering(config, shape=(4, 2), layers=[0, 2])
    for step in range(20):
        for layer in (0, 2):
            steering.price(CPU, layer, 0, 2)
            steering.observe(torch.full((1, 2), 1e-3), layer)
        steering.advance(step + 1, ALONE)
    (price,) = set(steering.price(CPU, 2, 0, 2).tolist())
    assert price < 0.4 and steering.price(CPU, 1, 0, 1).item() == pytest.approx(0.5)
    assert steering.now() == pytest.approx(price) == steering.typical().item()
    one = Steering(aimed(target_recall=0.95), shape=(4, 2), layers=[0, 2])
    one.restore(steering.state())
    assert one.price(CPU).item() == pytest.approx(steering.now())


@pytest.mark.parametrize("scope", ["head", "model"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "not told"])
def test_calls_that_can_lose_nothing_pay_for_no_others(scope, known):
    """Nine samples of short documents to one that is long, in a step or in steps of their own."""
    config = MTrainingConfig.from_options(target_recall=0.95, target_scope=scope)
    at_once, in_turn = Steering(config), Steering(config)
    short, long = (0.0, 0.98) if known else (None, None)
    for step in range(100):
        kept = 1 - 0.1 * at_once.price(CPU).reshape(1, 1) ** 0.7
        for _ in range(9):
            at_once.observe(torch.zeros(1, 1), exposed=short)
        at_once.observe(1 - kept, exposed=long)
        at_once.advance(step + 1, ALONE)
        far = 1 - 0.1 * in_turn.price(CPU).reshape(1, 1) ** 0.7
        in_turn.observe(
            torch.zeros(1, 1) if step % 10 else 1 - far, exposed=short if step % 10 else long
        )
        in_turn.advance(step + 1, ALONE)
    for recall in (kept, far):
        assert recall.item() == pytest.approx(0.95, abs=0.005)


def test_a_call_weighs_by_its_rows_that_could_lose():
    """Half of the first sample's rows are of short documents: the others lose twice what the mean says."""
    config = MTrainingConfig.from_options(target_recall=0.9, price=0.5)
    steering, rows = Steering(config, shape=(1, 2)), torch.tensor([0.5, 1.0])
    steering.observe(1 - torch.tensor([[0.95, 0.9], [0.9, 0.9]]), exposed=rows)
    steering.advance(1, ALONE)
    meets, falls = steering.price(CPU, 0, 0, 2)
    assert meets.item() == pytest.approx(0.5) and falls < 0.5


def test_heads_without_a_price_say_nothing_on_a_price_for_all(tmp_path):
    """Dense ones, and ones with budgets."""
    file = tmp_path / "settings.json"
    file.write_text('{"layers": {"0": {"heads": {"0": {"dense": true}, "1": {"vertical": 9}}}}}')
    config = replace(aimed(0.5, target_recall=0.95), settings=str(file))
    steering, alone = Steering(config, shape=(1, 3)), Steering(config, shape=(1, 3))
    policies = head_policies(config, 0, 1, 3)
    for exposed in (1.0, torch.ones(1), None):
        steering.observe(
            1 - torch.tensor([[1.0, 0.2, 0.94]]), 0, exposed=exposed, policies=policies
        )
        alone.observe(1 - torch.tensor([[0.94]]), 0, exposed=exposed)
    steering.advance(1, ALONE)
    alone.advance(1, ALONE)
    torch.testing.assert_close(steering.price(CPU), alone.price(CPU))
    assert steering.price(CPU) < 0.5


def test_targets_of_layers_and_heads(tmp_path):
    file = tmp_path / "targets.json"
    own = {"layers": {"1": {"target_recall": 0.8, "heads": {"2": {"target_recall": 0.9}}}}}
    file.write_text(json.dumps(own))
    config = MTrainingConfig.from_options(target_recall=0.95, price=0.5, settings=str(file))
    steering = Steering(config, shape=(2, 3))
    for step in range(80):
        for layer in range(2):
            kept = 1 - 0.1 * steering.price(CPU, layer, 0, 3) ** 0.7
            steering.observe(1 - kept[None], layer)
        steering.advance(step + 1, ALONE)
    lost = [0.1 * steering.price(CPU, layer, 0, 3) ** 0.7 for layer in range(2)]
    expected = torch.tensor([[0.05, 0.05, 0.05], [0.2, 0.2, 0.1]])
    torch.testing.assert_close(torch.stack(lost), expected, atol=1e-3, rtol=0)
    for run in (aimed(target_recall=0.95), MTrainingConfig.from_options(price=0.5)):
        named = "layer 1 has target_recall 0.8, which needs a price for each head"
        with pytest.raises(ConfigError, match=named):
            head_policies(replace(run, settings=str(file)), 1, 2, 3)


def test_heads_without_a_price_do_not_move_and_do_not_count(tmp_path):
    """Dense heads hold all attention, whatever the price."""
    file = tmp_path / "settings.json"
    file.write_text('{"layers": {"0": {"dense": true}, "1": {"heads": {"0": {"dense": true}}}}}')
    config = MTrainingConfig.from_options(target_recall=0.95, price=0.5, settings=str(file))
    steering = Steering(config, shape=(2, 3))
    for step in range(40):
        steering.observe(torch.zeros(1, 3), layer=0)
        steering.observe(1 - torch.tensor([[1.0, 0.95, 0.9]]), layer=1)
        steering.advance(step + 1, ALONE)
    prices = torch.tensor(steering.state())
    assert prices[0].tolist() == pytest.approx([0.5] * 3) and prices[1, 0] == pytest.approx(0.5)
    assert prices[1, 1] == pytest.approx(0.5) and prices[1, 2] < 0.01
    middle = pytest.approx(prices[1, 1:].mean().item(), rel=1e-5)
    assert steering.now() == middle
    assert steering.typical().item() == pytest.approx(prices[1, 2].item())  # torch's lower median
    one = Steering(
        replace(config, policy=replace(config.policy, target_scope="model")), shape=(2, 3)
    )
    one.restore(steering.state())
    assert one.state() == middle
    fixed = Steering(MTrainingConfig.from_options(policy="fixed"), shape=(2, 3))
    fixed.restore(steering.state())
    assert fixed.state() is None and fixed.now() is None, "no head has a price"


@pytest.mark.parametrize("scope", ["head", "model"])
@pytest.mark.parametrize("stop", [0, 2, 12, 30])
def test_prices_go_on_as_if_the_run_had_not_stopped(stop, scope):
    """From steps in which they fall far, and where no loss answers to them, through a checkpoint's JSON."""
    config = MTrainingConfig.from_options(target_recall=0.95, price=20.0, target_scope=scope)
    shape, lost = (2, 2), torch.tensor([[0.3, 1e-7], [0.9, 0.02]])

    def go(steering, steps):
        found = []
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            for layer in range(2):
                price = steering.price(CPU, layer, 0, 2)
                of_step = lost[layer] * price**0.7 * (0.5 + torch.rand(2, generator=draw))
                exposed = 0.3 + 0.7 * torch.rand(1, generator=draw)
                steering.observe(exposed * of_step.clamp(max=1)[None], layer, exposed=exposed)
            steering.advance(step + 1, ALONE)
            found.append(torch.stack([steering.price(CPU, layer, 0, 2) for layer in range(2)]))
        return found

    expected, steering = go(Steering(config, shape=shape), range(60)), Steering(config, shape=shape)
    go(steering, range(stop))
    now = steering.now()
    for _ in range(2):  # the second time before its first step
        saved = json.loads(json.dumps([steering.state(), steering.history()], allow_nan=False))
        steering = Steering(config, shape=shape)
        steering.restore(*saved)
        assert steering.now() == pytest.approx(now)
    found = go(steering, range(stop, 60))
    assert all(map(torch.equal, found, expected[stop:]))
    # Checkpoints from before a history, and runs of another scope, have the prices alone.
    steering.restore(saved[0])
    assert steering.history() is None
    other = "model" if scope == "head" else "head"
    other = Steering(
        replace(config, policy=replace(config.policy, target_scope=other)), shape=shape
    )
    other.restore(*saved)
    assert other.history() is None


@pytest.mark.parametrize(
    "wrong", ["x", {}, dict(limit=[0.5]), dict(limit=[None]), dict(limit=["x"] * 4)]
)
def test_what_is_no_history_is_not_restored(wrong):
    steering = Steering(MTrainingConfig.from_options(target_recall=0.9), shape=(2, 2))
    steering.price(CPU, 0, 0, 2)
    history = wrong if wrong in ("x", {}) else steering.history() | wrong
    with pytest.raises(ConfigError, match="the checkpoint has a history of prices that cannot"):
        steering.restore(steering.state(), history)


def _steer_heads(rank, world):
    """Rank 0 and 1: data-parallel copies of layer 0's first head; 2: its second; 3: layer 1."""
    steering = Steering(MTrainingConfig.from_options(price=1.0, target_recall=0.9), shape=(2, 2))
    for step in range(3):
        if rank < 3:
            recall = torch.full((1, 1), (0.8, 0.95, 0.5)[rank])
            steering.observe(1 - recall, 0, rank // 2)
        else:
            steering.observe(1 - torch.tensor([[0.99, 0.85]]), 1)
        steering.advance(step + 1, RankGroup.everyone())
    return torch.tensor(steering.state())


def test_all_ranks_have_every_head_s_price():
    found = run_ranks(4, _steer_heads)
    assert all(torch.equal(each, found[0]) for each in found)
    alone = Steering(MTrainingConfig.from_options(price=1.0, target_recall=0.9), shape=(2, 2))
    for step in range(3):
        alone.observe(1 - torch.tensor([[0.8, 0.5], [0.95, 0.5]]), 0)
        alone.observe(1 - torch.tensor([[0.99, 0.85]]), 1)
        alone.advance(step + 1, ALONE)
    torch.testing.assert_close(found[0], torch.tensor(alone.state()))
    assert len(found[0].unique()) == 4


def _steer_unevenly(rank, world):
    """Ranks with other numbers of calls, one without attention, one whose attention is once not a number; all
    go on from a checkpoint."""
    steering = Steering(MTrainingConfig.from_options(price=1.0, target_recall=0.9), shape=(2, 2))
    found, draw = [], torch.Generator().manual_seed(rank)
    for step in range(24):
        for call in range((0, 1, 3)[rank]):
            recall = 0.7 + 0.3 * torch.rand(2, 2, generator=draw)
            if (rank, step) == (1, 5):
                recall[0, 0] = float("nan")
            rows = torch.rand(2, generator=draw).round() if step % 3 else 1.0
            steering.observe(1 - recall, call % 2, exposed=rows)
        steering.advance(step + 1, RankGroup.everyone())
        found.append(steering.price(CPU, 0, 0, 2).tolist() + steering.price(CPU, 1, 0, 2).tolist())
        if step == 11:
            state, steering = steering.state(), Steering(steering.config, step, (2, 2))
            steering.restore(state)
    return torch.tensor(found)


def test_prices_of_ranks_do_not_part():
    found = run_ranks(3, _steer_unevenly)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert len(found[0].unique()) > 40 and found[0].isfinite().all()


def _steer(rank, world):
    steering = Steering(aimed(target_recall=0.9))
    for step in range(3):
        if rank < 2:  # the others are a pipeline stage without attention
            steering.observe(1 - torch.full((1, 2), 0.8 + 0.15 * rank))
        steering.advance(step + 1, RankGroup.everyone())
    return steering.price(CPU)


def test_all_ranks_have_one_price():
    found = run_ranks(3, _steer)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    alone = Steering(aimed(target_recall=0.9))
    for step in range(3):
        alone.observe(1 - torch.tensor([[0.8, 0.95]]))
        alone.advance(step + 1, ALONE)
    torch.testing.assert_close(found[0], alone.price(CPU))


def test_recall_that_is_not_a_number_moves_nothing():
    """Once NaN, a price stayed it."""
    steering = Steering(aimed(target_recall=0.9))
    before = steering.price(CPU)
    steering.observe(1 - torch.tensor([[0.9, float("nan")]]))
    steering.advance(1, ALONE)
    assert torch.equal(steering.price(CPU), before)


NO_PRICES = [
    float("nan"), float("inf"), -1.0, 0.0, True, "x", {}, [], [[], []], [0.1] * 4, [[[0.1]] * 4] * 2,
    [[0.1] * 4, [0.1] * 3], [["a"] * 4] * 2, [[float("nan")] * 4] * 2, [[0.0] * 4] * 2,
]  # fmt: skip


@pytest.mark.parametrize("scope", ["head", "model"])
@pytest.mark.parametrize("wrong", NO_PRICES, ids=repr)
def test_what_is_no_price_is_not_restored(wrong, scope):
    config = MTrainingConfig.from_options(target_recall=0.9, target_scope=scope)
    steering = Steering(config, shape=(2, 4))
    before = steering.state()
    with pytest.raises(ConfigError, match="the checkpoint has (prices that are no|the price)"):
        steering.restore(wrong)
    assert steering.state() == before
