# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rotary positions in config.json and in Megatron's arguments, one as the other."""

from __future__ import annotations

import math
from pathlib import Path

from ...config import ConfigError
from .fields import ROPE, check_types, take

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's --use-rope-scaling has built in."""
NAMES = (
    "position_embedding_type", "rotary_base", "rotary_percent", "max_position_embeddings",
    "use_rope_scaling", "rope_scaling_factor", "rotary_scaling_factor",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim",
)  # fmt: skip
"""Megatron's arguments about positions."""


DEFAULT_BASE = 10000.0
"""transformers' rope_theta where config.json has none (Llama 2's), in all families that convert."""


def rope_of(config: dict, file: Path) -> dict:
    """What a config.json says of RoPE, in transformers' newer form: rope_type, rope_theta and others.

    Raises:
        ConfigError: a field is of another type than it must be.
    """
    check_types(config, file)
    # Of both, transformers takes the older one.
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(field) or {})
    check_types(rope, file, ROPE, field)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta", DEFAULT_BASE))
    return rope


def arguments_of(config: dict, file: Path) -> dict:
    """Megatron's arguments for a config.json's positions.

    Raises:
        ConfigError: names the file, the field and its value.
    """
    rope = rope_of(config, file)
    kind, base = rope.pop("rope_type"), rope.pop("rope_theta")
    length = take(config, "max_position_embeddings", file)
    if base != int(base):
        raise ConfigError(
            f"{file}: rope_theta is {base}: Megatron's --rotary-base is a whole number"
        )
    rotated = rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")
    if any(part not in (None, 1.0) for part in rotated):
        raise ConfigError(f"{file}: partial_rotary_factor is not 1: heads that are rotated in part")
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
                    f"{file}: {field} of rope type llama3 is not {value:g}, the only value that Megatron's "
                    "--use-rope-scaling knows"
                )
        found |= dict(use_rope_scaling=True, rope_scaling_factor=_factor(rope, file))
    elif kind == "yarn":
        factor = _factor(rope, file)
        original = rope.pop("original_max_position_embeddings", None) or length
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        attention = rope.pop("attention_factor", None)
        if attention is not None and abs(attention - usual) > 1e-6:
            raise ConfigError(
                f"{file}: attention_factor of rope type yarn is {attention}, where Megatron takes {usual:g}"
            )
        found |= dict(
            position_embedding_type="yarn",
            rotary_scaling_factor=factor,
            yarn_original_max_position_embeddings=original,
            yarn_beta_fast=float(rope.pop("beta_fast", None) or 32),
            yarn_beta_slow=float(rope.pop("beta_slow", None) or 1),
            yarn_correction_range_round_to_int=bool(rope.pop("truncate", True)),
            max_position_embeddings=max(length, int(factor * original)),
        )
        scales = [rope.pop(name, None) for name in ("mscale", "mscale_all_dim")]
        # transformers reads these only where both are given and not 0.
        found |= dict(zip(("mscale", "mscale_all_dim"), scales if all(scales) else (1.0, 0.0)))
    elif kind != "default":
        raise ConfigError(
            f"{file}: rope_type is {kind}: default, yarn and llama3 can be expressed in Megatron"
        )
    if kind == "default":  # transformers carries a few fields along
        rope = {
            k: v for k, v in rope.items() if k not in ("original_max_position_embeddings", "factor")
        }
    if rope:
        name, value = next(iter(rope.items()))
        raise ConfigError(
            f"{file}: {name} of rope type {kind} is {value}: Megatron does not know it"
        )
    return found


def _factor(rope: dict, file: Path) -> float:
    factor = rope.pop("factor", None)
    if factor is None:
        raise ConfigError(f"{file}: the scaling of RoPE has no factor")
    return float(factor)


