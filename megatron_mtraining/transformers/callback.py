# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""transformers' ``Trainer``, and trainers that derive from it, such as TRL's."""

from __future__ import annotations

from torch import nn
from transformers import Trainer, TrainerCallback

from .state import advance, state_of


class PatternCallback(TrainerCallback):
    """Ends each step of the pattern (a target recall moves the prices), and adds ``mtraining_density`` and
    ``mtraining_recall``, means over layers and heads since the last log, to the trainer's log. Made by
    :func:`watch`.

    Args:
        model: the model that :func:`~.interface.configure` was called with.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        state_of(model)

    def on_step_end(self, args, state, control, **kwargs):
        """After each optimizer step."""
        advance(self.model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Before the trainer's reporters."""
        if logs is None or "loss" not in logs:
            return
        means = state_of(self.model).take()
        for name, value in (("density", means.density), ("recall", means.recall)):
            found = value[~value.isnan()]
            if found.numel():
                logs[f"mtraining_{name}"] = state.log_history[-1][f"mtraining_{name}"] = round(
                    found.mean().item(), 6
                )


def watch(trainer: Trainer) -> None:
    """Have a trainer end the pattern's steps and log density and recall: call it before ``trainer.train()``.

    The callback is put before the trainer's own, so that TensorBoard and W&B get its values too.

    Raises:
        ConfigError: the trainer's model has no settings.
    """
    trainer.callback_handler.callbacks.insert(0, PatternCallback(trainer.model))
