# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The types that fields of config.json must have, before anything is computed of them."""

from __future__ import annotations

from pathlib import Path

from ...config import ConfigError


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    # JSON as Python reads it has Infinity and NaN, and numbers that products of overflow.
    return (_is_whole(value) or isinstance(value, float)) and abs(value) < 1 << 63


KINDS = {
    "count": ("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1),
    "whole": ("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0),
    "positive": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "factor": ("a number of 1 or more", lambda value: _is_number(value) and value >= 1),
    "number": ("a number", _is_number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "word": ("a name in quotes", lambda value: isinstance(value, str)),
    "words": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
    ),
    "list": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object {...}", lambda value: isinstance(value, dict)),
}
"""What a field must be, in words and as a test. With ``?``, null is as good as no field."""

CONFIG = {
    "architectures": "words",
    "attention_bias": "flag",
    "attention_dropout": "number",
    "decoder_sparse_step": "whole",
    "head_dim": "count?",
    "hidden_act": "word",
    "hidden_size": "count",
    "intermediate_size": "count",
    "layer_types": "words?",
    "max_position_embeddings": "count",
    "max_window_layers": "whole",
    "mlp_bias": "flag",
    "mlp_only_layers": "list?",
    "moe_intermediate_size": "count",
    "norm_topk_prob": "flag",
    "num_attention_heads": "count",
    "num_experts": "count",
    "num_experts_per_tok": "count",
    "num_hidden_layers": "count",
    "num_key_value_heads": "count?",
    "num_local_experts": "count",
    "partial_rotary_factor": "number?",
    "quantization_config": "object?",
    "rms_norm_eps": "positive",
    "rope_parameters": "object?",
    "rope_scaling": "object?",
    "rope_theta": "positive",
    "sliding_window": "whole?",
    "tie_word_embeddings": "flag",
    "use_sliding_window": "flag",
    "vocab_size": "count",
}
ROPE = {
    "attention_factor": "positive?",
    "beta_fast": "positive?",
    "beta_slow": "positive?",
    "factor": "factor?",
    "high_freq_factor": "positive",
    "low_freq_factor": "positive",
    "mscale": "number?",
    "mscale_all_dim": "number?",
    "original_max_position_embeddings": "count?",
    "partial_rotary_factor": "number?",
    "rope_theta": "positive",
    "rope_type": "word",
    "truncate": "flag",
    "type": "word",
}
"""Fields of rope_parameters, and of rope_scaling."""


def check_types(config: dict, file: Path, kinds: dict = CONFIG, inside: str = "") -> None:
    """Raise :class:`ConfigError` for a field of another type; those that are missing are no matter here.

    Args:
        config: config.json's content, or an object in it.
        file: its path, for messages.
        kinds: what fields must be.
        inside: the object's name.
    """
    for name, kind in kinds.items():
        if name not in config:
            continue
        words, is_one = KINDS[kind.rstrip("?")]
        value = config[name]
        if not (is_one(value) or (value is None and kind.endswith("?"))):
            place = f"{name} in {inside}" if inside else name
            raise ConfigError(f"{file}: {place} is {value!r}: {words} is needed")


def take(config: dict, name: str, file: Path):
    """A field that must be there, of a config.json whose types were checked."""
    if config.get(name) is None:
        raise ConfigError(f"{file}: {name} is missing")
    return config[name]
