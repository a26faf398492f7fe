# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ranks do to balance a step: multipliers of the price, the table that they sum, and the accounting."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import tensor_parallel

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.balance.tuning import Group
from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.megatron import core_attention
from megatron_mtraining.megatron.balance import log as balance_log
from megatron_mtraining.megatron.balance.balancer import (
    Balancer,
    Layout,
    _typical_price,
    balancer_of_arguments,
)
from megatron_mtraining.megatron.balance.observer import Observed
from megatron_mtraining.megatron.balance.table import OBSERVED, StepTable
from megatron_mtraining.megatron.run_state import RunState
from megatron_mtraining.pattern import Steering
from tests.support.megatron_cases import DIM, GROUPS, HEADS, make, make_config
from tests.support.ranks import run_ranks
from tests.support.tuning_cases import Plans, balancer_for

SEQUENCE = 512
SPARSE = dict(block_size=64, window=64, sample_strata=16)
pytestmark = pytest.mark.usefixtures("cpu_random")


@pytest.fixture
def balanced(monkeypatch):
    """Makes a balancer of one rank with two micro-batches, which attentions of the test then use."""

    def use(multipliers=None, **others):
        balancer = balancer_for(multipliers, **others)
        run = SimpleNamespace(
            has_run_dense=True,
            step_is_logged=lambda: True,
            balance=SimpleNamespace(observer=balancer.observer),
            steering_of=lambda config, layers, heads: Steering(config, 0, (layers, heads)),
        )
        monkeypatch.setattr(core_attention, "RUN", run)
        return balancer

    return use


def attention_of(layers=1, number=1, **options):
    config = MTrainingConfig.from_options(**{**SPARSE, "price": 1.0, **options})
    return make(make_config(mtraining=config, num_layers=layers), layer_number=number)


def operands(seed=2):
    """A few keys that many queries attend to, so that density follows the price."""
    torch.manual_seed(seed)
    query = torch.randn(SEQUENCE, 1, HEADS, DIM)
    key, value = torch.randn(2, SEQUENCE, 1, GROUPS, DIM)
    return [each.requires_grad_() for each in (query, 1.5 * key, value)]


def end(balancer, step=1):
    balancer.end_step(step, RankGroup(None))
    balancer.read()
    return balancer.interval.last


def density_at(price):
    attention = attention_of(price=price)
    found = []
    attention.density.add = lambda density, recall, exposed: found.append((density, recall))
    attention(*operands())
    return found[0]


def test_the_price_of_a_microbatch_is_multiplied(balanced):
    wanted = [density_at(price) for price in (0.5, 2.0)]
    balancer = balanced([[0.5], [2.0]])
    attention = attention_of()
    out = [attention(*operands()) for _ in range(4)]
    # A step may run again, to find faulty hardware.
    assert torch.equal(out[0], out[2]) and torch.equal(out[1], out[3])
    record = end(balancer)
    for number, (density, recall) in enumerate(wanted):
        assert record.density[number, 0] == pytest.approx(float(density.mean()), rel=1e-6)
        assert record.recall[number, 0] == pytest.approx(float(recall.mean()), rel=1e-6)
    assert record.density[0, 0] > record.density[1, 0]
    assert record.multipliers.tolist() == [[0.5], [2.0]]


def test_only_training_counts(balanced):
    balancer = balanced([[0.5], [2.0]], mass=[[-0.02], [0.02]])
    attention = attention_of()
    attention(*operands())
    attention.eval()(*operands())
    attention.train()(*operands())
    assert attention.observer.count == 2
    record = end(balancer)
    assert record.density[0, 0] > record.density[1, 0]
    assert attention.observer.count == 0
    # Estimates get what the step has found, and recall as it would be untuned.
    ((step, density, recall, multipliers),) = balancer.plans.observed
    assert step == 0 and multipliers.tolist() == [[0.5], [2.0]]
    np.testing.assert_allclose(recall - record.recall, [[-0.02], [0.02]], atol=1e-6)
    assert np.array_equal(density, record.density)


