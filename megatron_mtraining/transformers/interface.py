# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The attention function and the mask function that transformers calls under the name ``mtraining``.

Training and prefill use the pattern. Steps that read a KV cache (decoding, a prompt that continues) attend to
the whole cache, through transformers' own ``sdpa``; with several queries in training mode they are refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from ..config import DENSE, ConfigError, MTrainingConfig
from ..pattern.windows import exact, sliding_window
from ..visibility import VisibleRanges
from .checkpointing import attend_once, is_second_run
from .dense import over_cache, over_cache_with_offset, with_dense_tail
from .masking import CacheMask, Part, PatternMask, under_way
from .sequence import SequenceParallel
from .state import ATTRIBUTE, PatternState

NAME = "mtraining"
"""Name of the attention implementation."""
HARMLESS = frozenset(
    ("cache", "cache_position", "ignore_index", "is_causal", "max_length_k", "max_length_q",
     "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
     "past_key_values", "position_embeddings", "return_dict", "s_aux", "shift_labels", "sliding_window",
     "use_cache")
)  # fmt: skip
"""Keyword arguments of attention functions that do not change what attention computes, or are looked at."""


def is_in_use(model: nn.Module) -> bool:
    """Whether a model with settings, or a part of it such as the language model of one with several parts,
    attends by them: another implementation may have been set since."""
    parts = (module for module in model.modules() if hasattr(module, ATTRIBUTE))
    configs = (getattr(part, "config", None) for part in parts)
    return any(getattr(config, "_attn_implementation", None) == NAME for config in configs)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: Tensor | None = None,
    **more,
):
    """transformers' mask function: called once per forward, before the layers.

    Returns:
        A :class:`~.masking.PatternMask`, or a :class:`~.masking.CacheMask` for steps that read a KV cache.

    Raises:
        ConfigError: a mask beyond padding and packing.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # A sliding window's cache drops the keys before kv_offset.
    if kv_length + int(kv_offset) != q_length + int(q_offset):
        raise ConfigError(
            f"there is a KV cache or an attention_mask of {kv_length} tokens, {q_length + int(q_offset)} in "
            "use: attention mtraining supports dynamic caches; leave cache_implementation out"
        )
    given = under_way.get()
    if given is None:
        raise ConfigError(
            f"attention {NAME} is asked for a mask by a model without settings, or outside of the model's "
            "own call: call megatron_mtraining.transformers.configure(model, config), and then model(...). "
            "For generate with a static cache, which does so, leave cache_implementation out"
        )
    if more.get("use_vmap") or _sees_later(mask_function, batch_size, q_length, more.get("device")):
        raise ConfigError(
            "the model overlays a mask of its own on causal attention: attention mtraining supports padding "
            "and packed sequences"
        )
    is_part = given.parallel is not None
    if int(q_offset) == 0 and (q_length > 1 or is_part):
        return given.under(None if mask_function is causal_mask_function else mask_function)
    if int(q_offset):
        given.check_continuation()
    return CacheMask(
        sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function or causal_mask_function,
            attention_mask=attention_mask, **{**more, "allow_is_causal_skip": q_length == 1},
        )
    )  # fmt: skip


def _sees_later(mask_function, batch: int, length: int, device) -> bool:
    """Whether a mask function lets tokens see the next one. For a packed batch, transformers has one that is
    not its causal one either. Waits for the device then."""
    from transformers.masking_utils import causal_mask_function

    if mask_function in (None, causal_mask_function):
        return False
    place = torch.arange(length - 1, device=device)
    entry = torch.arange(batch, device=device)[:, None]
    return bool(mask_function(entry, 0, place, place + 1).any())


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PatternMask | CacheMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the layer's attention module.
        query: ``[b, h, s, d]``; key, value ``[b, hk, skv, d]``, with the keys of a cache. With
            sequence_parallel, ``s`` is of this rank's tokens.
        attention_mask: the result of :func:`mask`.
        scaling: scale of the scores; ``d ** -0.5`` if None.

    Returns:
        ``[b, s, h, d]`` in the value's dtype, 0 for padding, and None: there are no attention weights.

    Raises:
        ConfigError: something that attention mtraining does not support; names it and the layer.
    """
    batch, _, length, _ = query.shape
    window, offset = more.get("sliding_window"), more.get("s_aux")
    state: PatternState | None = getattr(module, ATTRIBUTE, None)
    layer = getattr(module, "layer_idx", None)
    place = f"attention of layer {layer}"
    if state is None or layer is None:
        raise ConfigError(
            f"the {place} has attention implementation {NAME}, but no settings: call "
            "megatron_mtraining.transformers.configure(model, config)"
        )
    _check_call(module, place, dropout, more)
    if isinstance(attention_mask, CacheMask):
        _check_continuation(module, place, length, key.shape[2])
        # A few tokens, such as those of an answer, are decoding, which does not count.
        if window is None and length > 1 and _searches(state.config, length):
            state.observe_dense(layer, batch, module.training, query.device)
        if offset is not None:
            operands = query.to(value.dtype), key.to(value.dtype), value
            return over_cache_with_offset(*operands, attention_mask.mask, scaling, offset), None
        return over_cache(module, query, key, value, attention_mask.mask, scaling, dropout, more)
    if not isinstance(attention_mask, PatternMask):
        shape = getattr(attention_mask, "shape", None)
        raise ConfigError(
            f"the {place} is given {f'a mask of shape {list(shape)}' if shape else 'no mask'} by its model: "
            "attention mtraining takes a two-dimensional attention_mask, or none, through transformers' "
            "function for causal masks"
        )
    # RoPE leaves float32 under autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    parallel = attention_mask.parallel
    if parallel is not None:
        length *= parallel.ranks.world
        query, key, value = parallel.to_heads(query, key, value)
        offset = None if offset is None else offset[parallel.heads]
    parts = attention_mask.parts(batch, length, query.device)
    attention_mask.check_window(window, batch, length, query.device, place)

    def attend_to(part: Part) -> Tensor:
        own = (t[part.entries, :, part.first : part.end] for t in (query, key, value))
        try:
            if window is None:
                return _by_pattern(
                    state, layer, module.training, *own, part.documents, scaling, offset, parallel
                )
            return _by_window(state, layer, window, *own, part.documents, scaling, offset, parallel)
        except ValueError as error:
            raise ConfigError(f"the {place} cannot run: {error}") from error

    if parts[0].entries == slice(None):
        out = attend_to(parts[0])
    else:
        out = value.new_zeros(batch, query.shape[2], *query.shape[1::2])
        for part in parts:
            out[part.entries, part.first : part.end] = attend_to(part)
    if parallel is not None:
        out = parallel.to_tokens(out, length)
    return out.contiguous(), None  # as transformers' own, which some models take views of


