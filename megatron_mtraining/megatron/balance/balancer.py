# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance of data-parallel ranks in a step: prices of micro-batches, and the observations.

At the end of step ``n`` all ranks sum one small table (:mod:`.table`): the observations of step
``n``, and the multipliers of the price that the first rank has computed for step ``n + 1``. Multipliers stay
on the device, where attention reads them. The host reads the table at the end of step ``n + 1``, without
waiting. All ranks of a replica read the same column of the table, so they select the same pattern.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...balance.planner import Planner
from ...balance.tuning import Group, tune
from ...config import MTrainingConfig, Policy, has_price, head_policies, option
from ...cp_group import RankGroup
from ..layer_pattern import layers_with_attention
from ..wrapping import log
from .log import Interval, StepRecord
from .observer import LayerObserver
from .table import StepTable


@dataclass(frozen=True)
class Layout:
    """The place of this rank in the run's parallelism.

    Attributes:
        dp_size, dp_rank: number of data-parallel ranks (without context parallelism), and this rank's number.
        ranks_of_layer: tensor- times context-parallel ranks.
        pipeline: as for :class:`~..balance.tuning.Group`.
    """

    dp_size: int = 1
    dp_rank: int = 0
    ranks_of_layer: int = 1
    pipeline: bool = False

    def group(self, num_microbatches: int) -> Group:
        """The times that tuning compares, in a step of ``num_microbatches`` micro-batches."""
        return Group((num_microbatches, self.dp_size), self.pipeline)


class Balancer:
    """Tuning and accounting of a run in this process.

    Args:
        layout: where this rank is.
        num_microbatches: returns the number of micro-batches of a step.
        planner: returns the plans of steps, or None on ranks without a data loader.
        max_mass: the largest share of attention mass that tuning may move; None to observe only.
        price: the run's price at the start, untuned: the median of heads that have one.
        step: returns the number of the step under way, from 0.

    Attributes:
        interval: the steps since the last line of the log.
    """

    def __init__(
        self,
        layout: Layout,
        num_microbatches: Callable[[], int],
        planner: Callable[[], Planner | None],
        max_mass: float | None,
        price: float,
        step: Callable[[], int],
    ):
        self.layout, self.max_mass = layout, max_mass
        self._num_microbatches, self._planner, self._step = num_microbatches, planner, step
        self._price = price
        # In order, so that sums are the same in each run.
        self._layers: list[weakref.ref[LayerObserver]] = []
        self._table: StepTable | None = None
        """The table of the end of the last step, with the plan of the current step."""
        self._planned_step = -1
        self._multipliers: tuple[Tensor, Tensor] | None = None
        self._unread: tuple[int, StepTable, StepTable | None] | None = None
        self.interval = Interval()

    def goes_on_at(self, price: float) -> None:
        """Take the price that a target recall had reached at a checkpoint."""
        self._price = price

    def observer(
        self, config: MTrainingConfig, policies: Sequence[Policy] | None, place: str
    ) -> LayerObserver:
        """The observer of a new layer on this rank; arguments as for :meth:`.RunBalance.observer`."""
        own = config.policy
        tunable = [has_price(policy) and has_price(own) for policy in policies or [own]]
        tuning = None if self.max_mass is None else self.tuning
        made = LayerObserver(tuning, place, getattr(own, "price", None) or 0.0, tunable)
        self._layers.append(weakref.ref(made))
        return made

    def tuning(self, number: int) -> tuple[Tensor, Tensor] | None:
        """The multiplier of the price in a micro-batch of the current step, and the attention mass that it
        takes away, float32 ``[]`` on the device; None if the step has no plan."""
        if self._multipliers is None or self._planned_step != self._step():
            return None
        multipliers, mass = self._multipliers
        at = number % len(multipliers)  # Megatron may run a step again to find faulty hardware
        return multipliers[at], mass[at]

    def end_step(self, step: int, ranks: RankGroup, price: Tensor | None = None) -> None:
        """End a step on all ranks, with one all-reduce; ``step`` is the number of the next step.

        Args:
            ranks: all ranks of the run.
            price: the untuned price that a target recall has moved, float32 ``[]`` on the device; None if
                nothing moves it.
        """
        self.read()
        count, layout = self._num_microbatches(), self.layout
        layers = [layer for each in self._layers if (layer := each()) is not None]
        observed = [layer.take() for layer in layers]
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
        if self.max_mass is not None:
            # Without a plan, multipliers are 0 in the table: they become 1.
            none = 1 - table.device[0]
            self._multipliers = table.on_device("multipliers") + none, table.on_device("mass")

    def read(self) -> None:
        """Read the table of the end of the last step, unless it has been read."""
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
        self.interval.add(record, self.layout.group(len(record.measured_ms)))
        planner = self._planner()
        if planner is not None:
            untuned = np.minimum(record.recall + record.mass, 1.0)
            planner.observe(step, record.density, untuned, record.multipliers)

    def _plan(self, step: int, count: int) -> dict[str, np.ndarray] | None:
        """The plan that the first rank makes for a step: rows by name, ``[M, dp]``."""
        planner = self._planner()
        plan = None if planner is None else planner.begun(step)
        if plan is None or np.shape(plan.density) != (count, self.layout.dp_size):
            return None
        ones = np.ones_like(plan.density)
        rows = dict(
            multipliers=ones, predicted_ms=plan.predicted_ms, tuned_ms=plan.predicted_ms,
            density=plan.density, recall=plan.recall, mass=0 * ones,
        )  # fmt: skip
        if self.max_mass is None or not planner.knows(step):
            return rows
        tuned = tune(
            plan, planner.elasticity, self.max_mass, self._price, pipeline=self.layout.pipeline,
            latency=lambda density: planner.predict(
                plan.pairs, np.broadcast_to(density[..., None], plan.pairs.shape)
            ).sum(-1),
        )  # fmt: skip
        rows.update(multipliers=tuned.multipliers, tuned_ms=tuned.predicted_ms, mass=tuned.mass)
        return rows


