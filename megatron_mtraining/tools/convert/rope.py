# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rotary position embeddings: config.json's fields and Megatron's arguments, each from the other."""

from __future__ import annotations

import math
from pathlib import Path

from ...errors import ConfigError
from ...models.megatron_gpt import interpolation_factor, rope_scaling_factor
from .fields import required

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 8192,
}
"""The constants of Megatron's --use-rope-scaling."""
DEFAULT_BASE = 10000.0
"""transformers' rope_theta where config.json has none (Llama 2's), for all supported families."""
YARN_ARGUMENTS = {
    "rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim",
}  # fmt: skip
ARGUMENTS = YARN_ARGUMENTS | {
    "position_embedding_type", "rotary_base", "rotary_percent", "max_position_embeddings",
    "use_rope_scaling", "rope_scaling_factor",
}  # fmt: skip
"""Megatron's arguments about positions."""


def rope_fields(config: dict) -> dict:
    """config.json's RoPE in transformers' newer form: rope_type, rope_theta and others."""
    # transformers prefers the older field.
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(field) or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta", DEFAULT_BASE))
    if (original := config.get(ORIGINAL)) is not None and rope["rope_type"] != "default":
        rope[ORIGINAL] = original  # transformers prefers that of the config itself
    return rope


def arguments_of(config: dict, file: Path) -> dict:
    """Megatron's arguments for a config.json's positions.

    Raises:
        ConfigError: names the file, the field and its value.
    """
    rope = rope_fields(config)
    kind, base = rope.pop("rope_type"), rope.pop("rope_theta")
    length = required(config, "max_position_embeddings", file)
    if base != int(base):
        raise ConfigError(f"{file}: rope_theta is {base}, and Megatron's --rotary-base an integer")
    partial = rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")
    if any(factor not in (None, 1.0) for factor in partial):
        raise ConfigError(f"{file}: partial_rotary_factor is not 1, which cannot be converted")
    found = dict(
        position_embedding_type="rope",
        rotary_base=int(base),
        rotary_percent=1.0,
        max_position_embeddings=length,
        use_rope_scaling=False,
    )
    if kind == "llama3":
        for field, value in LLAMA3.items():
            if rope.pop(field, None) != value:
                raise ConfigError(
                    f"{file}: {field} of rope_type llama3 is not {value:g}, the constant in Megatron's "
                    "--use-rope-scaling"
                )
        found |= dict(use_rope_scaling=True, rope_scaling_factor=_factor(rope, file))
    elif kind == "yarn":
        factor = _factor(rope, file)
        original = rope.pop(ORIGINAL, None) or length
        expected = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        attention = rope.pop("attention_factor", None)
        if attention is not None and abs(attention - expected) > 1e-6:
            raise ConfigError(
                f"{file}: attention_factor of rope_type yarn is {attention}; Megatron's is {expected:g}"
            )
        found |= _yarn(
            factor,
            original,
            max(length, int(factor * original)),
            beta_fast=float(rope.pop("beta_fast", None) or 32),
            beta_slow=float(rope.pop("beta_slow", None) or 1),
            truncate=bool(rope.pop("truncate", True)),
        )
        scales = [rope.pop(name, None) for name in ("mscale", "mscale_all_dim")]
        # transformers ignores them unless both are given and not 0, and beside attention_factor.
        if all(scales) and attention is None:
            found |= dict(zip(("mscale", "mscale_all_dim"), scales))
    elif kind == "default":  # transformers keeps some fields that have no meaning here
        rope.pop(ORIGINAL, None)
        rope.pop("factor", None)
    else:
        raise ConfigError(f"{file}: rope_type is {kind}; default, yarn and llama3 can be converted")
    for name, value in rope.items():
        raise ConfigError(
            f"{file}: {name} of rope_type {kind} is {value}; Megatron has no such option"
        )
    return found


def _factor(rope: dict, file: Path) -> float:
    factor = rope.pop("factor", None)
    if factor is None:
        raise ConfigError(f"{file}: the scaling of RoPE has no factor")
    return float(factor)


