# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Multi-token prediction where tokens are cut over context- and tensor-parallel ranks (sequence parallelism);
its layers among those of a model."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.megatron.layer_pattern import attention_layers
from megatron_mtraining.relayout import zigzag
from tests.support.gpt_models import allow_sequence_parallel_norms, build, draw_batch, start
from tests.support.ranks import run_ranks

SEQUENCE, BLOCK = 512, 64
CP = TP = 2


def batch_of(cp: int, rank: int) -> dict:
    """A rank's part of a batch whose loss masks have as many tokens on each rank after two shifts by one."""
    batch = draw_batch(2, SEQUENCE)
    position = torch.arange(SEQUENCE)
    starts = [position % (SEQUENCE // (2 * size)) < 2 for size in (1, CP)]
    batch["loss_mask"] = (~torch.stack(starts).any(0)).float().repeat(2, 1)
    return batch if cp == 1 else {name: zigzag(each, rank, cp) for name, each in batch.items()}


def train(rank: int, size: int, is_ours: bool) -> dict:
    """Loss and gradients of one batch, of the whole model."""
    logging.disable(logging.INFO)
    cp, tp = (CP, TP) if size > 1 else (1, 1)
    state = start(is_ours, tensor_model_parallel_size=tp, context_parallel_size=cp)
    allow_sequence_parallel_norms()
    from megatron.core.pipeline_parallel.schedules import custom_backward
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    settings = dict(block_size=BLOCK, slash=SEQUENCE, vertical=0, loss_chunk=77)
    model = build(
        settings if is_ours else None,
        dict(
            mtp_num_layers=2, calculate_per_token_loss=True, context_parallel_size=cp,
            tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        ),
    )  # fmt: skip
    batch = batch_of(cp, state.get_context_parallel_rank())
    count = batch_of(1, 0)["loss_mask"].sum()
    MTPLossAutoScaler.set_loss_scale(1 / count)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    loss = (losses * batch["loss_mask"]).sum() / count
    custom_backward(loss, None)
    result, group = {"loss": loss.detach().clone()}, state.get_tensor_model_parallel_group()
    for name, param in model.named_parameters():
        grad = param.grad.clone()
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(grad, group=group)
        if getattr(param, "tensor_model_parallel", False):
            parts = [torch.empty_like(grad) for _ in range(tp)]
            dist.all_gather(parts, grad, group=group)
            grad = torch.cat(parts, param.partition_dim)
        result[name] = grad
    for value in result.values():
        dist.all_reduce(value, group=state.get_context_parallel_group())
    return {name: value.numpy() for name, value in result.items()}


@pytest.mark.slow
def test_sequence_parallel_ranks_train_as_dense_attention():
    (dense,), (ours, *_) = run_ranks(1, train, False), run_ranks(CP * TP, train, True)
    assert ours.keys() == dense.keys() and any("mtp.layers.1" in name for name in ours)
    for name, value in dense.items():
        wanted = torch.from_numpy(value)
        assert wanted.abs().max() > 0 or name.endswith("bias"), name
        torch.testing.assert_close(torch.from_numpy(ours[name]), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("given, count", [({}, 4), (dict(mtp_use_repeated_layer=True), 3)])
def test_its_layers_come_after_those_of_the_decoder(given, count):
    assert attention_layers(SimpleNamespace(num_layers=2, mtp_num_layers=2, **given)) == count
    assert attention_layers(SimpleNamespace(num_layers=2, mtp_num_layers=None, **given)) == 2


def prices(rank: int, size: int, file) -> tuple:
    """What a step moves the prices of heads to, and which policies they have."""
    start()
    from megatron_mtraining.megatron.run_state import RUN

    settings = dict(block_size=BLOCK, price=1.0, target_recall=0.9, settings=str(file))
    model = build(settings, dict(mtp_num_layers=1))
    batch = draw_batch(1, SEQUENCE)
    model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    RUN.advance(1)
    ours = [
        *(layer.self_attention.core_attention for layer in model.decoder.layers),
        *(each for each in model.mtp.modules() if hasattr(each, "mtraining")),
    ]
    return ours[-1].steering.state(), [each.head_policies is None for each in ours]


def test_a_target_moves_its_prices_and_files_leave_it_alone(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"layers": {"1": {"price": 2.0}}}))
    ((table, of_run),) = run_ranks(1, prices, file)
    assert of_run == [True, False, True]
    assert len(table) == 3 and all(price != 1 for price in table[2])
