# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Small GPTModels of megatron-core on the ranks of a test, and steps of Megatron's schedules, on the CPU."""

from __future__ import annotations

import copy
from dataclasses import fields

import torch

from tests.support import cpu_shim

VOCABULARY = 96


def start(register: bool = True, **sizes):
    """This process as a rank of Megatron's on the CPU, with the plug-in; Megatron's ``parallel_state``.

    Args:
        sizes: of ``initialize_model_parallel``.
    """
    import megatron_mtraining

    cpu_shim.install_torch()
    cpu_shim.install_core()
    from megatron.core import parallel_state

    if register:
        megatron_mtraining.register()
    parallel_state.initialize_model_parallel(**sizes)
    return parallel_state


def config_of(settings: dict | None, config: dict | None = None):
    """The TransformerConfig of a small model.

    Args:
        settings: of ``MTrainingConfig.from_options``; None for Megatron's own attention.
        config: of TransformerConfig. What this version has no argument for is set on the config.
    """
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mtraining import MTrainingConfig

    given = dict(
        num_layers=2, hidden_size=128, num_attention_heads=2, kv_channels=64, ffn_hidden_size=128,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        attention_backend=AttnBackend.auto if settings is None else AttnBackend.mtraining,
    ) | (config or {})  # fmt: skip
    known = {field.name for field in fields(TransformerConfig)}
    made = TransformerConfig(**{name: value for name, value in given.items() if name in known})
    for name in given.keys() - known:
        setattr(made, name, given[name])
    if settings is not None:
        made.mtraining = MTrainingConfig.from_options(**settings)
    return made


def build(settings: dict | None, config: dict | None = None, **model):
    """A GPTModel with the same weights each time, on every rank.

    Args:
        settings, config: as for :func:`config_of`.
        model: arguments of GPTModel in place of the usual ones.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    made = config_of(settings, config)
    spec = get_gpt_layer_local_spec()
    usual = dict(
        transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=1024,
        position_embedding_type="rope",
    )  # fmt: skip
    if made.mtp_num_layers:
        usual["mtp_block_spec"] = get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False)
    return GPTModel(config=made, **{**usual, **model})


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


def draw_batch(size: int, sequence: int, seed: int = 3) -> dict:
    """Tokens, labels and position ids, ``[size, sequence]``."""
    tokens = torch.randint(VOCABULARY, (size, sequence), generator=torch.manual_seed(seed))
    ids = torch.arange(sequence).repeat(size, 1)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "position_ids": ids}


def run_schedule(chunks: list, batches: list[dict], loss_of, shape, forward_only: bool = False):
    """Run one step of Megatron's schedule over micro-batches.

    Args:
        chunks: this rank's chunks of the model.
        loss_of: the loss, and what is logged of it, of the losses of tokens and their batch.
        shape: ``[b, s]`` of a whole micro-batch.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data, model):
        batch = next(data)
        out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return out, lambda losses: loss_of(losses, batch)

    data = [iter(batches) for _ in chunks]
    one = len(chunks) == 1
    return get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data[0] if one else data,
        model=chunks[0] if one else chunks, num_microbatches=len(batches),
        micro_batch_size=shape[0], seq_length=shape[1], forward_only=forward_only,
    )  # fmt: skip
