# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of sparse runs, readable where this package is not."""

from __future__ import annotations

import copy

from megatron.core.transformer.enums import AttnBackend

from ..config import ConfigError
from .backend import is_active, training_arguments
from .rotary_options import warn_of_other_positions
from .run_state import RUN, has_schedule


def wrap_generate_state_dict(original):
    """``generate_state_dict`` with attention backend ``auto`` in the saved arguments."""

    def generate_state_dict(*args, **kwargs):
        state = original(*args, **kwargs)
        saved = state.get("args")
        if is_active(saved):
            saved = copy.copy(saved)
            saved.attention_backend = AttnBackend.auto
            # The first is the command line's, unless layers have settings and targets of their own.
            moving = [each for each in RUN.steerings if each.moves]
            reached = [each.state() for each in moving]
            saved.mtraining_price_reached = reached[0] if reached else None
            saved.mtraining_further_prices_reached = reached[1:]
            saved.mtraining_price_histories = [each.history() for each in moving]
            saved.mtraining_schedule_span = RUN.span_state()
            saved.mtraining_balance_reached = RUN.balance.state(saved)
            state["args"] = saved
        return state

    return generate_state_dict


def wrap_check_checkpoint_args(original):
    """``check_checkpoint_args`` that restores the price, or prices, of the checkpoint's run, and its
    estimates of density."""

    def check_checkpoint_args(checkpoint_args, *others, **named):
        result = original(checkpoint_args, *others, **named)
        if is_active(training_arguments()):
            warn_of_other_positions(training_arguments(), checkpoint_args)
            price = getattr(checkpoint_args, "mtraining_price_reached", None)
            if price is not None:
                further = getattr(checkpoint_args, "mtraining_further_prices_reached", [])
                histories = getattr(checkpoint_args, "mtraining_price_histories", [])
                try:
                    RUN.restore_prices([price, *further], histories)
                except ConfigError as error:
                    raise ConfigError(f"{error}; --finetune leaves the prices out") from None
            if has_schedule(training_arguments()):
                RUN.restored_span = getattr(checkpoint_args, "mtraining_schedule_span", None)
                RUN.resume_span(RUN.restored_span)  # refuses; before the model's weights are read
            RUN.balance.restore(getattr(checkpoint_args, "mtraining_balance_reached", None))
        return result

    return check_checkpoint_args


def wrap_load_checkpoint(original):
    """``load_checkpoint`` that continues the count of steps, and a schedule."""

    def load_checkpoint(*args, **kwargs):
        result = original(*args, **kwargs)
        if is_active(training_arguments()):
            RUN.resume(result[0])
        return result

    return load_checkpoint
