# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of sparse runs, readable where this package is not."""

from __future__ import annotations

import copy

from megatron.core.transformer.enums import AttnBackend

from .backend import is_active


def wrap_generate_state_dict(original):
    def generate_state_dict(*args, **kwargs):
        """Saves the arguments with attention backend ``auto`` in place of mtraining. Megatron pickles
        them into each checkpoint, and a process whose enum lacks our member could not read any of
        it. The weights are those of a dense model, and a run's backend is always its own."""
        state = original(*args, **kwargs)
        saved = state.get("args")
        if is_active(saved):
            saved = copy.copy(saved)
            saved.attention_backend = AttnBackend.auto
            state["args"] = saved
        return state

    return generate_state_dict
