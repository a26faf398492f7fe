# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention under activation recomputation: it runs in the first pass, the replay takes its result.

Megatron runs what it checkpoints once without gradients and, in the backward, once more with them. The
replay needs attention's operands again, but not its forward: what that found (out, log-sum-exp, pattern)
is kept by the checkpointed call itself, in the order of its attentions. So any number of calls may be
in flight, replayed in any order, as pipeline schedules do; and what a call keeps is freed as its
replay takes it, or with its autograd node if it is never replayed.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..config import option

if TYPE_CHECKING:  # registering needs no kernels
    from ..attention import AttentionResult

_carrying = False
"""Whether an attention was built in this process."""


class Carries(Enum):
    """What the replay takes from the first pass."""

    RESULT = "out, log-sum-exp and pattern: attention is not computed again"
    PATTERN = "the pattern alone: it is not searched again, but attention is computed again"


class _Kept(NamedTuple):
    attention: torch.nn.Module
    result: AttentionResult
    shape: str


class _Pass(NamedTuple):
    """What the attentions of a checkpointed call do with results, besides computing."""

    source: deque[_Kept] | None
    """A replay: they are taken from here."""
    sink: deque[_Kept] | None
    """A first pass: they are kept here."""


_NEITHER = _Pass(None, None)
# Backwards, and so replays, run in threads of autograd's own: each has its own value.
_current: ContextVar[_Pass] = ContextVar("mtraining_pass", default=_NEITHER)


@contextmanager
def _during(source: deque[_Kept] | None, sink: deque[_Kept] | None):
    token = _current.set(_Pass(source, sink))
    try:
        yield
    finally:
        _current.reset(token)


def enable(attention: torch.nn.Module) -> Carries:
    """What ``attention``, which is being built, is to carry to replays.

    The pattern alone, a few KB a head, where the settings ask to recompute, and where Megatron offloads the
    input of the output projection: it then empties that tensor's memory, which ``out`` shares.
    """
    global _carrying
    config = attention.config
    offloaded = getattr(config, "fine_grained_activation_offloading", False) and (
        "attn_proj" in (getattr(config, "offload_modules", None) or ())
    )
    _carrying = True
    again = attention.mtraining.recompute_attention or offloaded
    return Carries.PATTERN if again else Carries.RESULT


def keep(attention: torch.nn.Module, result: AttentionResult) -> None:
    """Keep a result for the replay, in the first pass of a checkpointed call; else nothing."""
    sink = _current.get().sink
    if sink is None:
        return
    out, lse = result.out.detach(), result.lse.detach()
    kept = result._replace(out=out, lse=lse)
    if attention.carries is Carries.PATTERN:
        kept = result._replace(out=None, lse=None)
    sink.append(_Kept(attention, kept, _shape(out)))


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def take(attention: torch.nn.Module, query: Tensor) -> AttentionResult | None:
    """What the first pass has found for this call of ``attention``, of which out and log-sum-exp are None if
    they are to be computed again; None if this is no replay.

    Every context-parallel rank runs the same calls, so all get a result or none does.

    Args:
        attention: the core attention, which has a ``layer_number``.
        query: ``[s/cp, b, h, d]``, of the replay.

    Raises:
        RuntimeError: the replay is not of what the first pass has run.
    """
    source = _current.get().source
    if source is None:
        return None
    wrong = _what_is_wrong(attention, source, query)
    if wrong is None:
        return source.popleft().result
    if attention.carries is Carries.PATTERN:  # it can do without
        source.clear()
        return None
    raise _mismatch(wrong)


def _what_is_wrong(attention, source: deque[_Kept], query: Tensor) -> str | None:
    """Why the next result is not this attention's."""
    layer = attention.layer_number
    if not source:
        return f"attention of layer {layer} is run more often in the replay"
    kept = source[0]
    if kept.attention is not attention:
        return (
            f"attention of layer {layer} is run in the replay where the first pass ran that of layer "
            f"{kept.attention.layer_number}"
        )
    out, first, now = kept.result.out, kept.shape, _shape(query)
    if first != now:
        return f"attention of layer {layer} has queries {now} in the replay, but {first} in the first pass"
    if out is not None and out.untyped_storage().nbytes() == 0:
        return f"the output of attention of layer {layer} was emptied before the replay"
    return None


def _mismatch(what: str) -> RuntimeError:
    return RuntimeError(
        f"activation recomputation: {what}; attention backend mtraining carries the results of the first "
        f"pass to the replay, which must run the same attentions in the same order. Use "
        f"{option('recompute_attention')} (MTrainingConfig(recompute_attention=True)) to compute "
        "them again instead"
    )


class _Carrier:
    """A function under checkpoint, and what the attentions in it have found in its first pass."""

    def __init__(self, function):
        self.function = function
        self.kept: deque[_Kept] | None = None

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self._first_pass(*args, **kwargs)
        if self.kept is not None:
            return self._replay(*args, **kwargs)
        # No checkpointing after all (CUDA graphs), one that has gradients in the first pass too (the
        # non-reentrant kind), or a second backward through the same graph: attention is computed.
        return self.function(*args, **kwargs)

    def _first_pass(self, *args, **kwargs):
        self.kept = deque()
        # If this is within the replay of another checkpoint, that one has the results.
        with _during(source=_current.get().source, sink=self.kept):
            return self.function(*args, **kwargs)

    def _replay(self, *args, **kwargs):
        kept, self.kept = self.kept, None
        with _during(source=kept, sink=None):
            result = self.function(*args, **kwargs)
        kept = [one for one in kept if one.attention.carries is Carries.RESULT]
        if kept:
            layers = ", ".join(str(one.attention.layer_number) for one in kept)
            raise _mismatch(f"attention of layer {layers} is not run in the replay")
        return result


def wrap_checkpoint(original):
    """``tensor_parallel.checkpoint`` or ``te_checkpoint``, whose first argument is the function to recompute.

    With gradients off there is no replay, or it is one of an enclosing checkpoint. A module is passed on as
    it is: Transformer Engine inspects it, and Megatron's (MLPs) hold no attention.
    """

    def checkpoint(*args, **kwargs):
        carries = _carrying and torch.is_grad_enabled()
        if not carries or not args or isinstance(args[0], torch.nn.Module):
            return original(*args, **kwargs)
        return original(_Carrier(args[0]), *args[1:], **kwargs)

    return checkpoint
