# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The attention function and the mask function that transformers calls under the name ``mtraining``.

Training and prefill use the pattern. Steps that read a KV cache (decoding, a prompt that continues) attend to
the whole cache, through transformers' own ``sdpa``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from ..attention import attend
from ..config import DENSE, ConfigError, MTrainingConfig
from ..documents import Documents
from ..kernels.limits import HEAD_DIMS
from ..requirements import require
from .masking import CacheMask, PatternMask, check_padding
from .state import ATTRIBUTE, PatternState

NAME = "mtraining"
"""Name of the attention implementation."""
TAIL_ROWS = 256
"""Rows of a dense tail that are computed at a time."""
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that change what attention computes."""


def register() -> None:
    """Add ``attn_implementation="mtraining"`` to transformers. Idempotent; :func:`configure` calls it.

    Raises:
        ConfigError: transformers is not installed, or too old to have attention and mask interfaces.
    """
    require("transformers", extra="hf")
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        import transformers

        raise ConfigError(
            f"transformers {transformers.__version__} has no attention interface: install transformers>=5.10"
        ) from None
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def configure(
    model: nn.Module, config: MTrainingConfig | None = None, *, dense_tail: int = 0
) -> PatternState:
    """Switch a transformers model to dynamic sparse attention.

    Sets its attention implementation to ``mtraining`` and gives its attention layers the settings. Weights do
    not change; ``model.set_attn_implementation("sdpa")`` switches back.

    Args:
        model: a causal language model, or its body.
        config: the settings, also by layer and head (``settings``); None for the defaults. Options of
            context parallelism, recomputation, Megatron's loss and balance have no effect here and are
            refused.
        dense_tail: in evaluation mode, this many last tokens of a prompt attend to all keys. A pattern is
            selected by what many queries attend to; the few queries of a question at the end of a prompt
            have little say in it. Of packed sequences, those of the last one. Density does not count it. In
            training mode there is no such tail.

    Returns:
        The state of the model: its prices, and means of density and recall.

    Raises:
        ConfigError: the model or the settings are not supported; the message names the reason.
    """
    register()
    config = MTrainingConfig() if config is None else config
    if not isinstance(config, MTrainingConfig):
        raise ConfigError(f"config is a {type(config).__name__}: give an MTrainingConfig")
    check_config(config)
    of_model = getattr(model, "config", None)
    if of_model is None or not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"model is a {type(model).__name__}: give a model of transformers")
    _check_model(of_model, type(model).__name__)
    layers = [module for module in model.modules() if _is_attention(module)]
    numbers = sorted(module.layer_idx for module in layers)
    count = of_model.num_hidden_layers
    if numbers != list(range(count)):
        raise ConfigError(
            f"{type(model).__name__} has {count} layers, but causal attention in layers {numbers}: attention "
            "mtraining supports models with one causal self-attention in each layer"
        )
    if type(dense_tail) is not int or dense_tail < 0:
        raise ConfigError(f"dense_tail is {dense_tail!r}: give a number of tokens, 0 or more")
    state = PatternState(config, count, of_model.num_attention_heads, dense_tail)
    model.set_attn_implementation(NAME)
    if of_model._attn_implementation != NAME:
        raise ConfigError(
            f"{type(model).__name__} does not go through transformers' attention interface: models such as "
            "Llama, Mistral, Qwen2 and Qwen3 do"
        )
    for module in layers:
        setattr(module, ATTRIBUTE, state)
    return state


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "is_causal")


def check_config(config: MTrainingConfig) -> None:
    """Raise :class:`ConfigError` for options that only Megatron's runs read."""
    defaults = MTrainingConfig()
    names = "gathered_ranks", "bf16_gradients", "recompute_attention", "loss_chunk"
    for name in (*names, "batching", "tuning"):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ConfigError(
                f"{name} is {value}, which has no effect in transformers: leave it out"
            )


