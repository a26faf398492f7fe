# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention under activation recomputation: it runs in the first pass, and the replay uses its result.

Megatron runs what it checkpoints once without gradients and, in the backward, once more with them. The
replay needs attention's operands again, but not its forward: its result (out, log-sum-exp, pattern) is
saved by the checkpointed call itself, in the order of its attentions. So any number of calls may be in flight
and replayed in any order, as pipeline schedules do; and a saved result is freed as the replay takes it, or
with the call's autograd node if it is never replayed.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..config import option
from .run_state import RUN

if TYPE_CHECKING:
    from ..attention import AttentionResult, Pattern


class Saves(Enum):
    """What the first pass saves for the replay."""

    RESULT = "out, log-sum-exp and pattern: attention is not computed again"
    PATTERN = "the pattern alone: it is not searched again, but attention is computed again"


class Replay(NamedTuple):
    """What the first pass of a call has left for its replay: ``pattern`` or ``saved`` of
    :func:`~..attention.attend`."""

    pattern: Pattern | None = None
    """Its pattern alone, if attention is to be computed again."""
    saved: AttentionResult | None = None
    """Else its result."""
    call: Any = None
    """What :func:`save` was given."""


class _Saved(NamedTuple):
    attention: torch.nn.Module
    replay: Replay
    shape: str


class _Pass(NamedTuple):
    """Where the attentions of a checkpointed call take results from and save them to."""

    source: deque[_Saved] | None
    """A replay: they are taken from here."""
    sink: deque[_Saved] | None
    """A first pass: they are saved here."""


_NEITHER = _Pass(None, None)
# Backwards, and so replays, run in threads of autograd's own: each has its own value.
_current: ContextVar[_Pass] = ContextVar("mtraining_pass", default=_NEITHER)


@contextmanager
def _during(source: deque[_Saved] | None, sink: deque[_Saved] | None):
    token = _current.set(_Pass(source, sink))
    try:
        yield
    finally:
        _current.reset(token)


def what_to_save(attention: torch.nn.Module) -> Saves:
    """What ``attention``, which is being built, saves for replays.

    The pattern alone, a few KB a head, where the settings ask to recompute, and where Megatron offloads the
    input of the output projection: it then empties that tensor's memory, which ``out`` shares.
    """
    config = attention.config
    offloaded = getattr(config, "fine_grained_activation_offloading", False) and (
        "attn_proj" in (getattr(config, "offload_modules", None) or ())
    )
    RUN.has_attention = True
    again = attention.mtraining.recompute_attention or offloaded
    return Saves.PATTERN if again else Saves.RESULT


def save(attention: torch.nn.Module, result: AttentionResult, call: Any = None) -> None:
    """Save a result for the replay, in the first pass of a checkpointed call; else do nothing.

    Args:
        call: what the layer's observer has of the call, for :attr:`Replay.call`.
    """
    sink = _current.get().sink
    if sink is None:
        return
    if attention.saves is Saves.RESULT:
        detached = result._replace(out=result.out.detach(), lse=result.lse.detach())
        replay = Replay(saved=detached, call=call)
    else:
        replay = Replay(pattern=result.index, call=call)
    sink.append(_Saved(attention, replay, _shape(result.out)))


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def saved_call(attention: torch.nn.Module, query: Tensor) -> Replay | None:
    """What the first pass of this call of ``attention`` has saved; None if this is no replay.

    Every context-parallel rank runs the same calls, so all get a result or none does.

    Args:
        attention: the core attention, which has a ``layer_number``.
        query: ``[s/cp, b, h, d]``, of the replay.

    Raises:
        RuntimeError: the replay does not run the attentions of the first pass.
    """
    source = _current.get().source
    if source is None:
        return None
    wrong = _what_is_wrong(attention, source, query)
    if wrong is None:
        return source.popleft().replay
    if attention.saves is Saves.PATTERN:  # it can do without
        source.clear()
        return None
    raise _mismatch(wrong)


def _what_is_wrong(attention, source: deque[_Saved], query: Tensor) -> str | None:
    """Why the next result is not this attention's."""
    layer = attention.layer_number
    if not source:
        return f"attention of layer {layer} is run more often in the replay"
    saved = source[0]
    if saved.attention is not attention:
        return (
            f"attention of layer {layer} runs in the second pass where the first pass ran the attention of "
            f"layer {saved.attention.layer_number}"
        )
    out = None if saved.replay.saved is None else saved.replay.saved.out
    first, now = saved.shape, _shape(query)
    if first != now:
        return f"attention of layer {layer} has queries {now} in the replay, but {first} in the first pass"
    if out is not None and out.untyped_storage().nbytes() == 0:
        return f"the output of attention of layer {layer} was emptied before the replay"
    return None


def _mismatch(what: str) -> RuntimeError:
    return RuntimeError(
        f"activation recomputation: {what}; attention backend mtraining uses the results of the first "
        f"pass in the replay, which must run the same attentions in the same order. Use "
        f"{option('recompute_attention')} (MTrainingConfig(recompute_attention=True)) to compute "
        "them again instead"
    )


class _CheckpointedFunction:
    """A function under checkpoint, and the results of the attentions in its first pass."""

    def __init__(self, function):
        self.function = function
        self.saved: deque[_Saved] | None = None

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self._first_pass(*args, **kwargs)
        if self.saved is not None:
            return self._replay(*args, **kwargs)
        # No checkpointing after all (CUDA graphs), one that has gradients in the first pass too (the
        # non-reentrant kind), or a second backward through the same graph: attention is computed.
        return self.function(*args, **kwargs)

    def _first_pass(self, *args, **kwargs):
        self.saved = deque()
        # If this is within the replay of another checkpoint, that one has the results.
        with _during(source=_current.get().source, sink=self.saved):
            return self.function(*args, **kwargs)

    def _replay(self, *args, **kwargs):
        saved, self.saved = self.saved, None
        with _during(source=saved, sink=None):
            result = self.function(*args, **kwargs)
        left = [each for each in saved if each.attention.saves is Saves.RESULT]
        if left:
            layers = ", ".join(str(each.attention.layer_number) for each in left)
            raise _mismatch(f"attention of layer {layers} is not run in the replay")
        return result


def wrap_checkpoint(original):
    """``tensor_parallel.checkpoint`` or ``te_checkpoint``, whose first argument is the function to recompute.

    With gradients off there is no replay, or it is one of an enclosing checkpoint. A module is passed on as
    it is: Transformer Engine inspects it, and Megatron's (MLPs) hold no attention.
    """

    def checkpoint(*args, **kwargs):
        may_replay = RUN.has_attention and torch.is_grad_enabled()
        if not may_replay or not args or isinstance(args[0], torch.nn.Module):
            return original(*args, **kwargs)
        return original(_CheckpointedFunction(args[0]), *args[1:], **kwargs)

    return checkpoint
