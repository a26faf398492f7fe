# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The types of config.json's fields, checked before anything is computed from them."""

from __future__ import annotations

from pathlib import Path

from ...errors import ConfigError, short


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    # Python's JSON has Infinity and NaN, and numbers whose products overflow.
    return (_is_integer(value) or isinstance(value, float)) and abs(value) < 1 << 63


def _is_strings(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


TYPES = {
    "count": ("a positive integer", lambda value: _is_integer(value) and value >= 1),
    "size": ("an integer of 0 or more", lambda value: _is_integer(value) and value >= 0),
    "positive": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "factor": ("a number of 1 or more", lambda value: _is_number(value) and value >= 1),
    "number": ("a number", _is_number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "string": ("a string", lambda value: isinstance(value, str)),
    "strings": ("a list of strings", _is_strings),
    "list": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object {...}", lambda value: isinstance(value, dict)),
}
"""What a value must be, in words and as a test."""


def _schema(**names: str) -> dict[str, tuple[str, bool]]:
    """The type of each field, and whether it may be null: a name with a question mark."""
    return {
        name.rstrip("?"): (kind, name.endswith("?"))
        for kind, fields in names.items()
        for name in fields.split()
    }


CONFIG = _schema(
    count="head_dim? hidden_size intermediate_size max_position_embeddings moe_intermediate_size "
    "num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads? "
    "num_local_experts vocab_size",
    size="decoder_sparse_step max_window_layers sliding_window?",
    positive="rms_norm_eps rope_theta",
    number="attention_dropout partial_rotary_factor?",
    flag="attention_bias mlp_bias norm_topk_prob tie_word_embeddings use_sliding_window",
    string="hidden_act",
    strings="architectures layer_types?",
    list="mlp_only_layers?",
    object="quantization_config? rope_parameters? rope_scaling?",
)
ROPE = _schema(
    count="original_max_position_embeddings?",
    positive="attention_factor? beta_fast? beta_slow? high_freq_factor low_freq_factor rope_theta",
    factor="factor?",
    number="mscale? mscale_all_dim? partial_rotary_factor?",
    flag="truncate",
    string="rope_type type",
)
"""Fields of rope_parameters and of rope_scaling."""


def check_types(config: dict, file: Path, schema: dict = CONFIG, parent: str = "") -> None:
    """Raise :class:`ConfigError` for a field of the wrong type. Missing fields are accepted here.

    Args:
        config: config.json's content, or an object in it.
        file: its path, for messages.
        schema: the types of the fields.
        parent: the name of the object in config.json, for messages.
    """
    for name, (kind, nullable) in schema.items():
        if name not in config or (nullable and config[name] is None):
            continue
        expected, is_valid = TYPES[kind]
        field = f"{name} in {parent}" if parent else name
        if not is_valid(config[name]):
            raise ConfigError(f"{file}: {field} is {short(config[name])}, which is not {expected}")


def required(config: dict, name: str, file: Path):
    """The value of a field that must be present."""
    if config.get(name) is None:
        raise ConfigError(f"{file}: {name} is missing")
    return config[name]
