# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Arguments, batches and core attentions that several tests of the Megatron plug-in start from."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.megatron import MTrainingAttention, packed_documents
from megatron_mtraining.megatron.arguments import fill_in, refuse
from megatron_mtraining.megatron.options import add_arguments

SEQUENCE, BATCH, HEADS, GROUPS, DIM = 128, 2, 4, 2, 64
"""Of one core attention."""
BATCH_SEQUENCE, BLOCK = 768, 64
"""Of a batch from the data loader."""


def parse(*words: str, backend="mtraining", **others) -> argparse.Namespace:
    """Arguments as Megatron would have them, with our options parsed from ``words``."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    usual = {
        "attention_backend": AttnBackend[backend],
        "attention_dropout": 0.0,
        "seq_length": 4096,
        "encoder_seq_length": None,
        "context_parallel_size": 2,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "kv_channels": None,
        "cp_comm_type": ["p2p"],
        "softmax_type": "vanilla",
        "create_attention_mask_in_dataloader": False,
        "rank": 0,
    }
    for name, value in {**usual, **others}.items():
        setattr(args, name, value)
    return args


def check(args) -> list[str]:
    """What a run does with its arguments around Megatron's validation; the lines it logs."""
    refuse(args)
    return fill_in(args)


def whole_batch(**others) -> dict:
    tokens = torch.arange(2 * BATCH_SEQUENCE).view(2, BATCH_SEQUENCE)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (tokens % 3 > 0).float(),
        "position_ids": torch.arange(BATCH_SEQUENCE).repeat(2, 1),
        "attention_mask": None,
        **others,
    }


def run_with(monkeypatch, backend, **others) -> None:
    """Let Megatron's global arguments choose ``backend`` while a model is given a batch."""
    args = SimpleNamespace(
        attention_backend=backend, seq_length=BATCH_SEQUENCE, mtraining_block_size=BLOCK, **others
    )
    monkeypatch.setattr(packed_documents, "training_arguments", lambda: args)


def make_config(**others) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        attention_backend=AttnBackend.mtraining,
    )
    config.mtraining = MTrainingConfig.from_options(block_size=64, slash=SEQUENCE, vertical=0)
    for name, value in others.items():
        setattr(config, name, value)
    return config


def make(config=None, **others) -> MTrainingAttention:
    given = {"layer_number": 3, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return MTrainingAttention(config or make_config(), **{**given, **others})


def operands(dim=DIM, dtype=torch.float32, queries=SEQUENCE):
    torch.manual_seed(0)
    query = torch.randn(queries, BATCH, HEADS, dim).to(dtype)
    packed = torch.randn(SEQUENCE, BATCH, GROUPS, 2 * dim).to(dtype)
    return query, packed[..., :dim].contiguous(), packed[..., dim:]  # as Megatron's value: strided
