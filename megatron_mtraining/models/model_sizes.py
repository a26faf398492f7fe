# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The sizes that a model can have: what is larger is an error, and would keep a library busy for ever."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..files import read_json

LARGEST = {
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "num_experts": 10**6,
    "num_local_experts": 10**6,
    "num_experts_per_tok": 10**6,
    "head_dim": 10**5,
    "hidden_size": 10**7,
    "intermediate_size": 10**8,
    "moe_intermediate_size": 10**8,
    "vocab_size": 10**9,
    "max_position_embeddings": 10**12,
    "original_max_position_embeddings": 10**12,
}
"""By config.json's names; each is well above any model's."""
EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}
"""Those that are 0 in some dense models."""
PARTS = ("text_config", "rope_scaling", "rope_parameters")
"""Objects in a config.json with sizes of their own."""


def largest(name: str) -> int:
    return LARGEST.get(name, 1 << 62)


def check_size(name: str, value: object, place: str) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a possible one of the size ``name``.

    Args:
        place: names the value, for messages.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest(name):
        raise ConfigError(
            f"{place} is {short(value)}: a whole number from 1 to {largest(name)} is needed"
        )


def short(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_config_file(file: Path) -> dict:
    """config.json's object, whose sizes are possible ones; which fields there must be is not checked.

    Raises:
        ConfigError: it cannot be read, or has an impossible size.
    """
    config = read_json(file)
    for part in (None, *PARTS):
        fields = config if part is None else config.get(part)
        if not isinstance(fields, dict):
            continue
        where = f"{file}: " if part is None else f"{file}: {part}."
        for name in LARGEST.keys() & fields.keys():
            value = fields[name]
            if value is not None and not (name in EXPERTS and value == 0):
                check_size(name, value, where + name)
    return config
