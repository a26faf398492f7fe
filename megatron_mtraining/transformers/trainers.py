# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallel training by transformers' ``Trainer`` and trainers that derive from it, such as TRL's,
under accelerate's ``ParallelismConfig``.

accelerate has two ways, which both let some names of attention through. All else stays as it is; attention is
that of :mod:`.sequence`:

- ``cp_size``, with FSDP 2: the trainer's batches, the same on all ranks of the mesh ``cp``, are cut by
  :func:`~.sequence.cut_batch`, in place of PyTorch's ``context_parallel``.
- ``sp_size``, with DeepSpeed: its loader cuts batches; its wrapper of an attention function goes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

from ..config import ConfigError
from ..cp_group import ProcessGroup, RankGroup
from ..requirements import install_command, installed, is_too_old
from .interface import NAME, is_in_use
from .sequence import IGNORED, cut_batch
from .state import PatternState

MARK = "mtraining_models"
"""The attribute of an accelerator with the states of the models whose sequences it shares."""


def is_trainer(value: Any) -> bool:
    return hasattr(value, "accelerator") and hasattr(value, "training_step")


def sizes_of(accelerator) -> dict[str, int]:
    """Sizes of accelerate's ways to share sequences that are more than 1, by name."""
    given = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(given, name, None) or 1 for name in ("cp_size", "sp_size")}
    return {name: size for name, size in sizes.items() if size > 1}


def check_versions() -> None:
    """Raise :class:`ConfigError` if what is installed is too old for a trainer to share sequences."""
    for name in ("transformers", "accelerate"):
        if is_too_old(name, "hf"):
            raise ConfigError(
                f"{name} {installed(name)} is too old for a trainer that shares sequences over ranks: "
                f"{install_command([name], 'hf')}"
            )


def share_sequences(trainer, state: PatternState) -> None:
    """Have a trainer give a model parts of sequences, over the ranks of its ``ParallelismConfig``.

    Args:
        trainer: before ``train()``.
        state: the model's; gets the ranks once there is a process group of them.

    Raises:
        ConfigError: the trainer has no ``cp_size`` or ``sp_size``, or what does not go with it, such as a
            loss that is not the model's; packages are too old.
    """
    check_versions()
    accelerator = trainer.accelerator
    sizes = sizes_of(accelerator)
    if not sizes:
        raise ConfigError(
            "sequence_parallel is a trainer that does not share sequences: give it "
            "TrainingArguments(parallelism_config=ParallelismConfig(cp_size=2), ...), with FSDP 2, or "
            "ParallelismConfig(sp_size=2, sp_backend='deepspeed')"
        )
    of_trainer = {
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.args.label_smoothing_factor,
    }
    for name, value in of_trainer.items():
        if value:  # these shift labels, which ranks are given shifted, or are not asked for a loss
            raise ConfigError(
                f"the trainer has {name}, and ranks that share sequences take the model's own loss: leave it "
                "out"
            )
    if "cp_size" in sizes:
        if trainer.compute_metrics is not None:
            raise ConfigError(
                "the trainer has compute_metrics, and with cp_size each rank has the logits of some tokens: "
                "leave it out, or use ParallelismConfig(sp_size=...)"
            )
        group = accelerator.torch_device_mesh["cp"].get_group()
        state.share_sequences(group)
    states = getattr(accelerator, MARK, None)
    if states is not None:  # of configure with other settings, or for another model
        states.append(state)
        return
    setattr(accelerator, MARK, [state])
    if "cp_size" in sizes:
        _cut_batches(trainer, group)
    else:
        _leave_to_us(accelerator)


def _cut_batches(trainer, group: ProcessGroup) -> None:
    """Have a trainer cut its batches for the ranks of a mesh ``cp``."""
    accelerator, ranks = trainer.accelerator, RankGroup(group)
    prepare_cp, prepare_inputs = accelerator._prepare_cp, trainer._prepare_context_parallel_inputs
    compute_loss, predict = trainer.compute_loss, trainer.prediction_step

    def cut(model, inputs):
        if not is_in_use(model):
            return prepare_inputs(model, inputs)
        cut = cut_batch(inputs, group)
        if trainer.model_accepts_loss_kwargs:
            cut.pop("num_items_in_batch", None)  # the trainer counts those of all batches of a step
        return nullcontext, cut

    def without_hooks(*args):
        """accelerate has attention layers lose their masks."""
        others = [each for each in args if not isinstance(each, nn.Module)]
        prepare_cp(*others)
        return args

    def of_all_ranks(model, inputs, *args, **kwargs):
        """In an evaluation, the loss over all ranks: the trainer would take the first rank's for it."""
        if model.training or not is_in_use(model):
            return compute_loss(model, inputs, *args, **kwargs)
        if inputs.get("use_cache") is not False:  # not cut by TRL, nor by transformers before 5.16
            _, inputs = cut(model, inputs)
        labels = inputs.get("shift_labels")
        result = compute_loss(model, inputs, *args, **kwargs)
        loss, *outputs = result if isinstance(result, tuple) else (result,)
        if labels is None or kwargs.get("num_items_in_batch") is not None:
            loss = ranks.all_gather(loss).mean(0)
        else:  # each rank's is the mean over its own labels
            count = (labels != IGNORED).sum()
            own = torch.stack((torch.where(count > 0, loss * count, 0.0), count.to(loss.dtype)))
            total, count = ranks.all_gather(own).sum(0)
            loss = total / count
        return (loss, *outputs) if outputs else loss

    def loss_only(model, inputs, prediction_loss_only, *args, **kwargs):
        if not prediction_loss_only and is_in_use(model):
            raise ConfigError(
                "the trainer is asked for predictions, and with cp_size each rank has the logits of some "
                "tokens: ask for the loss alone (evaluate, or prediction_loss_only=True)"
            )
        return predict(model, inputs, prediction_loss_only, *args, **kwargs)

    trainer.compute_loss, trainer.prediction_step = of_all_ranks, loss_only
    trainer._prepare_context_parallel_inputs = cut
    accelerator._prepare_cp = without_hooks


def _leave_to_us(accelerator) -> None:
    """Take DeepSpeed's groups, which it makes as it prepares the model, and not its wrapper of the attention
    function, which has no mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    prepare = accelerator._prepare_deepspeed
    # Names are checked where the handler is made, and DeepSpeed compares this one with the model's.
    accelerator.parallelism_config.sp_handler.sp_attn_implementation = NAME

    @wraps(prepare)
    def without_wrapper(*args):
        ours = ALL_ATTENTION_FUNCTIONS[NAME]
        result = prepare(*args)
        if ALL_ATTENTION_FUNCTIONS[NAME] is not ours:  # else these were none of a model
            ALL_ATTENTION_FUNCTIONS[NAME] = ours
            from deepspeed.utils import groups

            # Its loader does not cut the batches of an evaluation.
            group = groups._get_sequence_parallel_group()
            for state in getattr(accelerator, MARK):
                state.share_sequences(group, evaluates=False)
        return result

    accelerator._prepare_deepspeed = without_wrapper
