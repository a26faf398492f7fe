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
NOT_OF_YARN = {
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "rotary_percent": 1.0,
}
"""Options that Megatron's YaRN does not read, and their defaults."""


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
    yarn = kind == "yarn"
    for name, default in (NOT_OF_YARN if yarn else OF_YARN).items():
        value = getattr(args, name, default)
        if value in (None, default):
            continue
        advice = f"leave it out, or use --position-embedding-type {'rope' if yarn else 'yarn'}"
        option = "--" + name.replace("_", "-")
        if name == "yarn_correction_range_round_to_int" and not value:
            option = "--no-yarn-correction-range-round-to-int"
        given = option if isinstance(value, bool) else f"{option} {show(value)}"
        raise ConfigError(
            f"{given} is given, but --position-embedding-type is {kind}, which ignores it: {advice}"
        )
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
