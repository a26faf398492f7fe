# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One rank of test_output: GPTModel with the loss in chunks against the same model with Megatron's own.

torchrun ... loss_worker.py
"""

from __future__ import annotations

import copy
import logging

import torch
import torch.distributed as dist

from tests.support import cpu_shim

SEQUENCE, BATCH, VOCABULARY = 128, 2, 56

# Tensor- and pipeline-parallel ranks, and what else; chunks that do and do not divide the 256 tokens.
CASES = [
    dict(ranks=1, tied=True, chunk=64),
    dict(ranks=1, tied=True, chunk=5000, mup=True),
    dict(ranks=1, tied=False, chunk=100, mup=True),
    dict(ranks=1, tied=True, chunk=77, bf16=True),
    dict(ranks=1, tied=True, chunk=None, bf16=True),
    dict(ranks=1, tied=True, chunk=100, fused=True),
    dict(ranks=1, tied=False, chunk=100, fused=True, bf16=True),
    dict(ranks=1, tied=True, chunk=100, fused="bf16", bf16=True),
    dict(ranks=2, tied=True, chunk=100, tp=2),
    dict(ranks=2, tied=False, chunk=100, tp=2, sp=True),
    dict(ranks=2, tied=True, chunk=100, tp=2, sp=True, bf16=True),
    dict(ranks=2, tied=False, chunk=100, tp=2, fused=True),
    dict(ranks=2, tied=False, chunk=100, dp=2, fused=True),
    dict(ranks=2, tied=True, chunk=100, pp=2),
    dict(ranks=2, tied=True, chunk=100, pp=2, fused=True),
]


def build(case: dict, chunk: int | None):
    """The same weights each time."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mtraining import MTrainingConfig

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    more = {}
    if case.get("mup") and hasattr(TransformerConfig, "use_mup"):  # from Megatron-Core 0.17 on
        more = dict(use_mup=True, mup_output_mult=0.25)
    config = TransformerConfig(
        num_layers=case.get("pp", 1), hidden_size=128, num_attention_heads=2, kv_channels=64,
        ffn_hidden_size=64, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        attention_backend=AttnBackend.mtraining, gradient_accumulation_fusion=bool(case.get("fused")),
        tensor_model_parallel_size=case.get("tp", 1), pipeline_model_parallel_size=case.get("pp", 1),
        sequence_parallel=case.get("sp", False), pipeline_dtype=dtype, params_dtype=dtype,
        bf16=dtype is torch.bfloat16, **more,
    )  # fmt: skip
    config.mtraining = MTrainingConfig.from_options(
        block_size=64, slash=SEQUENCE, vertical=0, loss_chunk=chunk
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case["tied"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    with torch.no_grad():  # initial logits are nearly equal: make the softmax tell words apart
        for param in model.parameters():
            param.mul_(3 if param.dim() == 2 else 1)
    return model


def batches():
    """Three microbatches, with loss masks that keep some tokens, all, and none."""
    for seed, kept in ((3, 0.6), (4, 1.0), (5, 0.0)):
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=draw)
        mask = torch.rand(BATCH, SEQUENCE, generator=draw) < kept
        yield tokens, tokens.roll(-1, 1), mask.float()


def train(model, case: dict) -> dict:
    """Losses and gradients of some microbatches, in real DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    overlap = "dp" in case  # gradients are sent by hooks, as each weight has its own
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.get("fused") != "bf16", use_distributed_optimizer=overlap,
        overlap_grad_reduce=overlap, bucket_size=8000 if overlap else None,
    )  # fmt: skip
    wrapped = DistributedDataParallel(model.config, settings, model)
    model.config.no_sync_func = wrapped.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    results = {}

    def forward_step(data, model):
        tokens, labels, mask = next(data)
        losses = model(tokens, torch.arange(SEQUENCE).repeat(BATCH, 1), None, labels=labels)

        def loss_func(losses):
            assert losses.shape == (BATCH, SEQUENCE) and losses.dtype == torch.float32
            results[f"losses {len(results)}"] = losses.detach().clone()
            loss = (losses.view(-1) * mask.view(-1)).sum() / mask.sum().clamp(min=1)
            return loss, {}

        return losses, loss_func

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches(), model=[wrapped], num_microbatches=3,
        seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    if parallel_state.is_pipeline_last_stage():
        assert len(results) == 3
    for name, param in model.named_parameters():
        results[name] = param.main_grad.float().clone()
    wrapped.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batches(), model=[wrapped], num_microbatches=3,
            seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=True,
        )  # fmt: skip
    return results


def compare(case: dict) -> None:
    from megatron.core import tensor_parallel

    from megatron_mtraining.megatron.output_layer import ChunkedOutputLayer

    theirs, ours = build(case, 0), build(case, case["chunk"])
    layer = getattr(theirs, "output_layer", None)
    assert layer is None or type(layer) is tensor_parallel.ColumnParallelLinear
    assert layer is None or type(ours.output_layer) is ChunkedOutputLayer
    calls = []  # wrappers gather weights in such hooks
    if layer is not None:
        ours.output_layer.register_forward_pre_hook(lambda *_: calls.append(None))
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    expected, actual = train(theirs, case), train(ours, case)
    assert expected.keys() == actual.keys()
    assert len(calls) == (0 if layer is None else 6)
    tolerance = 2e-2 if case.get("bf16") else 2e-6
    for name, value in expected.items():
        assert value.abs().max() > 0 or name.endswith("bias"), name
        error = (actual[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error < tolerance, (case, name, error.item())
    if ours.post_process and ours.pre_process:  # inference: logits, as ever
        words = next(batches())[0]
        positions = torch.arange(SEQUENCE).repeat(BATCH, 1)
        with torch.no_grad():
            logits = [model(words, positions, None) for model in (ours, theirs)]
        assert torch.equal(*logits) and logits[0].dim() == 3


def stub_fused_gradients() -> None:
    """APEX's product with its sum in ``main_grad``, which has no CPU version."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import layers

    def add(hidden, grad, main_grad):
        main_grad.add_((grad.float().t() @ hidden.float()).to(main_grad.dtype))

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
    )
    layers._grad_accum_fusion_available = True


def allow_sequence_parallel_norms() -> None:
    """PyTorch's norm is the only one without a GPU, and Megatron refuses it with sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def __new__(cls, config, *args, **kwargs):
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = make(cls, without, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = __new__


def main() -> None:
    logging.disable(logging.INFO)  # each parameter of each model, else
    cpu_shim.install_torch()
    cpu_shim.install_core()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state

    import megatron_mtraining

    megatron_mtraining.register()
    stub_fused_gradients()
    allow_sequence_parallel_norms()
    for case in CASES:
        if case["ranks"] != dist.get_world_size():
            continue
        parallel_state.initialize_model_parallel(case.get("tp", 1), case.get("pp", 1))
        compare(case)
        parallel_state.destroy_model_parallel()
        if dist.get_rank() == 0:
            print(f"ok: {case}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
