# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Density and recall of a run: summed on the device at each step, read and logged at Megatron's log interval,
with the balance of ranks.

Also the end of a step, which moves the price.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..advice import warnings_of
from ..cp_group import RankGroup
from .backend import is_active, training_arguments
from .layer_pattern import attention_layers, layers_with_attention
from .run_state import RUN, has_schedule
from .step_times import StepTimes, take_times
from .wrapping import log


class _Sum:
    """A sum over calls and their batch entries of float32 ``[n, h]``, on the device, and their number."""

    def __init__(self):
        self.total: Tensor | None = None
        self.count = 0

    def add(self, total: Tensor, count: int) -> None:
        self.total = total if self.total is None else self.total + total
        self.count += count

    def take(self) -> Tensor | None:
        """The mean since the last call; None if there was none."""
        mean = None if self.total is None else self.total / self.count
        self.total, self.count = None, 0
        return mean


class DensityMeter:
    """The running means of one layer's density and recall, without reading anything back to the host.

    A layer's own mean, so that a layer that is recomputed, and so counted twice, weighs no more
    than one that is not.

    Args:
        layer: the layer's number in the whole model, from 0.
        first_head: the number of its first head on this rank.

    Attributes:
        forward: of density and lost attention, ``[2, h]``; :meth:`take` adds the exposed rows.
        backward: of the density that pruned backwards kept, and of the attention that they left out,
            ``[2, h]``.
        window: of the density of a sliding window, ``[1, h]``.
        capped: how often heads were at a cap, ``[1, h]``.
    """

    def __init__(self, layer: int = 0, first_head: int = 0):
        self.layer, self.first_head = layer, first_head
        self.exposed: float | Tensor = 0.0
        self.forward, self.backward, self.window, self.capped = (_Sum() for _ in range(4))
        RUN.meters.add(self)

    def add(
        self, density: Tensor, recall: Tensor | None = None, exposed: float | Tensor = 1.0
    ) -> None:
        """Count one call's ``density`` and ``recall``, float32 ``[b, h]``; ``exposed`` is
        ``PatternIndex.exposed``. Without recall everything is kept, whatever the price."""
        if recall is None:
            recall, exposed = torch.ones_like(density), 0.0
        batch = density.shape[0]
        self.forward.add(torch.stack((density.detach(), 1 - recall.detach())).sum(1), batch)
        self.exposed += exposed.sum() if isinstance(exposed, Tensor) else exposed * batch

    def add_backward(self, density: Tensor, dropped: Tensor) -> None:
        """Count one backward that was pruned: the density that it kept, and the share of attention that it
        left out, float32 ``[b, h]``."""
        self.backward.add(torch.stack((density, dropped)).sum(1), density.shape[0])

    def add_window(self, density: Tensor, num_heads: int) -> None:
        """Count one call of a sliding window: its density, float32 ``[b]``, is that of all heads."""
        self.window.add(density.sum().expand(1, num_heads), len(density))

    def add_capped(self, capped: Tensor) -> None:
        """Count which heads of one call have as many columns or slashes as a cap lets them: ``[b, h]``."""
        self.capped.add(capped.float().sum(0, keepdim=True), len(capped))

    @property
    def sums(self) -> tuple[_Sum, ...]:
        """In the order in which :meth:`take` has their means."""
        return self.forward, self.backward, self.window, self.capped

    def take(self) -> list[Tensor | None]:
        """The means of each head since the last call, None of what there was none: density, lost attention,
        and the share of rows that could lose some, ``[3, h]``; and the other attributes'."""
        count = self.forward.count
        forward, *others = (each.take() for each in self.sums)
        if forward is not None:
            exposed = torch.zeros_like(forward[:1]) + self.exposed / count
            self.exposed = 0.0
            forward = torch.cat((forward, exposed))
        return [forward, *others]