def extended(found: dict, base: int | None, yarn: float | None, length: int | None) -> dict:
    """The arguments with a longer context, as the command line asks for it.

    Args:
        found: of :func:`arguments_of`.
        base: another RoPE base, or None.
        yarn: how many times as far YaRN takes the model's positions, or None.
        length: another number of positions, or None.

    Raises:
        ConfigError: the model's positions are scaled already.
    """
    found = dict(found)
    if base is not None:
        found["rotary_base"] = base
    if yarn is not None:
        scaled = found["position_embedding_type"] == "yarn" or found["use_rope_scaling"]
        if scaled:
            raise ConfigError(
                f"--yarn is {yarn:g}, but SRC scales its rotary positions: leave it out"
            )
        original = found["max_position_embeddings"]
        found |= dict(
            position_embedding_type="yarn",
            rotary_scaling_factor=float(yarn),
            yarn_original_max_position_embeddings=original,
            yarn_beta_fast=32.0,
            yarn_beta_slow=1.0,
            yarn_correction_range_round_to_int=True,
            mscale=1.0,
            mscale_all_dim=0.0,
            max_position_embeddings=int(yarn * original),
        )
    if length is not None:
        found["max_position_embeddings"] = length
    return found


def into_config(config: dict, args, file: Path) -> dict:
    """A config.json with the positions that Megatron's arguments have; unchanged where they say the same.

    Args:
        config: of the original model.
        args: of the checkpoint, with Megatron's names.
        file: config.json's path, for messages.

    Raises:
        ConfigError: the arguments have positions that config.json cannot express.
    """
    theirs = arguments_of(config, file)
    ours = {name: getattr(args, name, None) for name in NAMES}
    kind = ours["position_embedding_type"]
    if kind not in ("rope", "yarn"):
        raise ConfigError(
            f"position_embedding_type of the checkpoint is {kind}: rope and yarn convert"
        )
    if ours["rotary_percent"] not in (None, 1.0):
        raise ConfigError(
            f"rotary_percent of the checkpoint is {ours['rotary_percent']}: 1 can be converted"
        )
    if getattr(args, "rotary_seq_len_interpolation_factor", None) not in (None, 1):
        raise ConfigError(
            "rotary_seq_len_interpolation_factor of the checkpoint is "
            f"{args.rotary_seq_len_interpolation_factor}: leave it out"
        )
    # What a run's arguments do not say, or say of a scaling that is off, is as it was.
    off = set()
    if kind == "rope":
        off |= {name for name in NAMES if name.startswith(("yarn_", "mscale"))}
        off.add("rotary_scaling_factor")
    if not ours["use_rope_scaling"]:
        off.add("rope_scaling_factor")
    same = all(
        theirs.get(name) == value or (name == "use_rope_scaling" and not value and not theirs[name])
        for name, value in ours.items()
        if name not in off and value is not None
    )
    if same:
        return config
    rope = {
        "rope_type": "default",
        "rope_theta": float(ours["rotary_base"] or theirs["rotary_base"]),
    }
    if kind == "yarn":
        factor, original = (
            ours["rotary_scaling_factor"],
            ours["yarn_original_max_position_embeddings"],
        )
        rope |= dict(rope_type="yarn", factor=factor or 1.0)
        rope["original_max_position_embeddings"] = original or 4096  # Megatron's default
        rope["beta_fast"] = ours["yarn_beta_fast"] or 32.0
        rope["beta_slow"] = ours["yarn_beta_slow"] or 1.0
        if ours["yarn_correction_range_round_to_int"] is False:
            rope["truncate"] = False
        both = ours["mscale"] or 1.0, ours["mscale_all_dim"] or 0.0
        if all(both):
            rope["mscale"], rope["mscale_all_dim"] = both
        elif both != (1.0, 0.0):
            raise ConfigError(
                f"mscale and mscale_all_dim of the checkpoint are {both[0]:g} and {both[1]:g}, which "
                "transformers ignores unless both are given"
            )
    elif ours["use_rope_scaling"]:
        rope |= dict(rope_type="llama3", factor=ours["rope_scaling_factor"] or 8.0, **LLAMA3)
    config = dict(config)
    if "rope_parameters" in config:
        config["rope_parameters"] = rope
        config.pop("rope_scaling", None)  # it would be taken instead
        if "rope_theta" in config:
            config["rope_theta"] = rope["rope_theta"]
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if ours["max_position_embeddings"]:
        config["max_position_embeddings"] = ours["max_position_embeddings"]
    return config
