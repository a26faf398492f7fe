# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which of Megatron's options need all logits at once; without Megatron, for plans."""

from __future__ import annotations

from ..config import ConfigError, option
from .checks import Refusal, show, unset

DEFAULT_CHUNK = 4096
"""1.2 GiB of logits in bf16, with a vocabulary of 151936."""
ADVICE = f"leave it out, or use {option('loss_chunk')} 0, which holds all logits at once"
DTYPE = "products are in the model's dtype, the softmax in float32"

NEED_LOGITS = (
    Refusal("config_logger_dir", unset, "it writes all logits to files", ADVICE),
    Refusal("defer_embedding_wgrad_compute", unset, "it keeps all logits' gradients", ADVICE),
    Refusal("logits_save_dir", lambda value: value is None, "it saves logits", ADVICE),
    Refusal("logits_load_dir", lambda value: value is None, "its loss is of logits", ADVICE),
    Refusal(
        "save_activations_interval",
        lambda value: value is None,
        "it saves what the output layer gives",
        ADVICE,
    ),
    Refusal(
        "save_dgrads_interval",
        lambda value: value is None,
        "it saves the gradients of what the output layer gives",
        ADVICE,
    ),
    Refusal("export_kd_teacher_load", unset, "distillation compares logits", ADVICE),
    Refusal("fp8_output_proj", unset, DTYPE, ADVICE),
    Refusal("logit_dtype", unset, DTYPE, ADVICE, "--output-logit-dtype"),
    Refusal(
        "gtp_weight_remat_size",
        lambda size: size in (None, 1),
        "the output layer's weight is not whole",
        ADVICE,
        "--tensor-parallel-num-weight-shards",
    ),
)
"""Settings that output layer and loss in chunks do not support."""


def why_not(settings, command_line: bool) -> str | None:
    """What in ``settings`` (Megatron-LM's arguments, or a TransformerConfig) needs all logits, in text."""
    for refusal in NEED_LOGITS:
        value = getattr(settings, refusal.name, None)
        if not refusal.works(value):
            return f"{refusal.given(command_line)} is {show(value)}: {refusal.why}"
    return None


def check_loss(settings, chunk: int | None, command_line: bool) -> None:
    """Raise :class:`ConfigError` if chunks are asked for and ``settings`` allow none."""
    reason = why_not(settings, command_line)
    if chunk and reason:
        raise ConfigError(f"{option('loss_chunk')} is {chunk}, but {reason}; {ADVICE}")
