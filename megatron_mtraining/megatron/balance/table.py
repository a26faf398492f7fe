# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The table that ranks sum at the end of a step: observations of the step, and the plan of the next step.

This takes one small all-reduce per step. Each rank fills in its own column of the observations. The first
rank has a data loader and therefore a plan, and fills in the plan. Ranks without a data loader read the plan
from the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .observer import Observed

PLANNED = ("multipliers", "predicted_ms", "tuned_ms", "density", "recall", "mass")
"""Rows of the next step: multipliers of the price; attention time at the untuned price and at the tuned
price; expected density and recall at the untuned price; attention mass that tuning takes away."""
OBSERVED = ("density_sum", "recall_sum", "calls", "measured_ms")
"""Rows of this step: sums over layers and ranks, and the number of calls in the sums; attention time, forward
and backward, of all layers on one rank."""
HEADER = ("planned", "price")
"""Whether there is a plan, and the untuned price."""


class StepTable:
    """The table, float32 ``[len(HEADER) + rows * M * dp]`` on the device, and the places of its rows.

    Args:
        num_microbatches, dp_size: ``M`` and ``dp``.
        dp_rank: the column that this rank fills in.
    """

    def __init__(self, num_microbatches: int, dp_size: int, dp_rank: int):
        self.shape = num_microbatches, dp_size
        self.dp_rank = dp_rank
        self.rows = {name: row for row, name in enumerate((*PLANNED, *OBSERVED))}
        self.device: Tensor | None = None
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def fill(
        self,
        planned: dict[str, np.ndarray] | None,
        price: float | Tensor,
        observed: Sequence[Observed],
        ranks_of_layer: int,
        device: torch.device,
    ) -> Tensor:
        """This rank's part of the table, to be summed over all ranks.

        Args:
            planned: arrays ``[M, dp]`` by the names of :data:`PLANNED`, on the first rank; None on others, or
                without a plan.
            price: the untuned price on the first rank, a number or a tensor ``[]``; 0 on others.
            observed: of each layer of this rank.
            ranks_of_layer: number of ranks of a replica that have a part of each of these layers (tensor and
                context parallelism); their times are averaged.
        """
        head, (count, ranks) = len(HEADER), self.shape
        host = torch.zeros(head + len(self.rows) * count * ranks)
        values = host[head:].numpy().reshape(-1, count, ranks)
        if planned is not None:
            host[0] = 1
            for name in PLANNED:
                values[self.rows[name]] = planned[name]
        for layer in observed:
            for number, ms in layer.times:
                if number < count:
                    values[self.rows["measured_ms"], number, self.dp_rank] += ms / ranks_of_layer
        if isinstance(price, float):
            host[1] = price
        if device.type == "cuda":
            host = host.pin_memory()
        table = host.to(device, non_blocking=True)
        if isinstance(price, Tensor):
            table[1] = price
        column = table[head:].view(-1, count, ranks)[:, :, self.dp_rank]
        first = self.rows["density_sum"]
        for number, sums in _sums(observed, count):
            column[first : first + 3, :number] += sums
        return table

    def keep(self, table: Tensor) -> None:
        """Start to copy the summed table to the host."""
        self.device = table
        if not table.is_cuda:
            self._host = table
            return
        self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        self._host.copy_(table, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def on_device(self, name: str) -> Tensor:
        """A row of this rank, float32 ``[M]``."""
        assert self.device is not None, "kept first"
        rows = self.device[len(HEADER) :].view(-1, *self.shape)
        return rows[self.rows[name], :, self.dp_rank]

    def read(self) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """The header, and the rows ``[M, dp]``, float64. Waits for the copy, which is done a step later."""
        assert self._host is not None, "kept first"
        if self._copied is not None:
            self._copied.synchronize()
        flat = self._host.double().numpy()
        header = dict(zip(HEADER, flat[: len(HEADER)].tolist()))
        rows = flat[len(HEADER) :].reshape(-1, *self.shape)
        return header, {name: rows[row] for name, row in self.rows.items()}


def _sums(observed: Sequence[Observed], count: int) -> list[tuple[int, Tensor]]:
    """Sums over layers of density and recall (means over batch and heads) and of calls: ``[3, n]`` for the
    first ``n`` micro-batches. Layers with equal shapes are summed together, in few kernels."""
    alike: dict[tuple, list[Observed]] = {}
    for layer in observed:
        calls = min(len(layer.density), count)
        if calls:
            shapes = tuple(each.shape for each in layer.density[:calls])
            alike.setdefault((calls, shapes), []).append(layer)
    found = []
    for (calls, shapes), layers in alike.items():
        both = []
        for name in ("density", "recall"):
            each = [value for layer in layers for value in getattr(layer, name)[:calls]]
            if len(set(shapes)) > 1:
                each = [value.mean() for value in each]
            means = torch.stack(each).float().view(len(layers), calls, -1).mean(-1)
            both.append(means.sum(0))
        both.append(torch.full_like(both[0], len(layers)))
        found.append((calls, torch.stack(both)))
    return found
