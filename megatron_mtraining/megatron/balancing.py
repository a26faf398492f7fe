# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance of data-parallel ranks in a step: prices by micro-batch, and what comes of them.

At the end of step ``n`` all ranks sum one small table (:mod:`.balance_table`): what step ``n`` has seen, and the
multipliers of the price that the first rank has computed for step ``n + 1``. Multipliers stay on the device,
where attention reads them. The host reads the table at the end of step ``n + 1``, so it waits for nothing. All
ranks of a replica read one column of one table: they select the same pattern.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..balance.plan import StepPlan
from ..balance.tuning import Groups, TuningBounds, tune
from ..config import option
from ..cp_group import RankGroup
from .balance_log import Interval, StepRecord
from .balance_table import StepTable
from .observation import LayerCalls
from .wrapping import log


class Planner(Protocol):
    """What knows the plan of a step, on ranks with a data loader."""

    def plan_of(self, step: int) -> StepPlan | None:
        """The plan of a step; None if there is none (past the last one)."""

    def attention_ms(self, plan: StepPlan, density: np.ndarray) -> np.ndarray:
        """Predicted attention time in ms of a plan's micro-batches at these densities, both ``[M, dp]``."""

    @property
    def elasticity(self) -> float:
        """Of density to price."""

    def observe(
        self, step: int, density: np.ndarray, recall: np.ndarray, multipliers: np.ndarray
    ) -> None:
        """What a step has found, each ``[M, dp]``: density as it ran, recall at the untuned price, and the
        multipliers of the price. Called in the order of steps, on all ranks."""


@dataclass(frozen=True)
class Layout:
    """Where this rank is.

    Attributes:
        dp_size, dp_rank: data-parallel ranks, context parallelism not counted.
        ranks_of_layer: tensor- times context-parallel ranks.
        groups: who waits for whom.
    """

    dp_size: int = 1
    dp_rank: int = 0
    ranks_of_layer: int = 1
    per_microbatch: bool = False
    pipeline: bool = False

    def groups(self, num_microbatches: int) -> Groups:
        """The groups that wait for each other, of a step of so many micro-batches."""
        return Groups((num_microbatches, self.dp_size), self.per_microbatch, self.pipeline)


