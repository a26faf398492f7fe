# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Times of the steps that are logged, over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.labels import BACKWARD, FORWARD, LOSS_FORWARD, SEARCH, TIMES, WAIT
from megatron_mtraining.megatron import step_times
from megatron_mtraining.megatron.step_times import StepTimes, take_times, time_step
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    TIMES.take()


def of_ranks(rank, world):
    """Rank 2 is of a pipeline stage without attention."""
    times = [
        {SEARCH: 1.0, FORWARD: 2.0, BACKWARD: 3.0, WAIT: 0.5},
        {SEARCH: 1.5, FORWARD: 1.0, BACKWARD: 1.5},
        {LOSS_FORWARD: 7.0},
    ]
    TIMES.take = lambda: times[rank]
    return take_times()


def test_the_slowest_rank_and_the_imbalance():
    for found in run_ranks(3, of_ranks):
        assert found == StepTimes(1.5, 5.0, 7.0, 0.5, 4.5 * 2 / 7)
    figures = found.figures()
    assert figures["mtraining-time/search-ms"] == 1.5
    assert figures["mtraining-time/attention-max-over-mean"] == pytest.approx(9 / 7)
    assert str(found).endswith(
        "attention 5 ms (max/mean 1.286, exposed communication 0.5 ms), loss 7 ms"
    )
    alone = StepTimes(0.0, 5.0, 0.0, 0.0, 1.0)  # of one rank, dense, with Megatron's own loss
    assert (
        str(alone) == "attention 5 ms (max/mean 1.000)"
        and "mtraining-time/loss-ms" not in alone.figures()
    )


@pytest.mark.parametrize("interval, timed", [(1, [2, 3, 4]), (2, [2, 4])])
def test_steps_that_are_logged_are_timed_but_the_first(interval, timed, monkeypatch):
    run = SimpleNamespace(logged=False, step_is_logged=lambda: step % interval == 0)
    monkeypatch.setattr(step_times, "RUN", run)
    args = SimpleNamespace(attention_backend="mtraining")
    monkeypatch.setattr(step_times, "training_arguments", lambda: args)
    found = []
    for step in range(1, 5):
        time_step()
        if TIMES.on:
            with TIMES.span(FORWARD):
                pass
        if take_times() is not None:
            found.append(step)
        run.logged = True
    assert found == timed
    monkeypatch.setattr(step_times, "training_arguments", lambda: None)
    time_step()
    assert not TIMES.on, "another training loop has no log"


def waits_of_a_ring(rank, world):
    query, key, value = (torch.randn(128, 1, 2, 64, requires_grad=True) for _ in range(3))
    config = MTrainingConfig.from_options(price=0.5, block_size=64)
    found = []
    for TIMES.on in (False, True):
        attend(
            query, key, value, config=config, cp_group=dist.group.WORLD, cp_inner=1
        ).out.sum().backward()
        found.append(TIMES.take())
    return found


def test_waits_for_keys_are_exposed_communication():
    for before, found in run_ranks(2, waits_of_a_ring):
        assert before == {} and 0 < found[WAIT] < found[FORWARD] + found[BACKWARD]
