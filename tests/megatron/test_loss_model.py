# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""megatron-core's GPTModel with the loss in chunks: losses and gradients of Megatron's own loss."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.gpt_models import (
    VOCABULARY,
    allow_sequence_parallel_norms,
    build,
    draw_batch,
    run_schedule,
    start,
)
from tests.support.ranks import run_ranks

SHAPE = 2, 128
CASES = [
    # Parallel ranks of one kind, and chunks that do and do not divide the 256 tokens.
    dict(ranks=1, tied=True, chunk=64),
    dict(ranks=1, tied=True, chunk=5000, mup=True),
    dict(ranks=1, tied=False, chunk=100, mup=True),
    dict(ranks=1, tied=True, chunk=None, bf16=True),
    dict(ranks=1, tied=True, chunk=100, fused=True),
    dict(ranks=1, tied=False, chunk=77, fused=True, bf16=True),
    dict(ranks=1, tied=True, chunk=100, fused="bf16", bf16=True),
    dict(ranks=2, tied=True, chunk=100, tp=2),
    dict(ranks=2, tied=False, chunk=100, tp=2, sp=True),
    dict(ranks=2, tied=True, chunk=100, tp=2, sp=True, bf16=True),
    dict(ranks=2, tied=False, chunk=100, tp=2, fused=True),
    dict(ranks=2, tied=False, chunk=100, dp=2, fused=True),
    dict(ranks=2, tied=True, chunk=100, pp=2, fused=True),
    dict(ranks=1, tied=False, chunk=100, mup=True, mtp=2),
    dict(ranks=2, tied=True, chunk=100, tp=2, sp=True, mtp=2),
    dict(ranks=2, tied=False, chunk=100, pp=2, mtp=1),
]


def model_of(case: dict, chunk: int | None):
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    config = dict(
        num_layers=case.get("pp", 1), gradient_accumulation_fusion=bool(case.get("fused")),
        tensor_model_parallel_size=case.get("tp", 1), pipeline_model_parallel_size=case.get("pp", 1),
        sequence_parallel=case.get("sp", False), pipeline_dtype=dtype, params_dtype=dtype,
        bf16=dtype is torch.bfloat16, mtp_num_layers=case.get("mtp"),
    )  # fmt: skip
    if case.get("mup") and hasattr(TransformerConfig, "use_mup"):  # from Megatron-Core 0.17 on
        config.update(use_mup=True, mup_output_mult=0.25)
    model = build(
        dict(block_size=64, slash=SHAPE[1], vertical=0, loss_chunk=chunk), config,
        share_embeddings_and_output_weights=case["tied"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    with torch.no_grad():  # initial logits are nearly equal: make the softmax tell words apart
        for param in model.parameters():
            param.mul_(3 if param.dim() == 2 else 1)
    return model


def micro_batches() -> list[dict]:
    """With loss masks that keep some tokens, all, and none."""
    kept = enumerate((0.6, 1.0, 0.0), 3)
    return [
        {**draw_batch(*SHAPE, seed), "mask": (torch.rand(SHAPE) < share).float()}
        for seed, share in kept
    ]


def train(model, case: dict) -> dict:
    """Losses and gradients of some micro-batches, in real DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    overlap = "dp" in case  # gradients are sent by hooks, as each weight has its own
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.get("fused") != "bf16", use_distributed_optimizer=overlap,
        overlap_grad_reduce=overlap, bucket_size=8000 if overlap else None,
    )  # fmt: skip
    wrapped = DistributedDataParallel(model.config, settings, model)
    model.config.no_sync_func = wrapped.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    results = {}

    def loss_of(losses, batch):
        assert losses.shape == SHAPE and losses.dtype == torch.float32
        results[f"losses {len(results)}"] = losses.detach().clone()
        mask = batch["mask"]
        return (losses * mask).sum() / mask.sum().clamp(min=1), {}

    torch.manual_seed(5)
    batches = micro_batches()
    run_schedule([wrapped], batches, loss_of, SHAPE)
    if parallel_state.is_pipeline_last_stage():
        assert len(results) == 3
    for name, param in model.named_parameters():
        results[name] = param.main_grad.float().clone()
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    logged = MTPLossLoggingHelper.tracker  # losses, and from 0.19 on the tokens that are right
    results.update({key: each.clone() for key, each in logged.items() if isinstance(each, Tensor)})
    logged.clear()
    wrapped.eval()
    with torch.no_grad():
        run_schedule([wrapped], batches, loss_of, SHAPE, forward_only=True)
    return results


def compare(case: dict) -> None:
    from megatron.core import tensor_parallel

    from megatron_mtraining.megatron.output_layer import ChunkedOutputLayer

    theirs, ours = model_of(case, 0), model_of(case, case["chunk"])
    assert hasattr(ours, "mtp") == (ours.post_process and "mtp" in case)
    layer = getattr(theirs, "output_layer", None)
    assert layer is None or type(layer) is tensor_parallel.ColumnParallelLinear
    assert layer is None or type(ours.output_layer) is ChunkedOutputLayer
    calls = []  # wrappers gather weights in such hooks
    if layer is not None:
        ours.output_layer.register_forward_pre_hook(lambda *_: calls.append(None))
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    expected, actual = train(theirs, case), train(ours, case)
    assert expected.keys() == actual.keys()
    depths = case.get("mtp", 0)
    assert (
        (len(calls) >= 6 * (1 + depths) * 2) if depths and layer else len(calls) == 6 * bool(layer)
    )
    tolerance = 2e-2 if case.get("bf16") else 2e-6
    for name, value in expected.items():
        assert value.abs().max() > 0 or name.endswith("bias"), name
        error = (actual[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error < tolerance, (case, name, error.item())
    if ours.post_process and ours.pre_process and not depths:  # inference: logits, as ever
        batch = draw_batch(*SHAPE)
        with torch.no_grad():
            logits = [m(batch["tokens"], batch["position_ids"], None) for m in (ours, theirs)]
        assert torch.equal(*logits) and logits[0].shape[-1] == VOCABULARY // case.get("tp", 1)


def stub_fused_gradients() -> None:
    """APEX's product with its sum in ``main_grad``, which has no CPU version."""
    from megatron.core.tensor_parallel import layers

    def add(hidden, grad, main_grad):
        main_grad.add_((grad.float().t() @ hidden.float()).to(main_grad.dtype))

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
    )
    layers._grad_accum_fusion_available = True


def compare_all(rank: int, size: int) -> None:
    logging.disable(logging.INFO)  # each parameter of each model, else
    state = start()
    stub_fused_gradients()
    allow_sequence_parallel_norms()
    for case in CASES:
        if case["ranks"] == size:
            state.destroy_model_parallel()
            state.initialize_model_parallel(case.get("tp", 1), case.get("pp", 1))
            compare(case)


@pytest.mark.parametrize("size", [1, 2])
def test_losses_and_gradients_are_megatron_s(size):
    run_ranks(size, compare_all)
