# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The observer of one layer's attention: it times its calls, moves their price and keeps what they find.

Nothing is read from the device in a call, and no kernel is launched but the multiplication of the price:
tensors are kept until the step ends, and times are pairs of CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...config import option

if TYPE_CHECKING:
    from ...attention import AttentionResult


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread: an attention that is called then is in a replay."""
    return torch._C._current_graph_task_id() != -1


class Observed(NamedTuple):
    """Of the first passes of a layer, in the order of micro-batches from 0 on."""

    density: list[Tensor]
    """float32 ``[b, h]`` each."""
    recall: list[Tensor]
    """float32 ``[b, h]`` each."""
    times: list[tuple[int, float]]
    """Micro-batch, and ms of a part of its attention, forward or backward."""


class LayerObserver:
    """The calls of one layer's attention, in training mode, in the step under way.

    Micro-batch ``k`` is the ``k``-th first pass of the layer. Every schedule runs the forwards of a layer in
    this order, and layers of other pipeline stages and chunks count on their own.

    Args:
        tuning: returns the multiplier of a micro-batch's price, and the attention mass that it takes away,
            float32 ``[]`` on the device, or None; None where prices are not tuned.
        place: the layer, for messages.
        price: the price of the layer's settings.
        tunable: which heads of this rank have a price that tuning can move; one value for all of them.
    """

    def __init__(
        self,
        tuning: Callable[[int], tuple[Tensor, Tensor] | None] | None = None,
        place: str = "attention",
        price: float = 0.0,
        tunable: Sequence[bool] = (False,),
    ):
        self._tuning_of, self._place = tuning, place
        self.price, self.tunable = price, list(tunable)
        self._mask: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        self.count = 0
        self._density: list[Tensor] = []
        self._recall: list[Tensor] = []
        self._times: list[tuple[int, float]] = []
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> Call | None:
        """Begin a first pass; None for a replay whose first pass has left nothing for it.

        Raises:
            RuntimeError: such a replay, where prices are tuned.
        """
        if not in_backward():
            call = Call(self, self.count, self._tuning(self.count))
            self.count += 1
            return call
        if self._tuning_of is not None:
            # It may be of any micro-batch: a pattern at another price has other gradients.
            raise RuntimeError(
                f"the {self._place} is run again in a backward, without the pattern of its first pass, and "
                f"{option('tuning')} is on: use reentrant checkpoints, as Megatron's are, or "
                f"{option('tuning')} off"
            )
        return None

    def _tuning(self, number: int) -> tuple[Tensor, Tensor] | None:
        """The multiplier of a call's price, and the mass that it gives up: ``[]``, or ``[h]`` where heads
        have no price."""
        if self._tuning_of is None or not any(self.tunable):
            return None
        tuned = self._tuning_of(number)
        if tuned is None or all(self.tunable):
            return tuned
        multiplier, mass = tuned
        if self._mask is None:
            self._mask = torch.tensor(self.tunable, device=mass.device).float()
        return multiplier, mass * self._mask

    def keep(self, number: int, density: Tensor, recall: Tensor) -> None:
        """Keep what a first pass has found, float32 ``[b, h]``."""
        if number == len(self._density):
            self._density.append(density.detach())
            self._recall.append(recall.detach())

    def time_from(self, number: int, start) -> None:
        """Count the time from ``start``, of :func:`_now`, to now."""
        if isinstance(start, float):
            self._times.append((number, 1000 * (time.perf_counter() - start)))
        else:
            self._events.append((number, start, _now(True)))

    def take(self) -> Observed:
        """What the step has seen; the next one begins.

        Waits for the step's last attention on the device. Megatron-LM has done so before, when it asked
        whether the optimizer's step succeeded.
        """
        times = self._times
        if self._events:
            self._events[-1][2].synchronize()
            times += [(number, start.elapsed_time(end)) for number, start, end in self._events]
        found = Observed(self._density, self._recall, times)
        self._begin()
        return found


class Call(NamedTuple):
    """One call of a layer: its first pass, and its replay under activation recomputation."""

    layer: LayerObserver
    number: int
    """Of the micro-batch."""
    tuned: tuple[Tensor, Tensor] | None = None
    """The multiplier of the price, and the attention mass that it gives up; None if nothing is tuned."""

    def timed(self, attend: Callable[[], AttentionResult], cuda: bool) -> AttentionResult:
        """Run attention, and measure its forward now and its backward later."""
        start = _now(cuda)
        result = attend()
        self.layer.time_from(self.number, start)
        node, started = result.out.grad_fn, []
        if node is not None:
            node.register_prehook(lambda gradients: started.append(_now(cuda)))
            node.register_hook(lambda *_: self.layer.time_from(self.number, started.pop()))
        return result

    def price(self, price: Tensor | None) -> Tensor | None:
        """The price of this call, for one of the step; None stands for the settings'."""
        if self.tuned is None:
            return price
        return self.tuned[0] * (self.layer.price if price is None else price)

    def observe(self, density: Tensor, recall: Tensor | None) -> Tensor | None:
        """Keep what the first pass has found, float32 ``[b, h]``; without recall, everything is kept.

        Returns:
            The lost attention that a target recall counts: what is lost at the price of the step. Prices that
            follow the target would undo a multiplier else.
        """
        self.layer.keep(
            self.number, density, torch.ones_like(density) if recall is None else recall
        )
        if recall is None:
            return None
        lost = 1 - recall
        return lost if self.tuned is None else (lost - self.tuned[1]).clamp(min=0)


def _now(cuda: bool):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
