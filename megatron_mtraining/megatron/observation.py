# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What one layer's attention sees in a step, by micro-batch: density, recall and time.

Nothing is read from the device in a call, and no kernel is launched: tensors are kept until the step ends,
and times are pairs of CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


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


class LayerCalls:
    """The calls of one layer's attention in the step under way.

    Micro-batch ``k`` is the ``k``-th first pass of the layer in training mode. Every schedule runs the
    forwards of a layer in this order, and layers of other pipeline stages and chunks count on their own.
    """

    def __init__(self):
        self._begin()

    def _begin(self) -> None:
        self.count = 0
        self._density: list[Tensor] = []
        self._recall: list[Tensor] = []
        self._times: list[tuple[int, float]] = []
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def next(self) -> int:
        """Count a first pass: the number of its micro-batch."""
        number = self.count
        self.count += 1
        return number

    def observe(self, number: int, density: Tensor, recall: Tensor) -> None:
        """Keep what a first pass has found, float32 ``[b, h]``."""
        if number == len(self._density):
            self._density.append(density.detach())
            self._recall.append(recall.detach())

    @contextmanager
    def timed(self, number: int, cuda: bool) -> Iterator[None]:
        """Measure what runs inside as attention of a micro-batch."""
        start = self._now(cuda)
        yield
        self._end(number, start)

    def time_backward(self, number: int, out: Tensor) -> None:
        """Measure the backward of ``out``, an attention's result, as attention of a micro-batch."""
        node = out.grad_fn
        if node is None:
            return
        cuda, started = out.is_cuda, []

        def before(gradients):
            started.append(self._now(cuda))

        def after(to_inputs, gradients):
            self._end(number, started.pop())

        node.register_prehook(before)
        node.register_hook(after)

    @staticmethod
    def _now(cuda: bool):
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end(self, number: int, start) -> None:
        if isinstance(start, float):
            self._times.append((number, 1000 * (time.perf_counter() - start)))
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((number, start, end))

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
