# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Small tensors that are the same in every layer and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_readers: list[list[object]] = []


def constant(
    numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A vector on the device, ``[len(numbers)]``. Made once, since the host waits for the copy; of many, such
    as the prices of a sweep, those that were used last are kept."""
    return read(_made(numbers, device, dtype))


@lru_cache(maxsize=1024)
def _made(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def made_once(make: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of shapes and settings that makes tensors: of one call the same are returned in
    the next, and nobody writes to them. Those that were used last are kept. The CUDA graph of a caller, who
    would not keep them, has its own."""

    @lru_cache(maxsize=64)
    def made(*args, **kwargs):
        with torch.inference_mode(False):
            tensors = make(*args, **kwargs)
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()  # other streams read them, too
        return tensors

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> R:
        if (
            not _readers
            and torch.cuda.is_initialized()
            and torch.cuda.is_current_stream_capturing()
        ):
            return make(*args, **kwargs)
        return read(made(*args, **kwargs))

    return found


def read(found: R) -> R:
    """What is made once: a search that is being captured keeps it."""
    for kept in _readers:
        kept.append(found)
    return found


@contextmanager
def constants_read() -> Iterator[list[object]]:
    """The constants that are read within: for captured searches (:mod:`.search_graph`), which read them where
    they are, later too."""
    kept: list[Tensor] = []
    _readers.append(kept)
    try:
        yield kept
    finally:
        _readers[:] = [each for each in _readers if each is not kept]
