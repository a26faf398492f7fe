# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Counters that persistent kernels fetch work items from, without a launch for each to set it to 0."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import current_stream

_AT_ONCE = 256
_INTS = 4
"""16 bytes: kernels are compiled for aligned addresses."""

_FREE: dict[tuple[int, int], list[Tensor]] = {}
"""Counters that are 0, by device and stream: what has set them to 0 runs before what the stream has later."""


def work_counter(first: int, device: torch.device) -> Tensor:
    """A counter that starts at ``first``, for one launch on the current stream: int32 ``[1]``."""
    # A graph of the caller's would find it used up when it is replayed.
    if first or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.full((1,), first, dtype=torch.int32, device=device)
    free = _FREE.setdefault((device.index, current_stream(device)), [])
    try:
        return free.pop()  # by whatever thread: a backward has another one
    except IndexError:
        zeros = torch.zeros(_AT_ONCE * _INTS, dtype=torch.int32, device=device)
        counter, *more = (each[:1] for each in zeros.split(_INTS))
        free.extend(more)
        return counter