@dataclass(frozen=True)
class Share:
    """Mean over layers and heads, and the extreme heads."""

    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Density:
    """Density (fraction of the causal query-key pairs) and recall (share of attention mass, on sampled rows
    that could have lost some).

    Attributes:
        heads: both, of each layer and head of the model, means over ranks: float32 ``[2, layers, h]``, on
            the CPU.
        ran: which of them there were: bool ``[layers, h]``.
        backward, dropped: the density of the backward, and the share of attention that it left out, where it
            was pruned; None where it was not.
        window: the mean density of layers with a sliding window, which have no pattern and are in none of the
            others; None without such layers.
        window_heads: the share of the model's heads that these layers have.
        capped: the share of heads that had as many columns or slashes as a cap lets them; None without caps.
    """

    density: Share
    recall: Share
    heads: Tensor = field(compare=False)
    ran: Tensor = field(compare=False)
    backward: Share | None = None
    dropped: Share | None = None
    window: float | None = None
    window_heads: float = 0.0
    capped: float | None = None

    @property
    def computed(self) -> float:
        """The share of dense attention's operations that were computed; its backward has twice as many as its
        forward."""
        backward = self.density if self.backward is None else self.backward
        by_pattern = (self.density.mean + 2 * backward.mean) / 3
        return by_pattern + self.window_heads * ((self.window or 0.0) - by_pattern)

    def line(
        self,
        iteration: int,
        price: float | None = None,
        share: float | None = None,
        times: StepTimes | None = None,
    ) -> str:
        """The line of the training log; ``share`` of a schedule."""
        density, recall = self.density, self.recall
        line = (
            f" [mtraining] iteration {iteration} | density {density.mean:.4f} "
            f"(lowest head {density.lowest:.4f}, highest {density.highest:.4f}) | "
            f"recall {recall.mean:.4f} (lowest head {recall.lowest:.4f})"
        )
        if self.backward is not None and self.dropped is not None:
            line += (
                f" | backward density {self.backward.mean:.4f} without {self.dropped.mean:.4f} of attention "
                f"(highest head {self.dropped.highest:.4f})"
            )
        if self.window is not None:
            line += f" | density of sliding windows {self.window:.4f}"
        if self.capped:
            line += f" | heads at a cap {self.capped:.1%}"
        if price is not None:
            line += f" | price {price:.4g}"
        if share is not None:
            line += f" | schedule {share:.1%}"
        return line if times is None else f"{line} | {times}"


def _read(meters: list[DensityMeter]) -> None:
    """Move the meters' sums to the host, in one copy: what is small takes a launch a sum on a GPU."""
    sums = [each for meter in meters for each in meter.sums if each.total is not None]
    exposed = [meter for meter in meters if isinstance(meter.exposed, Tensor)]
    tensors = [each.total for each in sums] + [meter.exposed for meter in exposed]
    if not tensors:
        return
    read = torch.cat([each.float().flatten() for each in tensors]).cpu()
    parts = read.split([each.numel() for each in tensors])
    for each, part in zip(sums, parts):
        each.total = part.view(each.total.shape)
    for meter, part in zip(exposed, parts[len(sums) :]):
        meter.exposed = part.item()


def take_density() -> Density | None:
    """Density and recall of all layers on all ranks since the last call; a collective where there are
    several ranks. None if no layer with a pattern has run."""
    meters = list(RUN.meters)
    _read(meters)
    found = [
        (meter, parts, some[0])
        for meter, parts in [(meter, meter.take()) for meter in meters]
        if (some := [part for part in parts if part is not None])
    ]
    ranks = RankGroup.everyone()
    ends = [(meter.layer + 1, meter.first_head + some.shape[1]) for meter, _, some in found]
    shape = torch.tensor([(0, 0), *ends]).amax(0).to(ranks.device)
    layers, heads = ranks.all_reduce(
        shape, "max"
    ).tolist()  # a pipeline stage has some layers, or none
    table = torch.zeros(4, 4, layers, heads)  # in the order of the parts
    for meter, parts, _ in found:
        for part, mean in zip(table, parts):
            if mean is not None:
                own = part[:, meter.layer, meter.first_head :][:, : mean.shape[1]]
                own[: len(mean)] += mean
                own[3] += 1
    table = ranks.all_reduce(table.to(ranks.device)).cpu()
    (sums, ran), (backward, pruned), (window, windowed), (capped, can_be) = map(_means, table)
    if not ran.any():
        return None
    density, lost, exposed = sums
    means = torch.stack((density, 1 - torch.where(exposed > 0, lost / exposed, 0.0)))
    backward = backward[:2]
    shares = [_share(some) for some in means[:, ran]]
    of_backward = [_share(some) for some in backward[:, pruned]] if pruned.any() else [None, None]
    of_window = [None, 0.0]
    if windowed.any():
        heads = int(windowed.sum())
        of_window = [window[0][windowed].mean().item(), heads / (heads + int(ran.sum()))]
    at_cap = capped[0][can_be].mean().item() if can_be.any() else None
    return Density(*shares, means, ran, *of_backward, *of_window, at_cap)