def test_a_step_without_a_plan_or_another_one_is_untuned(balanced):
    plain = density_at(1.0)[0].mean()
    balancer = balanced([[0.5], [0.5]])
    attention = attention_of()
    balancer.now = 1  # the step that was planned for was skipped
    attention(*operands())
    record = end(balancer, 2)
    assert record.density[0, 0] == pytest.approx(float(plain), rel=1e-6)
    assert np.isnan(record.density[1, 0]), "fewer micro-batches than usual"
    assert not record.planned and (record.multipliers == 1).all()
    attention(*operands())
    assert end(balancer, 3).density[0, 0] == pytest.approx(float(plain), rel=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_counts_once_and_its_backward_is_timed(balanced, recompute, monkeypatch):
    plain = balanced([[0.5], [2.0]])
    attention = attention_of()
    given = [operands(seed) for seed in (1, 2)]
    outs = [attention(*each) for each in given]
    for out in reversed(outs):
        out.sum().backward()
    record = end(plain)
    balancer = balanced([[0.5], [2.0]])
    attention = attention_of(recompute_attention=recompute)
    again = [[each.detach().clone().requires_grad_() for each in own] for own in given]
    outs = [tensor_parallel.checkpoint(partial(attention), False, *each) for each in again]
    forward = len(attention.observer._times)
    for out in reversed(outs):  # of other micro-batches than the last one
        out.sum().backward()
    numbers = [number for number, _ in attention.observer._times]
    assert forward == 2 and numbers == [0, 1, 1, 1, 0, 0]
    assert attention.observer.count == 2
    for one, other in zip(given, again):
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(one, other))
    checkpointed = end(balancer)
    assert np.array_equal(checkpointed.density, record.density)
    assert (checkpointed.measured_ms > 0).all()


class Then:
    """An attention whose output another operation needs in its backward."""

    def __init__(self, attention):
        self.attention = attention

    def __call__(self, *given):
        return self.attention(*given).sin()


def test_a_replay_without_its_first_pass_is_refused(balanced):
    for multipliers in ([[0.5], [2.0]], None):
        balanced(multipliers, observe=multipliers is None)
        attention = attention_of()
        call = torch.utils.checkpoint.checkpoint
        out = call(Then(attention), *operands(), use_reentrant=False)
        if multipliers is None:  # the price is the same in all micro-batches
            out.sum().backward()
            assert attention.observer.count == 1
            continue
        with pytest.raises(RuntimeError, match="--mtraining-tuning is on: use reentrant"):
            out.sum().backward()


def test_heads_and_layers_without_a_price_are_left_alone(balanced, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"0": {"dense": true}, "1": {"heads": {"2": {"dense": true}}}}}')
    balancer = balanced([[4.0], [4.0]])
    own = dict(settings=str(path), layers=3)
    layers = [attention_of(number=number, **own) for number in (1, 2, 3)]
    assert [attention.observer.tunable for attention in layers] == [
        [False] * 4, [True, True, False, True], [True],
    ]  # fmt: skip
    for attention in layers:
        attention(*operands())
    tuned = layers[1].observer._tuning(0)
    assert tuned[1].tolist() == [0.25, 0.25, 0, 0.25]
    dense, mixed, sparse = (attention.observer._density[0][0] for attention in layers)
    assert (dense == 1).all() and mixed[2] == 1
    assert (mixed[[0, 1, 3]] == sparse[[0, 1, 3]]).all() and (sparse < 0.5).all()
    end(balancer)
    fixed = attention_of(policy="fixed", price=None, vertical=16, slash=1)
    assert fixed.observer.tunable == [False]


def test_the_target_sees_recall_before_tuning(balanced):
    balanced([[2.0], [0.5]], mass=[[0.125], [-0.25]])
    attention = attention_of(target_recall=0.9, price=None, target_scope="model")
    seen = []
    for _ in range(2):
        attention(*operands())
        seen.append(attention.steering._seen.clone())
    now = torch.stack(attention.observer._recall)
    first, both = (float(each[0]) for each in seen)
    assert first == pytest.approx(float((1 - now[0] - 0.125).clamp(min=0).sum()))
    assert both - first == pytest.approx(float((1.25 - now[1]).sum()), rel=1e-5)
    # Three quarters of the rows see keys beyond window and sinks, in each of four heads.
    assert [float(each[1]) for each in seen] == pytest.approx([3, 6])


def test_what_is_no_number_stays_in_its_cell(balanced):
    balancer = balanced(None, observe=True)
    attention = attention_of()
    for value in (0.25, float("nan")):
        attention.observer.begin().observe(*torch.full((2, 1, 4), value))
    record = end(balancer)
    assert record.density[0, 0] == record.recall[0, 0] == 0.25
    assert np.isnan(record.density[1, 0]) and np.isnan(record.recall[1, 0])
    figures = record.figures(Group((2, 1)))
    assert figures["density"] == figures["recall"] == 0.25
    assert "nan" not in balance_log.line(1, balancer.interval.take())


