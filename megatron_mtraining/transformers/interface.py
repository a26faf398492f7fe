# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The attention function and the mask function that transformers calls under the name ``mtraining``.

Training and prefill use the pattern. Steps that read a KV cache (decoding, a prompt that continues) attend to
the whole cache, through transformers' own ``sdpa``; with several queries in training mode they are refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial, wraps

import torch
from torch import Tensor, nn

from ..attention import attend
from ..config import DENSE, MEGATRON_ONLY, ConfigError, MTrainingConfig
from ..documents import Documents
from ..kernels.limits import HEAD_DIMS
from ..requirements import require
from .masking import CacheMask, Part, PatternMask, token_spans
from .state import ATTRIBUTE, PatternState

NAME = "mtraining"
"""Name of the attention implementation."""
TAIL_ROWS = 256
"""Rows of a dense tail that are computed at a time."""
UNSUPPORTED = (
    "sliding_window",
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "indices",
    "block_indices",
)
"""Arguments of attention functions that change what attention computes. The arguments that do not cannot be
listed instead: models pass on to attention whatever a trainer gives to their forward."""


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
    _refuse_assisted_decoding()


def _refuse_assisted_decoding() -> None:
    """Have ``generate`` refuse assisted decoding for models with this attention.

    Its first forward is of the prompt and of tokens that an assistant proposes, so the pattern would depend
    on them. The mask function and the attention function cannot tell it from a prompt. So the method that
    makes the assistant refuses.
    """
    from transformers.generation import GenerationMixin

    # No public method is called with assisted decoding alone. Without this one nothing can be refused.
    original = getattr(GenerationMixin, "_get_candidate_generator", None)
    if original is None or getattr(original, "refuses", None) == NAME:
        return

    @wraps(original)
    def candidates(self, *args, **kwargs):
        if self.config._attn_implementation == NAME:
            raise ConfigError(
                "generate is asked for assisted decoding (assistant_model, prompt_lookup_num_tokens or "
                "another way to propose tokens), where a prompt's pattern would depend on the proposed "
                "tokens: attention mtraining supports generation without it"
            )
        return original(self, *args, **kwargs)

    candidates.refuses = NAME  # type: ignore[attr-defined]
    GenerationMixin._get_candidate_generator = candidates


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
            have little say in it. Of packed sequences, tokens of the last one alone, all of it if it is
            shorter. Density does not count it. In training mode there is no such tail.

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
    _check_devices(model)
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
    for name in MEGATRON_ONLY:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ConfigError(
                f"{name} is {value}, which has no effect in transformers: leave it out"
            )


def _check_devices(model: nn.Module) -> None:
    devices = sorted({str(each.device) for each in model.parameters()})
    if len(devices) > 1:
        raise ConfigError(
            f"{type(model).__name__} has parameters on {', '.join(devices)}: attention mtraining supports "
            "one device in each process; leave out device_map, and start one process for each GPU with "
            "torchrun"
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
        A :class:`~.masking.PatternMask`, or a :class:`~.masking.CacheMask` for steps that read a KV cache.

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
    spans = None if attention_mask is None else token_spans(attention_mask.bool())
    return PatternMask(spans, packed)


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
        attention_mask: the result of :func:`mask`; None, from models without it, for causal attention.
        scaling: scale of the scores; ``d ** -0.5`` if None.

    Returns:
        ``[b, s, h, d]`` in the value's dtype, 0 for padding, and None: there are no attention weights.

    Raises:
        ConfigError: something that attention mtraining does not support; names it and the layer.
    """
    batch, _, length, _ = query.shape
    state: PatternState | None = getattr(module, ATTRIBUTE, None)
    layer = getattr(module, "layer_idx", None)
    place = f"attention of layer {layer}"
    if isinstance(attention_mask, CacheMask):
        _check_continuation(module, place, length, key.shape[2])
        if state is not None and layer is not None and length > 1:
            # A few tokens, such as those of an answer, are decoding, which does not count.
            if _searches(state.config, length):
                state.observe_dense(layer, batch, module.training, query.device)
        return _over_cache(module, query, key, value, attention_mask.mask, scaling, dropout, more)
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
    parts = [Part(slice(None), 0, length)]
    if attention_mask is not None:
        parts = attention_mask.parts(more.get("position_ids"), batch, length)
    # RoPE leaves float32 under autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)

    def attend_to(part: Part) -> Tensor:
        own = (t[part.entries, :, part.first : part.end] for t in (query, key, value))
        try:
            return _by_pattern(state, layer, module.training, *own, part.documents, scaling)
        except ValueError as error:
            raise ConfigError(f"the {place} cannot run: {error}") from error

    if attention_mask is None or attention_mask.spans is None:
        return attend_to(parts[0]), None
    out = value.new_zeros(batch, length, *query.shape[1::2])
    for part in parts:
        out[part.entries, part.first : part.end] = attend_to(part)
    return out, None


def _by_pattern(
    state: PatternState,
    layer: int,
    training: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scaling: float | None,
) -> Tensor:
    """Attention by a layer's settings, which is counted: ``[b, s, h, d]``.

    Args:
        query: ``[b, h, s, d]``; key, value ``[b, hk, s, d]``, without padding.
    """
    length = query.shape[2]
    config, policies, price = state.config, state.policies(layer), state.price(layer, query.device)
    if not training:
        config = _without_pruning(config)
    searched = _searches(config, length)
    if not searched:
        config, policies, price = _dense(config), None, None
    result = attend(
        *(t.permute(2, 0, 1, 3) for t in (query, key, value)),
        config=config,
        softmax_scale=scaling,
        documents=documents,
        head_policies=policies,
        price=price,
        observe_backward=partial(state.observe_backward, layer),
    )
    state.observe(layer, result.index, training, searched)
    out = result.out.transpose(0, 1)
    if state.dense_tail and not training:
        out = with_dense_tail(out, query, key, value, documents, scaling, state.dense_tail)
    return out


def with_dense_tail(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scaling: float | None,
    count: int,
) -> Tensor:
    """``out``, ``[b, s, h, d]``, whose last ``count`` tokens attend to all keys. Of packed documents, those
    tokens of them that are in the last one attend to all of it; the others stay as they are.

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
        tail = tail.reshape(batch, heads, number, dim).transpose(1, 2)
        if documents is not None:
            last = (own >= documents.starts[:, None, -1:])[..., None]  # [b, n, 1, 1]
            tail = torch.where(last, tail, out[:, first : first + number])
        parts.append(tail)
    return torch.cat(parts, 1)


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


def _dense(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of dense attention, for sequences of any length."""
    return replace(config, policy=DENSE, window=0, sink=0)


@lru_cache(maxsize=64)
def _without_pruning(config: MTrainingConfig) -> MTrainingConfig:
    """The settings of evaluation, which prepares nothing for a pruned backward."""
    return replace(config, backward_threshold=0.0, backward_sampling=False)


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
