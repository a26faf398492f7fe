# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The model families that can be converted, and a model's sizes from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .fields import required


@dataclass(frozen=True)
class Family:
    """The models of one architecture of transformers.

    Attributes:
        only: fields of config.json with the single value that can be converted, which is also their
            default in transformers.
    """

    architecture: str
    only: dict[str, object]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


DENSE = {"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False}
UNBIASED = DENSE | {"attention_bias": False}
FAMILIES = {
    family.architecture: family
    for family in (
        Family("Qwen2ForCausalLM", DENSE, qkv_bias=True),
        Family("Qwen3ForCausalLM", UNBIASED, qk_norm=True),
        Family(
            "Qwen3MoeForCausalLM", UNBIASED | {"decoder_sparse_step": 1}, qk_norm=True, experts=True
        ),
        Family("LlamaForCausalLM", UNBIASED),
    )
}


@dataclass(frozen=True)
class Model:
    """A model's sizes. ``vocab`` is Hugging Face's vocabulary size, ``padded_vocab`` Megatron's."""

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
    names = config.get("architectures") or []
    family = FAMILIES.get(names[0]) if len(names) == 1 else None
    if family is None:
        raise ConfigError(
            f"{file}: architectures is {', '.join(names) or 'missing'}; supported are "
            f"{', '.join(FAMILIES)}"
        )
    for field, value in family.only.items():
        if config.get(field, value) != value:
            raise ConfigError(
                f"{file}: {field} is {config[field]}; a {family.architecture} can be converted only with "
                f"{value}"
            )
    _check_full_attention(family, config, file)
    if config.get("quantization_config"):
        raise ConfigError(f"{file}: quantization_config is set: give the unquantized weights")

    def size(field: str):
        return required(config, field, file)

    heads, hidden, vocab = size("num_attention_heads"), size("hidden_size"), size("vocab_size")
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
            f"--padded-vocab-size is {padded}, below vocab_size in {file} ({vocab}): use {vocab} or more"
        )
    experts = {}
    if family.experts:
        if config.get("mlp_only_layers"):
            raise ConfigError(
                f"{file}: mlp_only_layers is {config['mlp_only_layers']}: models with both dense and MoE "
                "layers cannot be converted"
            )
        experts = dict(
            # transformers 5 writes the second name.
            experts=size("num_experts" if "num_experts" in config else "num_local_experts"),
            expert_ffn=size("moe_intermediate_size"),
            topk=size("num_experts_per_tok"),
            norm_topk=bool(config.get("norm_topk_prob", False)),
        )
        _check_routing(experts, file)
    return Model(
        family=family,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        ffn=size("intermediate_size"),
        vocab=vocab,
        padded_vocab=padded,
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=required(config, "rms_norm_eps", file, (int, float)),
        **experts,
    )


def _check_routing(experts: dict, file: Path) -> None:
    """Refuse numbers of experts a token that Megatron-Core cannot route."""
    count, topk = experts["experts"], experts["topk"]
    if topk > count:
        raise ConfigError(
            f"{file}: num_experts_per_tok is {topk}, but there are {count} experts: a token has at most all"
        )
    if topk == 1 and experts["norm_topk"]:
        raise ConfigError(
            f"{file}: norm_topk_prob is true and num_experts_per_tok 1: every expert's weight is 1, and "
            "Megatron-Core builds a router to one expert only with the router's own weight "
            "(--moe-router-pre-softmax, norm_topk_prob false), which would be another model"
        )


def _check_full_attention(family: Family, config: dict, file: Path) -> None:
    """Refuse sliding windows, as transformers decides on them.

    By ``layer_types`` (which Qwen3Moe ignores), else by the window and transformers' defaults for it.
    """
    kinds = set(config.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"{file}: layer_types has {', '.join(sorted(kinds))}; only full attention in every layer can be "
            "converted"
        )
    count = len(config.get("layer_types") or ())
    if count and count != required(config, "num_hidden_layers", file):
        raise ConfigError(
            f"{file}: layer_types has {count} entries, and num_hidden_layers is "
            f"{config['num_hidden_layers']}: make them the same"
        )
    # Qwen2's config.json keeps the window's size also where no layer uses it.
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if family.experts:
        used = True
    elif config.get("layer_types"):
        used = False
    else:
        used = config.get("max_window_layers", 28) < required(config, "num_hidden_layers", file)
    if window is not None and used:
        raise ConfigError(
            f"{file}: use_sliding_window is True, with sliding_window {window}; only full attention in every "
            "layer can be converted"
        )