def _means(table: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``[3, layers, h]`` of three sums and a count, ``[4, layers, h]``, and where there are any."""
    *totals, count = table
    return torch.stack(totals) / count.clamp(min=1), count > 0


def _share(values: Tensor) -> Share:
    return Share(values.mean().item(), values.min().item(), values.max().item())


def wrap_training_log(original):
    """``training_log`` that ends our step and, at the log interval, logs density and recall."""
    signature = inspect.signature(original)

    def training_log(*args, **kwargs):
        if not is_active(training_arguments()):
            return original(*args, **kwargs)
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        is_logged = RUN.is_logged(iteration)
        density = take_density() if is_logged else None
        times = take_times() if is_logged else None
        if density is not None and math.isfinite(density.computed):
            RUN.computed = density.computed  # for the throughput that Megatron is about to log
        result = original(*args, **kwargs)
        price = RUN.price_of_step() if is_logged else None  # the next step's may be another
        share = RUN.share() if is_logged and has_schedule(training_arguments()) else None
        end_step(iteration)
        if is_logged:
            log_density(iteration, price, density, share, RUN.target(), times)
            RUN.logged = True
            RUN.balance.log(iteration)
        return result

    return training_log


def wrap_train(original):
    """``train`` that says where a run ends before the end of its schedule."""

    def train(*args, **kwargs):
        try:
            result = original(*args, **kwargs)
        except SystemExit:  # --exit-interval, --exit-duration-in-mins, --exit-signal-handler
            _log_unfinished()
            raise
        _log_unfinished()
        return result

    return train


def _log_unfinished() -> None:
    if unfinished := RUN.unfinished():
        log(f"warning: {unfinished}")


def wrap_floating_point_operations(original):
    """``num_floating_point_operations`` of the pairs that attention computed, not of all causal ones."""
    signature = inspect.signature(original)

    def num_floating_point_operations(*args, **kwargs):
        operations = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        run = given["args"]
        if not is_active(run):
            return operations
        squares = given.get("seqlen_squared_sum_in_batch")
        if squares is None:
            squares = given["batch_size"] * run.seq_length**2
        # Two products forward and four backward; an addition and a multiplication for each causal pair.
        # Depths of multi-token prediction may share a layer.
        again = run.num_layers + (getattr(run, "mtp_num_layers", None) or 0) - attention_layers(run)
        layers = len(layers_with_attention(run)) + again
        hidden = run.kv_channels * run.num_attention_heads * layers
        return operations - (1 - RUN.computed) * 6 * hidden * squares

    return num_floating_point_operations


def end_step(iteration: int) -> None:
    """Move on what steps count by; called by all ranks alike, ``iteration`` steps being done."""
    RUN.steering_of_run()  # a pipeline stage without attention takes part, too
    RUN.advance(iteration)


def figures(density: Density) -> dict[str, float]:
    """What TensorBoard and W&B get, by name: of all heads, and the mean of each layer's."""
    values = {}
    both = ("density", density.density), ("recall", density.recall)
    if density.backward is not None and density.dropped is not None:
        values["mtraining-backward-density/mean"] = density.backward.mean
        values["mtraining-backward-dropped/mean"] = density.dropped.mean
        values["mtraining-backward-dropped/highest-head"] = density.dropped.highest
    if density.window is not None:
        values["mtraining-window-density/mean"] = density.window
    if density.capped is not None:
        values["mtraining-capped/heads"] = density.capped
    for (name, share), heads in zip(both, density.heads):
        values[f"mtraining-{name}/mean"] = share.mean
        values[f"mtraining-{name}/lowest-head"] = share.lowest
        values[f"mtraining-{name}/highest-head"] = share.highest
        for number, (layer, ran) in enumerate(zip(heads, density.ran)):
            if ran.any():
                values[f"mtraining-{name}-layers/{number:02d}"] = layer[ran].mean().item()
    return values


def log_density(
    iteration: int,
    price: float | None,
    density: Density | None,
    share: float | None = None,
    target: float | None = None,
    times: StepTimes | None = None,
) -> None:
    """Print and record density, recall and times.

    Args:
        price: of the step that has ended.
        density: of the steps since the last call; None prints nothing.
        share: of a schedule, where the step has begun.
        target: recall that prices move to; None without, or if it changes.
        times: of the step that has ended, if it was timed.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import print_rank_last

    if density is None:
        return
    print_rank_last(density.line(iteration, price, share, times))
    means = density.density.mean, density.recall.mean
    for name, warning in warnings_of(iteration, price, *means, target, density.capped).items():
        if name not in RUN.warned:
            RUN.warned.add(name)
            print_rank_last(f" [mtraining] warning: {warning}")
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not writer and not wandb:
        return
    values = figures(density)
    if price is not None:
        values["mtraining-price"] = price
    if share is not None:
        values["mtraining-schedule"] = share
    if times is not None:
        values |= times.figures()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
        for name, heads in zip(("density", "recall"), density.heads):
            heads = heads[density.ran & heads.isfinite()]
            if len(heads):  # TensorBoard raises at none, and attention may be NaN
                writer.add_histogram(f"mtraining-{name}/heads", heads, iteration)
    if wandb:
        wandb.log(values, iteration)
