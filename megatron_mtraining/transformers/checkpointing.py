# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient checkpointing of transformers' layers without a second search and a second attention.

A checkpointed layer is run again in the backward. Its attention needs its operands again, but not its
forward: the first run keeps out, log-sum-exp and pattern, which the second takes (as DistFlashAttention,
arXiv 2310.03294, has it), until the layer's backward is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor, nn

from ..attention import AttentionResult, attend
from ..config import option

FUNCTION = "_gradient_checkpointing_func"
"""The attribute of transformers' modules with the function that they are checkpointed by."""


class _Kept(NamedTuple):
    layer: int
    shape: str
    result: AttentionResult


class _Run(NamedTuple):
    """One run of a checkpointed layer."""

    kept: list[_Kept]
    taken: Iterator[_Kept] | None
    """Of a second run: those that its attention has not taken yet."""


# Backwards, and so second runs, are in threads of autograd's own.
_run: ContextVar[_Run | None] = ContextVar("mtraining_checkpointed_run", default=None)


def is_second_run() -> bool:
    """Whether a checkpointed layer is under way again, whose attention has been counted."""
    run = _run.get()
    return run is not None and run.taken is not None


def attend_once(
    layer: int, query: Tensor, key: Tensor, value: Tensor, **options
) -> AttentionResult:
    """:func:`~..attention.attend`, or in the second run of a checkpointed layer what the first has found.

    Raises:
        RuntimeError: the second run does not have the attention of the first.
    """
    run = _run.get()
    if run is None:
        return attend(query, key, value, **options)
    shape = f"{list(query.shape)} {query.dtype}"
    if run.taken is None:
        result = attend(query, key, value, **options)
        kept = result._replace(out=result.out.detach(), lse=result.lse.detach())
        run.kept.append(_Kept(layer, shape, kept))
        return result
    kept = next(run.taken, None)
    if kept is None or kept[:2] != (layer, shape):
        first = "nothing more" if kept is None else f"layer {kept.layer} with queries {kept.shape}"
        raise RuntimeError(
            f"gradient checkpointing: attention of layer {layer} with queries {shape} runs again, where the "
            f"first run had {first}. Give MTrainingConfig.from_options(recompute_attention=True), which has "
            f"attention run twice ({option('recompute_attention')})"
        )
    return attend(query, key, value, saved=kept.result, **options)


def keep_results(body: nn.Module) -> None:
    """Have the layers of a model that are checkpointed keep what their attention finds. Before each forward,
    as checkpointing can be switched on at any time."""
    for module in body.modules():
        function = module.__dict__.get(FUNCTION)
        if function is not None and not isinstance(function, _Checkpoint):
            setattr(module, FUNCTION, _Checkpoint(function))


class _Checkpoint:
    """A function that checkpoints as ``torch.utils.checkpoint`` does, of either kind."""

    def __init__(self, function):
        self.function = function

    def __call__(self, layer, *args, **kwargs):
        return self.function(_Layer(layer), *args, **kwargs)


class _Layer:
    """One forward of a layer, which its backward may run again, once or more often."""

    def __init__(self, function):
        self.function = function
        self.kept: list[_Kept] | None = None

    def __call__(self, *args, **kwargs):
        with self._under_way():
            return self.function(*args, **kwargs)

    @contextmanager
    def _under_way(self):
        if self.kept is None:
            self.kept = []
            run = _Run(self.kept, None)
        else:
            run = _Run(self.kept, iter(self.kept))
        token = _run.set(run)
        try:
            yield
        finally:
            _run.reset(token)
