# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""transformers' ``Trainer``, and trainers that derive from it, such as TRL's."""

from __future__ import annotations

import warnings
from functools import wraps

from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback

from ..advice import warnings_of
from ..config import ConfigError, Span
from ..labels import BACKWARD, FORWARD, SEARCH, TIMES, WAIT
from .interface import is_in_use
from .state import PatternState, find_state
from .trainers import sizes_of


class PatternCallback(TrainerCallback, ExportableState):
    """After each optimizer step, lets a schedule go on and a target recall move the prices, which become part
    of the trainer's checkpoints. Adds ``mtraining_density`` and ``mtraining_recall`` to the trainer's log,
    means over layers and heads since the last log, ``mtraining_price`` where it changes, what pruned
    backwards kept, and of the logged step the milliseconds of search and attention on this rank and the share
    of the heads at a cap. Does nothing for models without settings.

    Every trainer has one, once :mod:`megatron_mtraining.transformers` has been imported. It comes before the
    trainer's own callbacks, so TensorBoard and W&B get its values too.
    """

    def __init__(self):
        self._pattern: PatternState | None = None
        self._scheduled: float | None = None  # of the last step
        self._steps = 0  # of this process
        self._warned: set[str] = set()

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
        """After the trainer has read a checkpoint to resume from, if any.

        Raises:
            ConfigError: the trainer shares sequences over ranks, and the model does not know.
        """
        self._pattern = find_state(model)
        self._check_ranks(model)
        # Trainer needs the key of every callback with a state when it saves, also without settings.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())["attributes"]
        pattern = self._pattern
        if pattern is None or not pattern.steering.changes:
            return
        steering = pattern.steering
        steering.step = state.global_step
        if steering.has_schedule:
            saved = kept.get("span") if state.global_step else None
            pattern.span = Span.of_run(
                state.global_step, state.max_steps, saved and Span(*saved),
                pattern.config.policy.schedule_extension, f"max_steps is {state.max_steps}",
            )  # fmt: skip
        if not state.global_step or not steering.moves:
            return
        prices = kept.get("prices")
        if prices is not None:
            steering.restore(prices, kept.get("history"))
        else:
            warnings.warn(
                "the checkpoint has no prices, which a target recall moves: they start from "
                f"{steering.now():.4g}"
            )

    def _check_ranks(self, model) -> None:
        if self._pattern is None or self._pattern.parallel is not None:
            return
        if is_in_use(model):
            from accelerate.state import AcceleratorState

            if sizes := sizes_of(AcceleratorState()):
                name, size = sizes.popitem()
                raise ConfigError(
                    f"the trainer's ParallelismConfig has {name} {size}, and its model attends to tokens of "
                    "one rank: call megatron_mtraining.transformers.configure(trainer.model, config, "
                    "sequence_parallel=trainer) before trainer.train()"
                )

    def on_step_begin(self, args, state, control, **kwargs):
        """Times a step that will be logged, but not the first one, which compiles."""
        TIMES.take()
        by_steps = self._pattern is not None and args.logging_strategy == "steps"
        if by_steps and self._steps and (state.global_step + 1) % state.logging_steps == 0:
            TIMES.on = True
        self._steps += 1

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """After each optimizer step."""
        self._pattern = find_state(model)
        if self._pattern is not None:
            self._scheduled = self._pattern.steering.scheduled()
            self._pattern.advance()

    def on_train_end(self, args, state, control, model=None, **kwargs):
        """After the last step, or where the training is stopped before it."""
        TIMES.take()
        pattern = self._pattern
        if pattern is not None and pattern.span is not None:
            if unfinished := pattern.steering.unfinished(pattern.span.share(state.global_step)):
                warnings.warn(unfinished)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Before the trainer's reporters."""
        if logs is None or "loss" not in logs or self._pattern is None:
            return
        pattern, found = self._pattern, {}
        means, backward = pattern.take(), pattern.take_backward()
        shares = dict(
            density=means.density, recall=means.recall,
            backward_density=backward.density, backward_dropped=backward.dropped,
        )  # fmt: skip
        for name, value in shares.items():
            of_layers = value[~value.isnan()]
            if of_layers.numel():
                found[name] = of_layers.mean().item()
        steering, policy = pattern.steering, pattern.config.policy
        price = self._scheduled
        if steering.moves and price != 0:  # the last step was not dense
            price = steering.typical()
        if price is not None:
            found["price"] = price = float(price)
        if (capped := pattern.take_capped()) is not None:
            found["capped"] = capped
        times = TIMES.take()
        if SEARCH in times:
            found["search_ms"] = times[SEARCH]
            found["attention_ms"] = times.get(FORWARD, 0.0) + times.get(BACKWARD, 0.0)
            if pattern.parallel is not None and pattern.parallel.ring is not None:
                found["exposed_communication_ms"] = times.get(WAIT, 0.0)
        for name, value in found.items():
            self._log(logs, state, name, value)
        if "density" in found:
            is_one = pattern.config.settings is None and policy.target_schedule is None
            said = warnings_of(
                state.global_step, policy.price if price is None else price, found["density"],
                found["recall"], policy.target_recall if is_one else None, capped,
            )  # fmt: skip
            for name in said.keys() - self._warned:
                self._warned.add(name)
                if state.is_world_process_zero:
                    warnings.warn(said[name])

    @staticmethod
    def _log(logs, state, name: str, value: float) -> None:
        logs[f"mtraining_{name}"] = state.log_history[-1][f"mtraining_{name}"] = round(value, 6)

    def state(self) -> dict:
        """What goes into a checkpoint's ``trainer_state.json``."""
        if self._pattern is None:
            return {"args": {}, "attributes": {}}
        span, steering = self._pattern.span, self._pattern.steering
        found = {
            "prices": steering.state(),
            "history": steering.history(),
            "span": span and [span.begin, span.end],
        }
        return {"args": {}, "attributes": {k: v for k, v in found.items() if v is not None}}


def add_to_trainers() -> None:
    """Give every trainer that is made from now on a :class:`PatternCallback`."""
    original = CallbackHandler.__init__

    @wraps(original)
    def with_pattern(self, callbacks, *args, **kwargs):
        original(self, [PatternCallback(), *callbacks], *args, **kwargs)

    CallbackHandler.__init__ = with_pattern  # type: ignore[method-assign]