def _by_pattern(
    state: PatternState,
    layer: int,
    training: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: VisibleRanges | None,
    scaling: float | None,
    offset: Tensor | None,
    parallel: SequenceParallel | None,
) -> Tensor:
    """Attention by a layer's settings, which is counted: ``[b, s, h, d]``.

    Args:
        query: ``[b, h, s, d]``; key, value ``[b, hk, s, d]``, without padding.
        offset: the heads' softmax offsets, ``[h]``; None for none.
        parallel: the ranks that have the other heads of the layer, or other tokens; None if these are all.
    """
    config, policies, price = state.config, state.policies(layer, parallel), None
    ring, length = _ring(parallel, query)
    if not training:
        config = _without_pruning(config)
    if state.steering.is_dense or not _searches(config, length):
        config, policies = _dense(config), None
    else:
        price = state.price(layer, query.device, parallel)
    result = attend_once(
        layer,
        *(t.permute(2, 0, 1, 3) for t in (query, key, value)),
        config=config,
        cp_group=ring,
        softmax_scale=scaling,
        softmax_offset=offset,
        documents=documents,
        head_policies=policies,
        price=price,
        observe_backward=partial(state.observe_backward, layer, parallel),
    )
    if not is_second_run():
        state.observe(layer, result.index, training, parallel)
    out = result.out.transpose(0, 1)
    if state.dense_tail and not training:
        if ring is not None:
            raise ConfigError(
                f"dense_tail is {state.dense_tail}, and the ranks of sequence_parallel, which cannot share "
                "the heads evenly, have parts of the sequence in attention: leave dense_tail out"
            )
        out = with_dense_tail(out, query, key, value, documents, scaling, state.dense_tail, offset)
    return out


