# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Context extension by Megatron's own options: those that it would ignore are refused, or passed on.

A forgotten ``--position-embedding-type yarn`` trains without error, on positions that the model has
never seen. RoPE's table for either kind is :mod:`.rotary_embedding`'s.
"""

from __future__ import annotations

from ..config import ConfigError
from .checks import show
from .wrapping import log

ROUNDS = "yarn_correction_range_round_to_int"
OF_YARN = {
    "rotary_scaling_factor": 1.0,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    ROUNDS: None,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""Options that Megatron-LM reads with YaRN only, and their defaults there."""
UNSET = {
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    ROUNDS: True,
}
"""What its models have without options of YaRN."""
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
DROPPED = {
    "rope_scaling_factor": ("rope_scaling_factor", 8.0),
    "seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor", None),
}
"""Parameters of ``GPTModel``, with the names and defaults of their options, which Megatron-LM parses and does
not pass on: the first in no version from 0.16 to main, the second not before 0.19."""


def passed_on(name: str) -> str:
    """The argument, also in checkpoints, with the value of an option of :data:`DROPPED` that a model has."""
    return "mtraining_" + name


def dropped(given: dict, args) -> dict[str, object]:
    """The options of :data:`DROPPED` that a model would compute with and that Megatron-LM has not passed on,
    by parameter.

    Args:
        given: the arguments of a ``GPTModel``, by name.
        args: Megatron-LM's arguments, or None.
    """
    found = {}
    for parameter, (name, default) in DROPPED.items():
        value = getattr(args, name, None)
        is_read = given.get("position_embedding_type") == "rope"
        if name == "rope_scaling_factor":
            is_read = is_read and given.get("rope_scaling", False)
        lost = value not in (None, default) and given.get(parameter) in (None, default)
        if is_read and lost:
            found[parameter] = value
    return found


def pass_on(given: dict, args) -> None:
    """Give a ``GPTModel`` what Megatron-LM has dropped, and say so in the arguments, which checkpoints have.

    Args:
        given, args: as for :func:`dropped`; changed.
    """
    found = dropped(given, args)
    given |= found
    for parameter, (name, _) in DROPPED.items():
        value, mark = getattr(args, name, None), passed_on(name)
        if value is None or given.get(parameter) != value:
            continue
        if parameter in found and not hasattr(args, mark):  # a rank may have several models
            log(
                f"{_option(name)} {show(value)}: passed on to the model, which Megatron-LM does not do"
            )
        setattr(args, mark, value)


def warn_of_other_positions(args, checkpoint_args) -> None:
    """Say in the log where a run leaves out what the checkpoint's run had, or passes on what that had
    dropped: its weights were trained with other positions."""
    if missing := _left_out(args, checkpoint_args):
        log(
            f"warning: the run of the checkpoint had {missing}, and this one has not: the weights were "
            "trained with them"
        )
    for name, default in DROPPED.values():
        if hasattr(args, passed_on(name)) and not hasattr(checkpoint_args, passed_on(name)):
            log(
                f"warning: {_option(name)} is passed on to the model, but was not in the checkpoint's run: "
                f"unless the weights were converted, they were trained "
                f"{'without it' if default is None else f'with {default:g}'}; give that to go on as before"
            )


def _left_out(args, checkpoint_args) -> str:
    """The options of positions and norms that a checkpoint's run had, and this one has at their defaults."""
    kind = getattr(checkpoint_args, "position_embedding_type", None)
    read = {"yarn": OF_YARN, "rope": OF_ROPE | SCALING}.get(kind, {})
    missing = []
    for name, default in (read | {"layernorm_epsilon": 1e-5}).items():
        there, here = (getattr(each, name, None) for each in (checkpoint_args, args))
        default = UNSET.get(name, default)
        if there not in (None, default) and here in (None, default):
            missing.append(_as_given(name, there))
    return ", ".join(missing)


def check_left_out(args, checkpoint_args) -> None:
    """Refuse what ``--use-checkpoint-args`` leaves out: Megatron-LM takes a checkpoint's kind of positions
    then, but not their scaling, nor the epsilon of its norms.

    Args:
        args: Megatron-LM's arguments, with those that it has taken.

    Raises:
        ConfigError: names the options that the checkpoint's run had, and this one has not.
    """
    if missing := _left_out(args, checkpoint_args):
        raise ConfigError(
            f"the run of the checkpoint had {missing}, which --use-checkpoint-args does not take from it, so "
            "that the model would be another: give them, too (megatron_args.sh of a converted checkpoint has "
            "all options)"
        )


def warn_of_dropped(given: dict, args) -> None:
    """Say in the log of a run with another backend what Megatron-LM drops; arguments as for
    :func:`dropped`."""
    for parameter, value in dropped(given, args).items():
        name, default = DROPPED[parameter]
        log(
            f"warning: {_option(name)} is {show(value)}, which this Megatron-LM drops: the model computes "
            f"{'without it' if default is None else f'with {default:g}'}; --attention-backend mtraining "
            "passes it on"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _as_given(name: str, value) -> str:
    """An argument as a command line gives it."""
    if name == ROUNDS and not value:
        return "--no-" + ROUNDS.replace("_", "-")
    option = "--norm-epsilon" if name == "layernorm_epsilon" else _option(name)
    return option if isinstance(value, bool) else f"{option} {show(value)}"


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
        raise ConfigError(
            f"{_as_given(name, value)} is given, but --position-embedding-type is {kind}, which ignores it: "
            f"{advice}"
        )
    if getattr(args, "hybrid_layer_pattern", None) and getattr(args, "use_rope_scaling", False):
        raise ConfigError(
            "--use-rope-scaling is given with --hybrid-layer-pattern, whose HybridModel ignores it: leave it "
            "out"
        )
    _check_scaling(args, yarn)
    factor = getattr(args, "rotary_scaling_factor", None)
    name = "yarn_original_max_position_embeddings"
    if not yarn or factor is None or not hasattr(args, name):
        return None
    original = getattr(args, name) or UNSET[name]
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
            option = _option(name)
            other = "use --rotary-scaling-factor" if yarn else "add --use-rope-scaling"
            raise ConfigError(
                f"{option} {show(value)} is given without --use-rope-scaling, and ignored: leave it out, or "
                f"{other}"
            )