def _check_model(config, name: str) -> None:
    if config.get_text_config() is not config:
        raise ConfigError(f"{name} has several parts: call configure on its language model")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"{name} has attention heads of dimension {head_dim}: attention mtraining supports {HEAD_DIMS}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{name} has layers of type {', '.join(sorted(kinds - {'full_attention'}))}: attention mtraining "
            "supports full causal attention in every layer"
        )


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
        None for causal attention over the whole sequence; a :class:`~.masking.PatternMask` for padded or
        packed sequences; a :class:`~.masking.CacheMask` for steps that read a KV cache.

    Raises:
        ConfigError: a mask beyond padding and packing.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if more.get("use_vmap"):
        raise ConfigError(
            "the model overlays a mask of its own on causal attention: attention mtraining supports padding "
            "and packed sequences"
        )
    if kv_length != q_length + int(q_offset):
        raise ConfigError(
            f"the KV cache has room for {kv_length} tokens, {q_length + int(q_offset)} in use: attention "
            "mtraining supports dynamic caches; leave cache_implementation out"
        )
    if q_length == 1 or int(q_offset) > 0:
        return CacheMask(
            sdpa_mask(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                kv_offset=kv_offset, mask_function=mask_function or causal_mask_function,
                attention_mask=attention_mask, **{**more, "allow_is_causal_skip": q_length == 1},
            )
        )  # fmt: skip
    packed = mask_function is not None and mask_function is not causal_mask_function
    tokens = attention_mask
    if tokens is not None:
        tokens = None if bool(tokens.all()) else tokens.bool()
    if tokens is not None:
        check_padding(tokens)
    return None if tokens is None and not packed else PatternMask(tokens, packed)


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
        query: ``[b, h, s, d]``; key, value ``[b, hk, skv, d]``, with the keys of a cache.
        attention_mask: the result of :func:`mask`.
        scaling: scale of the scores; ``d ** -0.5`` if None.

    Returns:
        ``[b, s, h, d]`` in the value's dtype, and None: there are no attention weights.

    Raises:
        ConfigError: something that attention mtraining does not support; names it and the layer.
    """
    batch, _, length, _ = query.shape
    if isinstance(attention_mask, CacheMask):
        return _over_cache(module, query, key, value, attention_mask.mask, scaling, dropout, more)
    state: PatternState | None = getattr(module, ATTRIBUTE, None)
    layer = getattr(module, "layer_idx", None)
    place = f"attention of layer {layer}"
    if state is None or layer is None:
        raise ConfigError(
            f"the {place} has attention implementation {NAME}, but no settings: call "
            "megatron_mtraining.transformers.configure(model, config)"
        )
    _check_call(module, place, dropout, more)
    if attention_mask is not None and not isinstance(attention_mask, PatternMask):
        raise ConfigError(
            f"the {place} is given a mask of shape {list(attention_mask.shape)}: attention mtraining takes "
            "a two-dimensional attention_mask, or none"
        )
    tail = 0 if module.training else state.dense_tail
    documents = None
    if attention_mask is not None:
        if tail and attention_mask.ends_in_padding():
            raise ConfigError(
                f"dense_tail is {tail}, and the batch has padding after its tokens: pad on the left "
                '(tokenizer.padding_side = "left"), or leave dense_tail out'
            )
        documents = attention_mask.documents(more.get("position_ids"), batch, length)
    # RoPE leaves float32 under autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    config, policies, price = state.config, state.policies(layer), state.price(layer, query.device)
    if not module.training:
        config = _without_pruning(config)
    if not _fits(config, length):
        config, policies, price = _dense(config), None, None
    try:
        result = attend(
            *(t.permute(2, 0, 1, 3) for t in (query, key, value)),
            config=config,
            softmax_scale=scaling,
            documents=documents,
            head_policies=policies,
            price=price,
            observe_backward=partial(state.observe_backward, layer),
        )
    except ValueError as error:
        raise ConfigError(f"the {place} cannot run: {error}") from error
    state.observe(layer, result.index, module.training)
    out = result.out.transpose(0, 1)
    if tail:
        out = with_dense_tail(out, query, key, value, documents, scaling, tail)
    return out, None


def with_dense_tail(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scaling: float | None,
    count: int,
) -> Tensor:
    """``out``, ``[b, s, h, d]``, whose last ``count`` tokens attend to all keys of their documents.

    Args:
        query: ``[b, h, s, d]``; key, value ``[b, hk, s, d]``.
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    position = torch.arange(length, device=query.device)
    parts = [out[:, : max(0, length - count)]]
    for first in range(max(0, length - count), length, TAIL_ROWS):
        rows = query[:, :, first : first + TAIL_ROWS]
        number = rows.shape[2]
        own = position[first : first + number, None]  # [n, 1]
        sees = position <= own
        if documents is not None:
            starts = documents.starts[:, first : first + number, None]
            sees = sees & (position >= starts)  # [b, n, s]
        # The heads of a group are rows of one head: no key or value is copied for them.
        sees = sees.expand(batch, number, length).repeat(1, heads // groups, 1)[:, None]
        tail = torch.nn.functional.scaled_dot_product_attention(
            rows.reshape(batch, groups, -1, dim), key, value, attn_mask=sees, scale=scaling
        )
        parts.append(tail.reshape(batch, heads, number, dim).transpose(1, 2))
    return torch.cat(parts, 1)


@lru_cache(maxsize=64)
def _fits(config: MTrainingConfig, length: int) -> bool:
    """Whether a sequence of ``length`` tokens is long enough for the search; others run dense attention."""
    try:
        config.check_sizes(length)
    except ConfigError:
        return False
    return True


def _dense(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of dense attention, for sequences of any length."""
    return replace(config, policy=DENSE, window=0, sink=0)


@lru_cache(maxsize=64)
def _without_pruning(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of evaluation, which prepares nothing for a pruned backward."""
    return replace(config, backward_threshold=0.0, backward_sampling=False)


def _check_call(module: nn.Module, place: str, dropout: float, more: dict) -> None:
    given = [name for name in UNSUPPORTED if more.get(name) is not None]
    if given:
        raise ConfigError(
            f"the {place} has {given[0]}: attention mtraining supports full causal softmax attention"
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


def _over_cache(module, query, key, value, attention_mask, scaling, dropout, more):
    """Attention to all keys of a cache, by transformers' ``sdpa``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return sdpa(
        module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, dropout=dropout,
        scaling=scaling, **more,
    )  # fmt: skip