def hand_made(rank, world):
    """DP 2 with a pipeline of two stages: ranks 0 and 2 are one replica's stages."""
    replica, stage = rank % 2, rank // 2
    layers = []
    for layer in range(2):
        ones = torch.ones(1, 4)
        density = [0.1 * (1 + replica) * ones, (0.2 + 0.1 * stage) * ones, ones]
        recall = [(0.9 - 0.1 * layer) * ones, 0.5 * ones, ones]
        times = [(0, 1.0 + replica), (1, 2.0), (0, 0.5), (2, 99.0)]
        layers.append(Observed(density, recall, times))
    if rank == 3:
        layers = []  # a stage without attention
    planned = None
    if rank == 0:
        planned = {
            name: np.array([[1.0, 2.0], [3.0, 4.0]]) * factor
            for factor, name in enumerate(
                ("multipliers", "predicted_ms", "tuned_ms", "density", "recall", "mass"), 1
            )
        }
    table = StepTable(2, 2, replica)
    filled = table.fill(planned, 0.25 if rank == 0 else 0.0, layers, 1, torch.device("cpu"))
    table.keep(RankGroup.everyone().all_reduce(filled))
    return table.read(), table.on_device("multipliers")


def test_the_table_against_numbers_made_by_hand():
    for rank, ((header, rows), own) in enumerate(run_ranks(4, hand_made)):
        assert header == {"planned": 1, "price": 0.25}
        assert rows["mass"].tolist() == [[6, 12], [18, 24]]
        assert own.tolist() == ([1, 3] if rank % 2 == 0 else [2, 4])
        assert rows["calls"].tolist() == [[4, 2], [4, 2]]
        np.testing.assert_allclose(rows["density_sum"], [[0.4, 0.4], [1.0, 0.4]], rtol=1e-6)
        np.testing.assert_allclose(rows["recall_sum"], [[3.4, 1.7], [2.0, 1.0]], rtol=1e-6)
        # Of all layers: sums over the stages; micro-batches past the last one do not count.
        np.testing.assert_allclose(rows["measured_ms"], [[6, 5], [8, 4]], rtol=1e-6)


def test_record_and_line_of_numbers_made_by_hand():
    seen = dict(zip(OBSERVED, np.array([
        [[0.2, 0.8], [0.4, 0.4]], [[1.8, 1.8], [2.0, 1.6]], [[2, 2], [2, 2]], [[1, 3], [2, 2]],
    ])))  # fmt: skip
    planned = dict(
        multipliers=[[0.5, 1.5], [0.5, 1.5]], predicted_ms=[[1, 4], [1, 4]],
        tuned_ms=[[2, 3], [1, 2]], density=[[0.1, 0.5], [0.1, 0.5]],
        recall=[[0.9, 0.9], [0.9, 0.9]], mass=[[-0.01, 0.03], [0, 0]],
    )  # fmt: skip
    planned = {name: np.array(rows) for name, rows in planned.items()}
    record = balance_log.StepRecord.of(4, seen, planned)
    assert record.density.tolist() == [[0.1, 0.4], [0.2, 0.2]]
    figures = record.figures(Group((2, 2)))
    expected = {
        "measured-ms": 5, "measured-max-over-mean": 1.25, "measured-idle-share": 0.2,
        "untuned-ms": 8, "untuned-max-over-mean": 1.6, "untuned-idle-share": 0.375,
        "predicted-ms": 5, "predicted-max-over-mean": 1.25, "predicted-idle-share": 0.2,
        "density": 0.225, "density-untuned": 0.3, "recall": 0.9, "recall-untuned": 0.9,
        "multiplier-lowest": 0.5, "multiplier-highest": 1.5, "mass-moved": 0.01,
    }  # fmt: skip
    assert figures == pytest.approx(expected)
    in_a_pipeline = record.figures(Group((2, 2), pipeline=True))
    assert in_a_pipeline["measured-ms"] == 6 and in_a_pipeline["untuned-ms"] == 8
    interval = balance_log.Interval()
    interval.add(record, Group((2, 2)))
    interval.add(balance_log.StepRecord.of(5, seen, None), Group((2, 2)))
    means = interval.take()
    assert means == pytest.approx(expected) and interval.take() == {}
    times = (
        "measured 5 ms (max/mean 1.250, idle 20.0%)",
        "predicted 5 ms (max/mean 1.250, idle 20.0%), untuned 8 ms (max/mean 1.600, idle 37.5%)",
    )
    rest = (
        "density 0.3000 expected untuned, 0.2250 seen | recall 0.9000 expected untuned, 0.9000 seen"
        " | price times 0.5 to 1.5"
    )
    begin = " [mtraining] iteration 6 | attention of the slowest rank: "
    assert balance_log.line(6, means) == f"{begin}{times[0]} | {times[1]} | {rest}"
    # Placing by length predicts no times.
    planned |= dict.fromkeys(("predicted_ms", "tuned_ms"), np.full((2, 2), np.nan))
    interval.add(balance_log.StepRecord.of(4, seen, planned), Group((2, 2)))
    assert balance_log.line(6, interval.take()) == f"{begin}{times[0]} | {rest}"