class Balancer:
    """Tuning and accounting of a run in this process.

    Args:
        layout: where this rank is.
        num_microbatches: returns those of a step.
        planner: returns what knows the plans; it may return None on ranks without a data loader.
        bounds: of tuning; None to observe alone.
        price: the run's price at the start, untuned.
        step: returns the number of the step under way, from 0.

    Attributes:
        last: the record of the last step that was read; None before.
    """

    def __init__(
        self,
        layout: Layout,
        num_microbatches: Callable[[], int],
        planner: Callable[[], Planner | None],
        bounds: TuningBounds | None,
        price: float,
        step: Callable[[], int],
    ):
        self.layout, self.bounds = layout, bounds
        self._num_microbatches, self._planner, self._step = num_microbatches, planner, step
        self._price = price
        self._layers: weakref.WeakSet[LayerCalls] = weakref.WeakSet()
        self._table: StepTable | None = None
        """Of the end of the last step, and with it the plan of the step under way."""
        self._planned_step = -1
        self._multipliers: tuple[Tensor, Tensor] | None = None
        self._unread: tuple[int, StepTable, StepTable | None] | None = None
        self._warned = False
        self.interval = Interval()

    @property
    def last(self) -> StepRecord | None:
        """The record of the last step that was read."""
        return self.interval.last

    def layer(self) -> LayerCalls:
        """The calls of a new layer on this rank."""
        made = LayerCalls()
        self._layers.add(made)
        return made

    def tuning(self, number: int) -> tuple[Tensor, Tensor] | None:
        """The multiplier of the price in a micro-batch of the step under way, and the attention mass that it
        gives up, float32 ``[]`` on the device; None if the step has no plan."""
        if self._multipliers is None or self._planned_step != self._step():
            return None
        multipliers, mass = self._multipliers
        at = number % len(multipliers)  # Megatron may run a step again to find faulty hardware
        return multipliers[at], mass[at]

    def end_step(self, step: int, ranks: RankGroup, price: Tensor | None = None) -> None:
        """End a step on all ranks: ``step`` is the next one. One all-reduce.

        Args:
            ranks: all ranks of the run.
            price: the untuned price that a target recall has moved, float32 ``[]`` on the device; None if
                nothing moves it.
        """
        self.read()
        count, layout = self._num_microbatches(), self.layout
        observed = [layer.take() for layer in self._layers]
        devices = [value.device for each in observed for value in each.density[:1]]
        device = ranks.device or (devices[0] if devices else torch.device("cpu"))
        first = ranks.rank == 0
        planned = self._plan(step, count) if first else None
        table = StepTable(count, layout.dp_size, layout.dp_rank)
        given = (price if price is not None else self._price) if first else 0.0
        filled = table.fill(planned, given, observed, layout.ranks_of_layer, device)
        table.keep(ranks.all_reduce(filled))
        before = self._table if self._planned_step == step - 1 else None
        self._unread, self._table, self._planned_step = (step - 1, table, before), table, step
        if self.bounds is not None:
            # Without a plan, multipliers are 0 in the table: they become 1.
            none = 1 - table.device[0]
            self._multipliers = table.on_device("multipliers") + none, table.on_device("mass")

    def read(self) -> None:
        """Take in the table of the last step's end, unless that has been done."""
        if self._unread is None:
            return
        (step, table, before), self._unread = self._unread, None
        header, seen = table.read()
        if header["price"] > 0:
            self._price = header["price"]
        plan = None
        if before is not None:
            planned, rows = before.read()
            plan = rows if planned["planned"] and before.shape == table.shape else None
        record = StepRecord.of(step, seen, plan)
        self.interval.add(record, self.layout.groups(len(record.measured_ms)))
        planner = self._planner()
        if planner is not None:
            untuned = np.minimum(record.recall + record.mass, 1.0)
            planner.observe(step, record.density, untuned, record.multipliers)

    def _plan(self, step: int, count: int) -> dict[str, np.ndarray] | None:
        """What the first rank plans for a step: rows by name, ``[M, dp]``."""
        planner = self._planner()
        plan = None if planner is None else planner.plan_of(step)
        if plan is None or np.shape(plan.density) != (count, self.layout.dp_size):
            return None
        ones = np.ones_like(plan.density)
        rows = dict(
            multipliers=ones, predicted_ms=plan.predicted_ms, tuned_ms=plan.predicted_ms,
            density=plan.density, recall=plan.recall, mass=0 * ones,
        )  # fmt: skip
        if self.bounds is None:
            return rows
        layout = self.layout
        tuned = tune(
            plan, planner.elasticity, self.bounds, self._price,
            per_microbatch=layout.per_microbatch, pipeline=layout.pipeline,
            latency=lambda density: planner.attention_ms(plan, density),
        )  # fmt: skip
        if not tuned.met and not self._warned:
            self._warned = True
            self._warn(step, plan, tuned)
        rows.update(multipliers=tuned.multipliers, tuned_ms=tuned.predicted_ms, mass=tuned.mass)
        return rows

    def _warn(self, step: int, plan: StepPlan, tuned) -> None:
        groups, bounds = self.layout.groups(len(plan.density)), self.bounds
        before, after = (
            groups.split(np.asarray(ms)).sum(-1) for ms in (plan.predicted_ms, tuned.predicted_ms)
        )
        worst = int(np.argmax(np.ptp(after, -1)))
        options = dict(
            tuning_mass=bounds.max_mass, tuning_min_recall=bounds.min_recall,
            tuning_max_density=bounds.max_density,
        )  # fmt: skip
        said = ", ".join(f"{option(name)} {value:g}" for name, value in options.items())
        log(
            f"warning: in step {step + 1} tuning cannot bring the ranks together: predicted attention times of "
            f"{before[worst].min():.4g} to {before[worst].max():.4g} ms become {after[worst].min():.4g} to "
            f"{after[worst].max():.4g}, but {option('tuning_anchor')} {bounds.anchor} is "
            f"{tuned.target_ms[worst]:.4g} ms; within the bounds ({said}) prices are multiplied by "
            f"{tuned.multipliers.min():.3g} to {tuned.multipliers.max():.3g}. Widen the bounds, or place samples "
            f"by cost ({option('batching')} cost). Said once"
        )