def _by_window(
    state: PatternState,
    layer: int,
    window: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: VisibleRanges | None,
    scaling: float | None,
    offset: Tensor | None,
    parallel: SequenceParallel | None,
) -> Tensor:
    """Attention to all keys of a sliding window of so many, the query's own included. Arguments as for
    :func:`_by_pattern`. Not counted."""
    ring, length = _ring(parallel, query)
    result = attend_once(
        layer,
        *(t.permute(2, 0, 1, 3) for t in (query, key, value)),
        config=exact(state.config),
        cp_group=ring,
        softmax_scale=scaling,
        softmax_offset=offset,
        documents=sliding_window(window, len(query), length, query.device, documents),
    )
    return result.out.transpose(0, 1)


def _ring(parallel: SequenceParallel | None, query: Tensor):
    """The process group of a ring, or None, and the length of the sequence, padded, of which ``query`` has
    all tokens or this rank's."""
    if parallel is None or parallel.ring is None:
        return None, query.shape[2]
    return parallel.ring, query.shape[2] * parallel.ranks.world


@lru_cache(maxsize=256)
def _searches(config: MTrainingConfig, length: int) -> bool:
    """Whether a sequence of ``length`` tokens is long enough for a pattern. Others run dense attention: the
    settings sample or select more tokens than they have, or the local window has all of their blocks."""
    try:
        config.check_sizes(length)
    except ConfigError:
        return False
    blocks, window = (-(-tokens // config.block_size) for tokens in (length, config.window))
    return blocks > window + 1  # the window of a query reaches into one block more


@lru_cache(maxsize=64)
def _dense(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of dense attention, for sequences of any length."""
    return replace(config, policy=DENSE, window=0, sink=0)


@lru_cache(maxsize=64)
def _without_pruning(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of evaluation, which prepares nothing for a pruned backward."""
    return replace(config, backward_threshold=0.0)


def _check_continuation(module: nn.Module, place: str, length: int, keys: int) -> None:
    """Several queries that continue a cache are dense. In training that would be all of the training."""
    if module.training and length > 1:
        raise ConfigError(
            f"the {place} continues a KV cache of {keys - length} tokens by {length} in training mode, and "
            "attention to a cache is dense: attention mtraining does not support training with a prefix in "
            "the cache, such as PEFT's prefix tuning (use LoRA or prompt tuning); to continue a prompt, call "
            "model.eval()"
        )


def _check_call(module: nn.Module, place: str, dropout: float, more: dict) -> None:
    if getattr(module, "_is_replica", False):
        raise ConfigError(
            f"the {place} is in a replica of nn.DataParallel, which attention mtraining does not support: "
            "start one process for each GPU with torchrun"
        )
    # Models pass on to attention what their forward is given.
    known = HARMLESS.union(PatternMask.CARRIERS)
    unknown = [name for name, value in more.items() if value is not None and name not in known]
    if unknown:
        raise ConfigError(
            f"the {place} is given {unknown[0]}, which attention mtraining does not know: it supports "
            "causal softmax attention over padded or packed batches; leave the argument out"
        )
    if dropout:
        raise ConfigError(
            f"the {place} has dropout {dropout}: set attention_dropout of the model's config to 0"
        )
    if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
        raise ConfigError(
            f"the {place} is not causal: attention mtraining supports causal attention"
        )
    if more.get("output_attentions"):
        raise ConfigError(
            f"the {place} is asked for output_attentions, which are never computed: leave it out"
        )
