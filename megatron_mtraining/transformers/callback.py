# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""transformers' ``Trainer``, and trainers that derive from it, such as TRL's."""

from __future__ import annotations

from torch import nn
from transformers import Trainer, TrainerCallback

from ..config import ConfigError
from .state import advance, state_of


class PatternCallback(TrainerCallback):
    """After each optimizer step, lets a target recall move the prices. Adds ``mtraining_density`` and
    ``mtraining_recall`` to the trainer's log: means over layers and heads since the last log. :func:`watch`
    makes it.

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
    """Add a :class:`PatternCallback` to a trainer. Call it before ``trainer.train()``.

    The callback comes before the trainer's own callbacks, so TensorBoard and W&B get its values too.

    Raises:
        ConfigError: the trainer's model has no settings, or the trainer would use several GPUs in one
            process.
    """
    count = trainer.args.n_gpu
    if count > 1:
        raise ConfigError(
            f"the trainer would divide batches over {count} GPUs in one process (nn.DataParallel), which "
            "attention mtraining does not support: start one process for each GPU with torchrun, or show "
            "this process one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    trainer.callback_handler.callbacks.insert(0, PatternCallback(trainer.model))
