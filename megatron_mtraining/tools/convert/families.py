# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The families of models that convert, as data: what their config.json says, and what Megatron calls it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...config import ConfigError
from .fields import check_types, take


@dataclass(frozen=True)
class Family:
    """Models of one architecture of transformers.

    Attributes:
        fixed: fields of config.json with the only value that is supported, and whether that value is also
            what transformers takes where the field is missing.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    fixed: tuple[tuple[str, object], ...] = ()


PLAIN = (("hidden_act", "silu"), ("attention_dropout", 0.0), ("mlp_bias", False))
FAMILIES = {
    family.architecture: family
    for family in (
        Family("Qwen2ForCausalLM", qkv_bias=True, fixed=PLAIN),
        Family("Qwen3ForCausalLM", qk_norm=True, fixed=(*PLAIN, ("attention_bias", False))),
        Family(
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            experts=True,
            fixed=(*PLAIN, ("attention_bias", False), ("decoder_sparse_step", 1)),
        ),
        Family("LlamaForCausalLM", fixed=(*PLAIN, ("attention_bias", False))),
    )
}


@dataclass(frozen=True)
class Model:
    """A model's shape, the same on both sides. ``vocab`` is Hugging Face's, ``padded_vocab`` Megatron's."""

    family: Family
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    tied: bool
    norm_eps: float
    experts: int = 0
    expert_ffn: int = 0
    topk: int = 0
    norm_topk: bool = True


def model_of(config: dict, file: Path, padded_vocab: int | None = None) -> Model:
    """The model that a config.json describes.

    Args:
        config: its content.
        file: its path, for messages.
        padded_vocab: rows of Megatron's embedding; by default as many as Hugging Face's.

    Raises:
        ConfigError: names the file, the field and its value.
    """
    check_types(config, file)
    named = config.get("architectures") or []
    family = FAMILIES.get(named[0]) if len(named) == 1 else None
    if family is None:
        raise ConfigError(
            f"{file}: architectures is {', '.join(named) or 'missing'}; "
            f"{', '.join(FAMILIES)} are converted"
        )
    for field, value in family.fixed:
        if config.get(field, value) != value:
            raise ConfigError(
                f"{file}: {field} is {config[field]}, of which Megatron's {family.architecture} knows "
                f"only {value}"
            )
    _check_attention(family, config, file)

    number = partial(take, config, file=file)
    heads, hidden, vocab = map(number, ("num_attention_heads", "hidden_size", "vocab_size"))
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise ConfigError(
            f"{file}: num_key_value_heads is {groups}, which does not divide num_attention_heads ({heads})"
        )
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden % heads or family.qk_norm:
            raise ConfigError(f"{file}: head_dim is missing")
        head_dim = hidden // heads
    padded = vocab if padded_vocab is None else padded_vocab
    if padded < vocab:
        raise ConfigError(
            f"--padded-vocab-size is {padded}, fewer than vocab_size in {file} ({vocab}): use {vocab} or more"
        )
    experts = {}
    if family.experts:
        if config.get("mlp_only_layers"):
            raise ConfigError(
                f"{file}: mlp_only_layers is {config['mlp_only_layers']}: layers with and without experts in "
                "one model are not converted"
            )
        experts = dict(
            # transformers 5 writes the second name.
            experts=number("num_experts" if "num_experts" in config else "num_local_experts"),
            expert_ffn=number("moe_intermediate_size"),
            topk=number("num_experts_per_tok"),
            norm_topk=bool(config.get("norm_topk_prob", False)),
        )
    return Model(
        family=family,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        ffn=number("intermediate_size"),
        vocab=vocab,
        padded_vocab=padded,
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=number("rms_norm_eps"),
        **experts,
    )


def _check_attention(family: Family, config: dict, file: Path) -> None:
    """All layers have full attention, in transformers: by ``layer_types``, which Qwen3Moe does not read, and
    else by the sliding window, with transformers' own defaults."""
    kinds = set(config.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"{file}: layer_types has {', '.join(sorted(kinds))}: only full attention in every layer can be "
            "expressed"
        )
    # Qwen2 carries the window's size along where it is switched off, or begins behind the last layer.
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if family.experts:
        used = True
    elif config.get("layer_types"):
        used = False
    else:
        used = config.get("max_window_layers", 28) < take(config, "num_hidden_layers", file)
    if window is not None and used:
        raise ConfigError(
            f"{file}: use_sliding_window is True, with sliding_window {window}: only full attention in every "
            "layer can be expressed"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{file}: quantization_config is set: give the weights that are not quantised"
        )
