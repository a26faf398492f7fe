# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""transformers' ``Trainer``, and trainers that derive from it, such as TRL's."""

from __future__ import annotations

import warnings
from functools import wraps

from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback

from ..config import ConfigError
from .state import PatternState, find_state


class PatternCallback(TrainerCallback, ExportableState):
    """After each optimizer step, lets a target recall move the prices, which become part of the trainer's
    checkpoints. Adds ``mtraining_density`` and ``mtraining_recall`` to the trainer's log: means over layers
    and heads since the last log. Does nothing for models without settings.

    Every trainer has one, once :mod:`megatron_mtraining.transformers` has been imported. It comes before the
    trainer's own callbacks, so TensorBoard and W&B get its values too.
    """

    def __init__(self):
        self._pattern: PatternState | None = None

    def on_init_end(self, args, state, control, model=None, **kwargs):
        """At the end of the trainer's construction.

        Raises:
            ConfigError: the trainer would use several GPUs in one process.
        """
        if find_state(model) is not None and args.n_gpu > 1:
            raise ConfigError(
                f"the trainer would divide batches over {args.n_gpu} GPUs in one process (nn.DataParallel), "
                "which attention mtraining does not support: start one process for each GPU with torchrun, "
                "or show this process one GPU (CUDA_VISIBLE_DEVICES=0)"
            )

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """After the trainer has read a checkpoint to resume from, if any."""
        self._pattern = find_state(model)
        # Trainer needs the key of every callback with a state when it saves, also without settings.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        steering = self._pattern and self._pattern.steering
        if not state.global_step or not steering or not steering.moves:
            return
        steering.step = state.global_step
        prices = kept["attributes"].get("prices")
        if prices is not None:
            steering.restore(prices)
        else:
            warnings.warn(
                "the checkpoint has no prices, which a target recall moves: they start from "
                f"{steering.now():.4g}"
            )

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """After each optimizer step."""
        self._pattern = find_state(model)
        if self._pattern is not None:
            self._pattern.advance()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Before the trainer's reporters."""
        if logs is None or "loss" not in logs or self._pattern is None:
            return
        means = self._pattern.take()
        for name, value in (("density", means.density), ("recall", means.recall)):
            found = value[~value.isnan()]
            if found.numel():
                logs[f"mtraining_{name}"] = state.log_history[-1][f"mtraining_{name}"] = round(
                    found.mean().item(), 6
                )

    def state(self) -> dict:
        """What goes into a checkpoint's ``trainer_state.json``."""
        prices = self._pattern and self._pattern.steering.state()
        return {"args": {}, "attributes": {} if prices is None else {"prices": prices}}


def add_to_trainers() -> None:
    """Give every trainer that is made from now on a :class:`PatternCallback`."""
    original = CallbackHandler.__init__

    @wraps(original)
    def with_pattern(self, callbacks, *args, **kwargs):
        original(self, [PatternCallback(), *callbacks], *args, **kwargs)

    CallbackHandler.__init__ = with_pattern  # type: ignore[method-assign]
