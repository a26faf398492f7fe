# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The model: a small GPTModel of Megatron-Core in the shape of Qwen2.5, and its loss."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from ...config import MTrainingConfig
from ...models.megatron_gpt import UNFUSED
from ...relayout import zigzag
from .options import HEAD_DIM, Options
from .text import VOCABULARY


@contextmanager
def context_parallel(size: int, options: Options):
    """Megatron's process groups with ``size`` context-parallel ranks, while the context lasts."""
    # They do not take over the timeout of the group of all ranks.
    parallel_state.initialize_model_parallel(
        context_parallel_size=size, distributed_timeout_minutes=options.timeout / 60
    )
    try:
        model_parallel_cuda_manual_seed(options.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build(options: Options, cp_size: int, mtraining: MTrainingConfig | None) -> GPTModel:
    """A GPTModel with the weights of ``options.seed``, the same on every rank and machine.

    Args:
        cp_size: size of the context-parallel group.
        mtraining: settings of the ``mtraining`` backend; None builds Megatron's own dense
            attention, which supports no context parallelism without Transformer Engine.
    """
    on_gpu = options.device == "cuda"
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=-(-options.hidden * 8 // 3 // 64) * 64,  # SwiGLU: about 8/3 of hidden
        num_attention_heads=options.heads,
        num_query_groups=options.kv_heads,
        kv_channels=HEAD_DIM,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=cp_size,
        attention_backend=AttnBackend.unfused if mtraining is None else AttnBackend["mtraining"],
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        **UNFUSED,
    )
    config.mtraining = mtraining
    torch.manual_seed(options.seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=options.seq_length,
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_base=1_000_000,
    )
    return model.to(options.device)


def loss_of(model: GPTModel, sequence: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """This rank's part of a sequence's mean loss; the sum over context-parallel ranks is the mean.

    Args:
        sequence: token ids ``[s + 1]``; this rank computes its own part.
    """
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    sequence = sequence.long()[None]
    tokens, labels = sequence[:, :-1], sequence[:, 1:]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    own, positions, labels = (zigzag(each, rank, size) for each in (tokens, positions, labels))
    losses = model(own, positions, attention_mask, labels=labels)
    return losses.float().sum() / tokens.numel()


@torch.no_grad()
def total_loss(model: GPTModel, sequence: Tensor, attention_mask: Tensor | None = None) -> float:
    """A sequence's mean loss."""
    return sum_over_ranks(loss_of(model, sequence, attention_mask))


def sum_over_ranks(share: Tensor) -> float:
    share = share.detach().clone()
    dist.all_reduce(share, group=parallel_state.get_context_parallel_group())
    return share.item()


def megatron_losses(options: Options, weights: dict | None, sequences: Tensor) -> list[float]:
    """Losses of sequences ``[n, s + 1]`` by Megatron's own DotProductAttention, in one process.

    This independent implementation is the reference for dense attention over the ring. It runs where the
    context-parallel size is 1.

    Args:
        weights: a state dict, or None for the initial weights.
    """
    model = build(options, 1, None)
    if weights is not None:
        model.load_state_dict(weights)
    shape = (1, 1, options.seq_length, options.seq_length)
    future = torch.ones(shape, dtype=torch.bool, device=options.device).triu(1)
    return [total_loss(model, sequence, future) for sequence in sequences]
