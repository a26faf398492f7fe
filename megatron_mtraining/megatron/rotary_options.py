# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Context extension by Megatron's own options: those that it would ignore are refused.

A forgotten ``--position-embedding-type yarn`` trains without error, on positions that the model has
never seen. RoPE's table for either kind is :mod:`.rotary_embedding`'s.
"""

from __future__ import annotations

from ..config import ConfigError
from .checks import show

OF_YARN = {
    "rotary_scaling_factor": 1.0,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": None,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""Options that Megatron-LM reads with YaRN only, and their defaults there."""
OF_ROPE = {
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "rotary_percent": 1.0,
}
"""Options that Megatron-LM reads with RoPE only, and their defaults there."""
OF_BOTH = {"rotary_base": 10000}
"""Options that it reads with RoPE and YaRN, and their defaults."""
SCALING = {"rope_scaling_factor": 8.0}
"""Options that it reads with ``--use-rope-scaling`` only, and their defaults."""


def check_rotary_options(args) -> str | None:
    """Refuse scalings of rotary positions that the chosen kind of position embedding ignores.

    Args:
        args: Megatron-LM's arguments.

    Returns:
        A warning, if a sample is longer than what YaRN is told to extend to.

    Raises:
        ConfigError: names the option and what to do.
    """
    kind = getattr(args, "position_embedding_type", None)
    if getattr(args, "use_rotary_position_embeddings", False):
        kind = "rope"  # Megatron's validation sets it, after ours
    yarn = kind == "yarn"
    ignored = dict.fromkeys(OF_YARN, "yarn") if not yarn else {}
    if kind is not None and kind != "rope":
        ignored |= dict.fromkeys(OF_ROPE, "rope")
    if kind not in (None, "rope", "yarn"):
        ignored |= dict.fromkeys(OF_BOTH, "rope")
    defaults = OF_YARN | OF_ROPE | OF_BOTH
    for name, reader in ignored.items():
        value, default = getattr(args, name, defaults[name]), defaults[name]
        if value in (None, default):
            continue
        advice = f"leave it out, or use --position-embedding-type {reader}"
        option = "--" + name.replace("_", "-")
        if name == "yarn_correction_range_round_to_int" and not value:
            option = "--no-yarn-correction-range-round-to-int"
        given = option if isinstance(value, bool) else f"{option} {show(value)}"
        raise ConfigError(
            f"{given} is given, but --position-embedding-type is {kind}, which ignores it: {advice}"
        )
    _check_scaling(args, yarn)
    factor = getattr(args, "rotary_scaling_factor", None)
    if not yarn or factor is None or not hasattr(args, "yarn_original_max_position_embeddings"):
        return None
    original = args.yarn_original_max_position_embeddings or 4096  # Megatron's default
    if args.seq_length is None or args.seq_length <= factor * original:
        return None
    return (
        f"--seq-length is {args.seq_length}, but YaRN extends {original} positions "
        f"(--yarn-original-max-position-embeddings) {factor:g} times (--rotary-scaling-factor), to "
        f"{factor * original:g}: later positions are outside of what the model was made for"
    )


def _check_scaling(args, yarn: bool) -> None:
    """Raise :class:`ConfigError` for a factor of RoPE's scaling without that."""
    if getattr(args, "use_rope_scaling", False):
        return
    for name, default in SCALING.items():
        value = getattr(args, name, default)
        if value not in (None, default):
            option = "--" + name.replace("_", "-")
            other = "use --rotary-scaling-factor" if yarn else "add --use-rope-scaling"
            raise ConfigError(
                f"{option} {show(value)} is given without --use-rope-scaling, and ignored: leave it out, or "
                f"{other}"
            )