def balancer_of_arguments(
    args,
    config: MTrainingConfig,
    step: Callable[[], int],
    planner: Callable[[], Planner | None],
) -> Balancer | None:
    """The balancer of a run of Megatron-LM, whose parallel state is initialized; None if it needs none.

    Args:
        config: the settings of the run.
        step, planner: as for :class:`Balancer`.
    """
    if not config.balances:
        return None
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    # The group that Megatron's data loader shares samples out to, also with expert parallelism, whose own
    # data-parallel group is a part of it.
    dp_size = parallel_state.get_data_parallel_world_size(with_context_parallel=False)
    pipeline = getattr(args, "pipeline_model_parallel_size", 1) > 1
    layout = Layout(
        dp_size,
        parallel_state.get_data_parallel_rank(with_context_parallel=False),
        parallel_state.get_tensor_model_parallel_world_size()
        * parallel_state.get_context_parallel_world_size(),
        pipeline,
    )
    max_mass, price = None, 0.0  # untuned, nothing reads the price
    if config.tuning == "on":
        if dp_size == 1 and (not pipeline or get_num_microbatches() == 1):
            log(
                f"warning: {option('tuning')} is on, but there is one data-parallel rank, and no pipeline "
                "whose micro-batches wait for each other: it changes nothing"
            )
        else:
            max_mass, price = config.tuning_mass, _typical_price(config, args)
    return Balancer(layout, get_num_microbatches, planner, max_mass, price, step)


def _typical_price(config: MTrainingConfig, args) -> float:
    """The median price of the heads that have one, which tuning multiplies; 0 if none has."""
    found: list[float] = []
    heads = args.num_attention_heads
    for layer in layers_with_attention(args):
        policies = head_policies(config, layer, args.num_layers, heads) or [config.policy] * heads
        found += [policy.price for policy in policies if has_price(policy)]
    return statistics.median(found or [0.0])
