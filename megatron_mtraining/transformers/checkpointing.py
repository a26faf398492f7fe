# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Gradient checkpointing of transformers' layers without a second search and a second attention.

A checkpointed layer is run again in the backward. Its attention needs its operands again, but not its
forward: the first run keeps out, log-sum-exp and pattern, which the second takes (as DistFlashAttention,
arXiv 2310.03294, has it), until the layer's backward is done. They are saved with the graph, so what offloads
activations (hooks on saved tensors: ``save_on_cpu``, TRL's ``activation_offloading``) has them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import AttentionResult, attend
from ..config import option

FUNCTION = "_gradient_checkpointing_func"
"""The attribute of transformers' modules with the function that they are checkpointed by."""


class _Kept(NamedTuple):
    """What an attention of a layer's first run has found."""

    layer: int
    shape: str
    result: AttentionResult
    """Its tensors are empty while the graph has them."""
    has_tensors: bool = True

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.result.out, self.result.lse, self.result.packed]

    def with_tensors(self, out: Tensor, lse: Tensor, packed: Tensor | None) -> _Kept:
        return self._replace(
            result=self.result._replace(out=out, lse=lse, packed=packed), has_tensors=True
        )

    def without_tensors(self) -> _Kept:
        empty = self.result.out.new_empty(0)
        result = self.result._replace(out=empty, lse=empty, packed=None)
        return self._replace(result=result, has_tensors=False)


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
        own = result._replace(out=result.out.detach(), lse=result.lse.detach())
        run.kept.append(_Kept(layer, shape, own))
        return result
    kept = next(run.taken, None)
    if kept is None or kept[:2] != (layer, shape):
        first = "nothing more" if kept is None else f"layer {kept.layer} with queries {kept.shape}"
        raise RuntimeError(
            f"gradient checkpointing: attention of layer {layer} with queries {shape} runs again, where the "
            f"first run had {first}. Give MTrainingConfig.from_options(recompute_attention=True), which has "
            f"attention run twice ({option('recompute_attention')})"
        )
    if not kept.has_tensors:  # the backward has not come through the layer's output
        return attend(query, key, value, pattern=kept.result.index, **options)
    return attend(query, key, value, saved=kept.result, **options)


def keep_results(body: nn.Module, keep: bool = True) -> None:
    """Have the layers of a model that are checkpointed keep what their attention finds, or no longer keep it.
    Before each forward, as checkpointing can be switched on, and settings given, at any time."""
    for module in body.modules():
        function = module.__dict__.get(FUNCTION)
        # Selective checkpointing has both runs do the same operations.
        selects = "context_fn" in getattr(function, "keywords", ())
        if function is None or selects or keep == isinstance(function, _Checkpoint):
            continue
        setattr(module, FUNCTION, _Checkpoint(function) if keep else function.function)


class _Checkpoint:
    """A function that checkpoints as ``torch.utils.checkpoint`` does, of either kind."""

    def __init__(self, function):
        self.function = function

    def __call__(self, layer, *args, **kwargs):
        own = _Layer(layer)
        return own.saved_behind(self.function(own, *args, **kwargs))


class _Layer:
    """One forward of a layer, which its backward may run again, once or more often."""

    def __init__(self, function):
        self.function = function
        self.kept: list[_Kept] = []
        self.has_run = False
        self.is_saved = (
            False  # whether the graph has the tensors of `kept`, and its backward gives them
        )

    def __call__(self, *args, **kwargs):
        again, self.has_run = self.has_run, True
        token = _run.set(_Run(self.kept, iter(self.kept) if again else None))
        try:
            return self.function(*args, **kwargs)
        finally:
            _run.reset(token)
            if again and self.is_saved:
                self.kept[:] = [each.without_tensors() for each in self.kept]

    def saved_behind(self, output: Any) -> Any:
        """The output of the first run, with what its attention has found saved behind it."""
        is_tuple = type(output) is tuple and output
        hidden = output[0] if is_tuple else output
        if not self.kept or not isinstance(hidden, Tensor) or not hidden.requires_grad:
            return output
        found = [tensor for kept in self.kept for tensor in kept.tensors]
        self.kept[:] = [each.without_tensors() for each in self.kept]
        self.is_saved = True
        hidden = _Found.apply(hidden, self, *found)
        return (hidden, *output[1:]) if is_tuple else hidden

    def take(self, found: Sequence[Any]) -> None:
        """Have the tensors of ``kept`` again, for a second run."""
        self.kept[:] = [
            each.with_tensors(*found[3 * number : 3 * number + 3])
            for number, each in enumerate(self.kept)
        ]


class _Found(torch.autograd.Function):
    """The output of a layer. Its backward, which is before the layer's second run, gives the layer what the
    first has found."""

    @staticmethod
    def forward(ctx, hidden: Tensor, layer: _Layer, *found: Tensor | None) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*found)
        return hidden.clone()  # a view could not be changed in place by what follows

    @staticmethod
    def backward(ctx, *gradients):
        found = ctx.saved_tensors  # once: what offloads them forgets them then
        ctx.layer.take(found)
        return *gradients, None, *[None] * len(found)