def _yarn(
    factor: float,
    original: int,
    length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> dict:
    """Megatron's arguments for YaRN from ``original`` to ``length`` positions."""
    return dict(
        position_embedding_type="yarn",
        rotary_scaling_factor=float(factor),
        yarn_original_max_position_embeddings=original,
        yarn_beta_fast=beta_fast,
        yarn_beta_slow=beta_slow,
        yarn_correction_range_round_to_int=truncate,
        mscale=1.0,
        mscale_all_dim=0.0,
        max_position_embeddings=length,
    )


def extended(found: dict, base: int | None, yarn: float | None, length: int | None) -> dict:
    """The arguments for the longer context that the command line asks for.

    Args:
        found: the result of :func:`arguments_of`.
        base: another RoPE base, or None.
        yarn: the factor by which YaRN extends the model's positions, or None.
        length: another number of positions, or None.

    Raises:
        ConfigError: the model's positions are scaled already.
    """
    found = dict(found)
    if base is not None:
        found["rotary_base"] = base
    if yarn is not None:
        if found["position_embedding_type"] == "yarn" or found["use_rope_scaling"]:
            raise ConfigError(
                f"--yarn is {yarn:g}, but SRC scales its rotary positions already: leave it out"
            )
        original = found["max_position_embeddings"]
        found |= _yarn(yarn, original, int(yarn * original))
    if length is not None:
        found["max_position_embeddings"] = length
    return found


def into_config(config: dict, args, file: Path) -> dict:
    """A config.json with the positions of Megatron's arguments; unchanged if they are the same.

    Args:
        config: the original model's.
        args: the checkpoint's arguments.
        file: config.json's path, for messages.

    Raises:
        ConfigError: config.json cannot express the positions.
    """
    before = arguments_of(config, file)
    now = {name: getattr(args, name, None) for name in ARGUMENTS}
    kind, scaled = now["position_embedding_type"], now["use_rope_scaling"]
    factor = rope_scaling_factor(args, "the checkpoint", before.get("rope_scaling_factor"))
    now["rope_scaling_factor"] = factor
    for name, value, valid in (
        ("position_embedding_type", kind, ("rope", "yarn")),
        ("rotary_percent", now["rotary_percent"], (None, 1.0)),
        ("rotary_seq_len_interpolation_factor", interpolation_factor(args), (None, 1)),
    ):
        if value not in valid:
            supported = " and ".join(str(each) for each in valid if each is not None)
            raise ConfigError(f"{name} of the checkpoint is {value}; {supported} can be converted")
    # An argument that is absent, or that belongs to a scaling that is off, is left as it was.
    ignored = set() if kind == "yarn" else set(YARN_ARGUMENTS)
    if not scaled:
        ignored.add("rope_scaling_factor")
    if all(before.get(n) == v for n, v in now.items() if n not in ignored and v is not None):
        return config
    rope = {
        "rope_type": "default",
        "rope_theta": float(now["rotary_base"] or before["rotary_base"]),
    }
    if kind == "yarn":
        rope |= dict(
            rope_type="yarn",
            factor=now["rotary_scaling_factor"] or 1.0,
            # Megatron's default is 4096.
            original_max_position_embeddings=now["yarn_original_max_position_embeddings"] or 4096,
            beta_fast=now["yarn_beta_fast"] or 32.0,
            beta_slow=now["yarn_beta_slow"] or 1.0,
        )
        if now["yarn_correction_range_round_to_int"] is False:
            rope["truncate"] = False
        scales = 1.0 if now["mscale"] is None else now["mscale"], now["mscale_all_dim"] or 0.0
        if all(scales):
            rope["mscale"], rope["mscale_all_dim"] = scales
        elif scales != (1.0, 0.0):
            raise ConfigError(
                f"mscale and mscale_all_dim of the checkpoint are {scales[0]:g} and {scales[1]:g}; "
                "transformers ignores them unless both are given"
            )
    elif scaled:
        rope |= dict(rope_type="llama3", factor=factor, **LLAMA3)
    config = dict(config)
    config.pop(ORIGINAL, None)
    if "rope_parameters" in config:
        config["rope_parameters"] = rope
        config.pop("rope_scaling", None)  # transformers would prefer it
        if "rope_theta" in config:
            config["rope_theta"] = rope["rope_theta"]
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if now["max_position_embeddings"]:
        config["max_position_embeddings"] = now["max_position_embeddings"]
    return config


def rope_of(config: dict) -> dict:
    """What a config.json says of rotary positions, without null fields; for comparison and for people."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    found = {"rope_type": "default", **rope, "rope_theta": theta}
    return {name: value for name, value in found.items() if value is not None}
