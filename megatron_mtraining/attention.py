# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse attention over a context-parallel group: search the pattern, run the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch import Tensor

from .attention_call import AttentionCall, AttentionResult, Pattern
from .config import ConfigError, MTrainingConfig, Policy
from .cp_group import CPGroup, ProcessGroup, cp_group_of
from .kernels.attention.operands import unit_stride
from .pattern import check_search, search_pattern
from .ring.attention import KeysAndValues, RingResult, ring_attention
from .ring.pruning import BackwardPruning, check_size
from .ring.transport import ring_of
from .tensors import own_context
from .visibility import VisibleRanges

__all__ = ["AttentionResult", "Pattern", "attend"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: MTrainingConfig,
    cp_group: ProcessGroup | None = None,
    cp_inner: int | None = None,
    softmax_scale: float | None = None,
    softmax_offset: Tensor | None = None,
    documents: VisibleRanges | None = None,
    head_policies: Sequence[Policy] | None = None,
    price: Tensor | None = None,
    pattern: Pattern | None = None,
    saved: AttentionResult | None = None,
    observe_backward: Callable[[Tensor, Tensor], None] | None = None,
) -> AttentionResult:
    """Causal self-attention to the keys that each head's pattern selects. It has first derivatives only.

    Args:
        query: ``[s, b, h, d]``, this rank's part of the sequence in the block-striped layout.
        key, value: ``[s, b, hk, d]``. Head dimension one of ``kernels.limits.HEAD_DIMS``; bf16, fp16 or
            fp32; any strides (tensors without unit stride in ``d`` are copied).
        config: the settings; ``s * world`` must be a multiple of ``block_size * world`` (on one rank
            the last block may be partial). Its file is not read: see ``head_policies``.
        cp_group: the context-parallel group; None for a single process.
        cp_inner: ranks of an inner group, whose keys are attended to in one round; None for
            :func:`~megatron_mtraining.layout.inner_size`.
        softmax_scale: default ``d ** -0.5``.
        softmax_offset: float ``[h]``: one more logit in the softmax of all rows of a head, without a value,
            as attention sinks and Megatron's ``softmax_type`` have it. Its gradient is of this rank's rows.
            None for none.
        documents: packed documents of the whole sequence, on this device: queries attend to keys of their own
            document alone, in the pattern search too. None for one document.
        head_policies: the policy of each of the ``h`` heads, a list, as
            :func:`~megatron_mtraining.config.head_policies` reads them; None for ``config.policy`` in all.
        price: float32 ``[]`` or ``[h]``, in place of the price of ``config``; of heads that have one. It
            must be given if ``config`` has a schedule.
        pattern: the pattern to attend to, of an earlier call with such operands (``index`` of its result), on
            all ranks or on none: nothing is searched. It has the documents of that call; others are refused
            on the CPU, and not looked at on GPUs.
        saved: the result for the same operands in the first pass, in a replay under activation recomputation,
            on all ranks or on none: no forward is run and nothing is sent, but the result has a backward.
        observe_backward: called in the backward, if ``config.backward_threshold`` is not 0, with the density
            of the pairs that it keeps, and with the share of attention in those that it leaves out (the mean
            over this rank's queries): float32 ``[b, h]`` each.

    Returns:
        out, its log-sum-exp and the pattern.

    Raises:
        ValueError: on operands, a sequence length or a pattern that do not fit.
        ConfigError: on documents or settings that do not; on every rank, if ranks are given other settings,
            shapes, documents or prices, or a pattern or a saved result on some alone. They compare these in
            each call on the CPU. On GPUs, where it would wait for the device, they compare settings and
            shapes at the first call with them. Ranks that part later are not refused there: with other shapes
            they wait for each other until the process group's timeout, and its error names a collective, not
            the difference; with other settings, documents or prices of the same shapes, results can be wrong.
    """
    call = AttentionCall(
        query, key, value, config, softmax_scale, documents, head_policies, price, pattern, saved,
        softmax_offset,
    )  # fmt: skip
    call.check_kinds()
    # Kernels are launched on the operands' device, and autocast would round scores that are in float32.
    with own_context(query.device) or nullcontext():
        cp = cp_group_of(cp_group, cp_inner)
        # Before what one rank alone may find wrong: it would leave the others waiting.
        call.compare_with_ranks(cp)
        call.check(cp)
        return _attend(call, cp, observe_backward)


def _attend(
    call: AttentionCall, cp: CPGroup, observe_backward: Callable[[Tensor, Tensor], None] | None
) -> AttentionResult:
    config, scale = call.config, call.scale
    query, key, value = unit_stride(call.query, call.key, call.value)
    ring = ring_of(cp)
    pruning = None
    if config.backward_threshold:
        check_size(query, config.block_size, cp.world, cp.inner)
        pruning = BackwardPruning(config.backward_threshold, observe_backward)
    keys, computed = None, None
    if call.saved is not None:
        index = call.saved.index
        computed = RingResult(call.saved.out, call.saved.lse, call.saved.packed)
    elif call.pattern is not None:
        index = call.pattern
    else:
        if call.price is None and config.steps is not None:
            raise ConfigError(
                "the settings have a schedule, but price is None: give the price of this step, or settings "
                "with a price of 0 for dense attention"
            )
        check_search(query.shape[0] * cp.world, config, cp.world)
        keys = KeysAndValues(key, value, ring)  # in flight during the pattern search
        index = search_pattern(
            query, key, config, cp, scale, head_policies=call.head_policies, price=call.price,
            visible=call.documents, gather_keys=keys.gather_column_keys,
            softmax_offset=call.softmax_offset,
        )  # fmt: skip
    found = ring_attention(
        query, key, value, index, ring, scale, computed, keys, pruning, call.softmax_offset
    )
    return AttentionResult(found.out, found.lse, index, found.packed, scale)
