# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How sparse a run is: kept on the device at each step, read at Megatron's log interval."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import is_active, training_arguments

_meters: weakref.WeakSet[DensityMeter]


class DensityMeter:
    """The running mean of one layer's density, without reading anything back to the host.

    A layer's own mean, so that a layer that is recomputed, and so counted twice, weighs no more
    than one that is not.
    """

    def __init__(self):
        self.total: Tensor | None = None
        self.count = 0
        _meters.add(self)

    def add(self, density: Tensor) -> None:
        """Count one call's ``density``, float32 ``[b, h]``."""
        total = density.detach().sum(0)
        self.total = total if self.total is None else self.total + total
        self.count += density.shape[0]

    def take(self) -> Tensor | None:
        """The mean of each head, ``[h]``, since the last call; None if there was none."""
        mean = None if self.total is None else self.total / self.count
        self.total, self.count = None, 0
        return mean


_meters = weakref.WeakSet()


@dataclass(frozen=True)
class Density:
    """The share of causal pairs kept: mean over layers and heads, and the extreme heads."""

    mean: float
    lowest: float
    highest: float

    def line(self, iteration: int) -> str:
        """The line of the training log."""
        return (
            f" [mtraining] iteration {iteration} | density {self.mean:.4f} "
            f"(lowest head {self.lowest:.4f}, highest {self.highest:.4f})"
        )


def take_density() -> Density | None:
    """What all layers of all ranks have kept since the last call; a collective where there are
    several ranks. None if no layer has run."""
    heads = [mean for mean in (meter.take() for meter in list(_meters)) if mean is not None]
    inf = float("inf")
    if heads:
        flat = torch.cat(heads).float()
        sums = torch.stack([flat.sum(), flat.new_tensor(float(flat.numel()))])
        ends = torch.stack([flat.min(), -flat.max()])
    else:  # a pipeline stage without attention
        sums, ends = torch.zeros(2), torch.tensor([inf, inf])
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        if "nccl" in torch.distributed.get_backend():
            device = torch.device("cuda", torch.cuda.current_device())
            sums, ends = sums.to(device), ends.to(device)
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MIN)
    total, count, lowest, highest = torch.cat([sums, ends]).tolist()
    return Density(total / count, lowest, -highest) if count else None


def wrap_training_log(original):
    signature = inspect.signature(original)

    def training_log(*args, **kwargs):
        """Adds a line on density after Megatron's own line, on the rank that prints it, and
        writes it to TensorBoard; Megatron's log has no hook for figures of a layer."""
        result = original(*args, **kwargs)
        arguments = training_arguments()
        if not is_active(arguments):
            return result
        given = signature.bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        if iteration % arguments.log_interval == 0 or given.get("is_first_iteration"):
            log_density(iteration)
        return result

    return training_log


def log_density(iteration: int) -> None:
    """Print and record the density since the last call; called by all ranks alike."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    density = take_density()
    if density is None:
        return
    print_rank_last(density.line(iteration))
    values = {"mean": density.mean, "lowest-head": density.lowest, "highest-head": density.highest}
    writer = get_tensorboard_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(f"mtraining-density/{name}", value, iteration)
    wandb = get_wandb_writer()
    if wandb:
        wandb.log({f"mtraining-density/{name}": v for name, v in values.items()}, iteration)