def test_a_guess_is_not_tuned_by():
    plans = Plans(np.array([[1.0, 9.0]]), np.full((1, 2), 0.1))
    plans.known = 2
    now = [0]
    balancer = Balancer(Layout(2, 0), lambda: 1, lambda: plans, 1.0, 0.25, lambda: now[0])
    found = []
    for step in (1, 2):
        balancer.end_step(step, RankGroup(None))
        now[0] = step
        found.append(balancer.tuning(0)[0].item())
    assert found[0] == 1 > found[1]


@pytest.fixture
def parallel(monkeypatch):
    """Makes the balancer of a run with so many replicas, stages and micro-batches."""
    from megatron.core import num_microbatches_calculator, parallel_state

    def make_of(config, dp, pp, count, **others):
        sizes = {
            "get_data_parallel_world_size": dp, "get_data_parallel_rank": 0,
            "get_tensor_model_parallel_world_size": 2, "get_context_parallel_world_size": 4,
        }  # fmt: skip
        for name, size in sizes.items():
            monkeypatch.setattr(parallel_state, name, lambda size=size, **_: size)
        monkeypatch.setattr(num_microbatches_calculator, "get_num_microbatches", lambda: count)
        args = SimpleNamespace(
            pipeline_model_parallel_size=pp, num_layers=3, num_attention_heads=4, **others
        )
        return balancer_of_arguments(args, config, lambda: 0, lambda: None)

    return make_of


@pytest.mark.parametrize(
    "dp, pp, count, off", [(1, 1, 4, True), (1, 2, 1, True), (1, 2, 4, False), (2, 1, 1, False)]
)
def test_a_run_that_has_nobody_to_wait_for(dp, pp, count, off, parallel, capsys):
    balancer = parallel(MTrainingConfig.from_options(tuning="on"), dp, pp, count)
    assert (balancer.max_mass is None) == off
    assert ("it changes nothing" in capsys.readouterr().out) == off
    assert balancer.layout == Layout(dp, 0, 8, pp > 1)
    assert parallel(MTrainingConfig(), dp, pp, count) is None


def test_tuning_starts_from_the_prices_of_heads(tmp_path):
    """Which a settings file may give, and which multipliers multiply: its bound on mass is of them."""
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"0": {"dense": true}, "1": {"price": 0.8}, "2": {"price": 0.8}}}')
    config = MTrainingConfig.from_options(tuning="on", price=0.1, settings=str(path))
    model = SimpleNamespace(num_layers=3, num_attention_heads=4)
    assert _typical_price(config, model) == 0.8
    assert _typical_price(MTrainingConfig.from_options(price=0.1), model) == 0.1


def test_tuning_goes_on_from_the_price_of_a_checkpoint():
    """Before the first table of the run has been read."""
    run, prices = RunState(), []
    run.balance.balancer = SimpleNamespace(goes_on_at=prices.append)
    run.steering_of(MTrainingConfig.from_options(price=0.3), 2, 2)
    run.resume(4)
    assert prices == [] and run.step == 4
    config = MTrainingConfig.from_options(target_recall=0.95, price=0.3)
    run.steering_of(config, 2, 2).restore([[0.5, 0.7], [0.6, 0.9]])
    run.resume(5)
    assert prices == [pytest.approx(0.65)]
