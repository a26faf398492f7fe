# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The model: a small GPTModel of megatron-core in the shape of Qwen2.5, and its loss."""

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
from ...layout import stripe_batch
from .options import HEAD_DIM, Options


@contextmanager
def context_parallel(size: int, seed: int):
    """Megatron's process groups with ``size`` context-parallel ranks, while the context lasts."""
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    try:
        model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build(options: Options, cp_size: int, mtraining: MTrainingConfig | None) -> GPTModel:
    """A GPTModel with the weights that ``options.seed`` gives, the same on every rank.

    Args:
        cp_size: of the groups now in force.
        mtraining: settings of the ``mtraining`` backend; None builds Megatron's own dense
            attention, which knows no context parallelism without Transformer Engine.
    """
    on_gpu = options.device == "cuda"
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
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
        # Weights drawn on the CPU are the same on any machine.
        use_cpu_initialization=True,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        # Fusions need a GPU, apex or Transformer Engine.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    config.mtraining = mtraining
    torch.manual_seed(options.seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=options.vocab_size,
        max_sequence_length=options.seq_length,
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_base=1_000_000,
    )
    return model.to(options.device)


def batch_of(sequences: Tensor, cp_rank: int, cp_size: int, block_size: int) -> dict:
    """A rank's part of a batch, as Megatron's ``get_batch`` gives it.

    Args:
        sequences: token ids ``[b, s + 1]``.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), each
        ``[b, s / cp_size]``, striped in blocks of ``block_size``.
    """
    sequences = sequences.long()
    tokens, labels = sequences[:, :-1], sequences[:, 1:]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "position_ids": positions,
        "loss_mask": torch.ones_like(tokens, dtype=torch.float32),
    }
    return stripe_batch(batch, cp_rank, cp_size, block_size)


def loss_of(model: GPTModel, batch: dict, attention_mask: Tensor | None = None) -> Tensor:
    """This rank's share of the mean loss: summed over ranks it is the mean over all tokens."""
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        attention_mask,
        labels=batch["labels"],
    )
    mask = batch["loss_mask"]
    count = mask.sum()
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return (losses.float() * mask).sum() / count


@torch.no_grad()
def megatron_loss(options: Options, weights: dict | None, sequences: Tensor) -> list[float]:
    """Losses of whole sequences by Megatron's own DotProductAttention, in one process.

    The yardstick for dense attention over the ring: another implementation, without context
    parallelism. Call it where the context-parallel size is 1.

    Args:
        weights: a state dict, or None for the weights of the seed.
        sequences: ``[n, s + 1]``.
    """
    model = build(options, 1, None)
    if weights is not None:
        model.load_state_dict(weights)
    length = options.seq_length
    masked = torch.ones(1, 1, length, length, dtype=torch.bool, device=options.device).triu(1)
    block_size = options.sparse.block_size
    return [
        loss_of(model, batch_of(sequence[None], 0, 1, block_size), masked).item()
        for sequence in sequences
    ]
