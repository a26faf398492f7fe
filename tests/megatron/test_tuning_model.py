# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tuning of a GPTModel over data- and context-parallel ranks: as one process with the same multipliers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_mtraining.relayout import zigzag
from megatron_mtraining.visibility import VisibleRanges
from tests.support.gpt_models import build, draw_batch, start
from tests.support.ranks import run_ranks
from tests.support.tuning_cases import Plans

SEQUENCE, BLOCK, MICROBATCHES = 1024, 64, 2
LENGTHS = [[1024], [256] * 4]
"""Documents of the samples of a data-parallel rank: the first one is the straggler."""
MAX_MASS = 0.2


def sharp_model(cp_size: int):
    """Whose attention is sharp enough to be sparse."""
    model = build(
        dict(block_size=BLOCK, window=BLOCK, price=0.8, sample_strata=16),
        dict(num_attention_heads=4, num_query_groups=2, context_parallel_size=cp_size),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_qkv.weight" in name:
                parameter *= 12
    return model


def sample(microbatch: int, rank: int) -> dict:
    ids = torch.cat([torch.arange(length) for length in LENGTHS[rank]])[None]
    return {**draw_batch(1, SEQUENCE, 10 * rank + microbatch), "position_ids": ids}


def train(model, samples, cp_rank: int, cp_size: int) -> tuple[torch.Tensor, dict]:
    """Sums of losses and gradients of samples, one micro-batch each; with a forward of evaluation between."""
    from megatron.core.pipeline_parallel.schedules import custom_backward

    from megatron_mtraining.megatron.packed_documents import packed_seq_params_of

    model.zero_grad()
    total = torch.zeros(())
    for number, given in enumerate(samples):
        params = packed_seq_params_of(VisibleRanges.from_position_ids(given["position_ids"]))
        batch = {name: zigzag(value, cp_rank, cp_size) for name, value in given.items()}
        tensors = batch["tokens"], batch["position_ids"], None
        if number == 1:
            with torch.no_grad():
                model.eval()(*tensors, labels=batch["labels"], packed_seq_params=params)
            model.train()
        losses = model(*tensors, labels=batch["labels"], packed_seq_params=params)
        loss = losses.sum() / SEQUENCE
        total += loss.detach()
        custom_backward(loss, None)  # as training does; torch's own would leave the CPU shim
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return total, gradients


def tuned_steps(rank, world, cp_size):
    """Two steps: the first one untuned."""
    state = start(context_parallel_size=cp_size)
    from megatron_mtraining.cp_group import RankGroup
    from megatron_mtraining.megatron import run_state
    from megatron_mtraining.megatron.balance.balancer import Balancer, Layout
    from megatron_mtraining.megatron.run_state import RUN

    dp_size, dp_rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    cp_rank = state.get_context_parallel_rank()
    pairs = [[sum(n * (n + 1) / 2e3 for n in LENGTHS[r]) for r in range(dp_size)]] * MICROBATCHES
    plans = Plans(pairs, np.full((MICROBATCHES, dp_size), 0.3)) if rank == 0 else None
    RUN.balance.balancer = Balancer(
        Layout(dp_size, dp_rank, cp_size), lambda: MICROBATCHES, lambda: plans, MAX_MASS, 0.8,
        lambda: RUN.step,
    )  # fmt: skip
    model = sharp_model(cp_size)
    steps = []
    for step in (1, 2):
        total, gradients = train(
            model, [sample(k, dp_rank) for k in range(MICROBATCHES)], cp_rank, cp_size
        )
        everyone = RankGroup.everyone()
        for value in (total, *gradients.values()):
            everyone.all_reduce(value)
        if step == 2:
            own = [RUN.balance.balancer.tuning(number)[0].item() for number in range(MICROBATCHES)]
        run_state.advance(step)
        RUN.balance.balancer.read()
        steps.append((total, gradients, RUN.balance.balancer.interval.last))
    state.destroy_model_parallel()
    return dp_rank, own, steps, (plans.observed if plans else None)


def in_one_process(rank, world, multipliers):
    """All samples of a step, with these multipliers ``[M, dp]``; None for none."""
    state = start()
    from megatron_mtraining.megatron.run_state import RUN
    from tests.support.tuning_cases import Given

    dp_size = multipliers.shape[1]
    flat = multipliers.reshape(-1, 1)
    RUN.balance.balancer = Given(flat, np.zeros_like(flat), False)
    model = sharp_model(1)
    samples = [sample(k, r) for k in range(MICROBATCHES) for r in range(dp_size)]
    total, gradients = train(model, samples, 0, 1)
    state.destroy_model_parallel()
    return total, gradients


@pytest.mark.slow
def test_replicas_are_tuned_as_in_one_process():
    cp_size = dp_size = 2
    found = run_ranks(4, tuned_steps, cp_size)
    first, second = (found[0][2][step][2] for step in (0, 1))
    assert (first.multipliers == 1).all() and not first.planned
    multipliers = second.multipliers
    assert second.planned and multipliers.shape == (MICROBATCHES, dp_size)
    assert (multipliers[:, 0] > 1).all() and (multipliers[:, -1] < 1).all(), multipliers
    for dp_rank, own, _, _ in found:
        assert own == multipliers[:, dp_rank].tolist(), "the same on all ranks of a replica"
    # Stragglers become sparser, idle ranks denser; the samples are the same in both steps.
    assert (second.density[:, 0] < first.density[:, 0]).all(), (first.density, second.density)
    assert (second.density[:, -1] > first.density[:, -1]).all(), (first.density, second.density)
    for record in (first, second):
        assert np.isfinite(record.density).all() and (record.recall <= 1).all()
        assert (record.measured_ms > 0).all()
    for _, _, steps, _ in found[1:]:
        for (_, _, one), (_, _, other) in zip(found[0][2], steps):
            assert all(
                np.array_equal(a, b, equal_nan=True)
                for a, b in zip(vars(one).values(), vars(other).values())
            )
    ((step, density, recall, moved), *_) = found[0][3]
    assert step == 0 and np.array_equal(density, first.density) and (moved == 1).all()
    for record, (total, gradients, _) in zip((first, second), found[0][2]):
        ((wanted, expected),) = run_ranks(1, in_one_process, record.multipliers)
        torch.testing.assert_close(total, wanted, atol=1e-5, rtol=1e-5)
        for name, value in gradients.items():
            torch.testing.assert_close(value, expected[name], atol=2e-5, rtol=1e-4, msg=name)
    assert not torch.allclose(found[0][2][0][0], found[0][2][1][0], atol=1e-5), "it has an effect"
