# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How sparse a run is, and what of attention it keeps: kept on the device at each step, read at Megatron's
log interval. And what a step's end moves: the price."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..pattern.steering import LOST, advance, steerings
from .arguments import run_steering
from .backend import is_active, training_arguments

_meters: weakref.WeakSet[DensityMeter]


class DensityMeter:
    """The running means of one layer's density and recall, without reading anything back to the host.

    A layer's own mean, so that a layer that is recomputed, and so counted twice, weighs no more
    than one that is not.
    """

    def __init__(self):
        self.total: Tensor | None = None
        self.count = 0
        _meters.add(self)

    def add(self, density: Tensor, recall: Tensor | None = None) -> None:
        """Count one call's ``density`` and ``recall``, float32 ``[b, h]``; no recall where all is kept."""
        recall = torch.ones_like(density) if recall is None else recall
        total = torch.stack((density.detach(), recall.detach())).sum(1)
        self.total = total if self.total is None else self.total + total
        self.count += density.shape[0]

    def take(self) -> Tensor | None:
        """The means of each head, ``[2, h]``, since the last call; None if there was none."""
        mean = None if self.total is None else self.total / self.count
        self.total, self.count = None, 0
        return mean


_meters = weakref.WeakSet()


@dataclass(frozen=True)
class Share:
    """Mean over layers and heads, and the extreme heads."""

    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Density:
    """The share of causal pairs kept, and the share of attention that they have, on sampled rows."""

    density: Share
    recall: Share

    def line(self, iteration: int, price: float | None = None) -> str:
        """The line of the training log."""
        density, recall = self.density, self.recall
        line = (
            f" [mtraining] iteration {iteration} | density {density.mean:.4f} "
            f"(lowest head {density.lowest:.4f}, highest {density.highest:.4f}) | "
            f"recall {recall.mean:.4f} (lowest head {recall.lowest:.4f})"
        )
        return line if price is None else f"{line} | price {price:.4g}"


def take_density() -> Density | None:
    """What all layers of all ranks have kept since the last call; a collective where there are
    several ranks. None if no layer has run."""
    heads = [mean for mean in (meter.take() for meter in list(_meters)) if mean is not None]
    if heads:
        flat = torch.cat(heads, 1).float()
        count = flat.new_full((1,), flat.shape[1])
        sums = torch.cat([flat.sum(1), count])
        ends = torch.cat([flat.amin(1), -flat.amax(1)])
    else:  # a pipeline stage without attention
        sums, ends = torch.zeros(3), torch.full((4,), float("inf"))
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        if "nccl" in torch.distributed.get_backend():
            device = torch.device("cuda", torch.cuda.current_device())
            sums, ends = sums.to(device), ends.to(device)
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MIN)
    *totals, count = sums.tolist()
    if not count:
        return None
    low, high = ends.view(2, 2).tolist()
    return Density(*(Share(t / count, l, -h) for t, l, h in zip(totals, low, high)))


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
        end_step(iteration)
        if iteration % arguments.log_interval == 0 or given.get("is_first_iteration"):
            log_density(iteration)
        return result

    return training_log


def end_step(iteration: int) -> None:
    """Move on what steps count by; called by all ranks alike, ``iteration`` steps being done."""
    run_steering()  # a pipeline stage without attention takes part, too
    device = None
    if torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend():
        device = torch.device("cuda", torch.cuda.current_device())
    advance(iteration, device)


def log_density(iteration: int) -> None:
    """Print and record density and recall since the last call; called by all ranks alike."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    density = take_density()
    if density is None:
        return
    runs = steerings()
    price = next((run.now() for run in runs if run.now() is not None), None)
    print_rank_last(density.line(iteration, price))
    for run in runs:
        if run.watch(density.recall.mean):
            print_rank_last(
                f" [mtraining] iteration {iteration} | recall has fallen by {LOST} or more since slashes "
                "were chosen: they are chosen anew in the next step"
            )
    values = {}
    for name, share in (("density", density.density), ("recall", density.recall)):
        values[f"mtraining-{name}/mean"] = share.mean
        values[f"mtraining-{name}/lowest-head"] = share.lowest
        values[f"mtraining-{name}/highest-head"] = share.highest
    if price is not None:
        values["mtraining-price"] = price
    writer = get_tensorboard_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    wandb = get_wandb_writer()
    if wandb:
        wandb.log(values, iteration)
