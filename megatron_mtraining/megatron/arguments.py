# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's arguments in a run: refused before its validation, filled in after it, and read by layers.

Arguments hold plain values: they are pickled into checkpoints, which must stay readable without this package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from ..config import (
    OPTIONS,
    ConfigError,
    MTrainingConfig,
    check_settings_file,
    lookahead_warning,
    option,
    sets_every_head,
)
from ..kernels.limits import LIBRARY_HEAD_DIM
from ..ring.pruning import check_entries
from ..switches import SWITCHES, given_switches, unknown_switches
from .backend import is_active, training_arguments
from .balance.options import check_balance, lines_of_balance
from .checks import check_settings, inner_group_size, warning_of_loss
from .document_options import check_documents, fill_in_documents
from .layer_pattern import layers_with_attention
from .loss_options import check_loss, why_not
from .options import FILLED_IN, add_arguments, attribute, batch_of, config_from_args
from .rotary_options import check_left_out, check_rotary_options
from .windows import check_window_layers, has_window
from .wrapping import EndOfRun, log, log_replaced

PER_POLICY = ("policy", *(each.name for each in OPTIONS if each.policies))
"""Options that a settings file with a policy for every head overrules."""


class ArgumentsError(ConfigError, EndOfRun):
    """A refused command line.

    Every rank raises it at the same place, before any process group exists.
    """

    prefix = "error: "


def settings(config=None) -> MTrainingConfig:
    """The settings that a layer or a model built with ``config`` runs with.

    Args:
        config: a TransformerConfig, or None.

    Returns:
        ``config.mtraining`` where the user of megatron-core has set it; else what Megatron-LM's
        command line said; else the defaults.
    """
    own = getattr(config, "mtraining", None)
    if own is not None:
        if not isinstance(own, MTrainingConfig):
            raise ConfigError(f"config.mtraining is {own!r}: set it to an MTrainingConfig")
        return own
    args = training_arguments()
    return MTrainingConfig() if args is None else config_from_args(args)


def length_of(args) -> tuple[str, int]:
    """The option that gives a run's length, and the length: what a schedule's shares are of.

    Raises:
        ConfigError: there is none.
    """
    for name in ("train_samples", "train_iters"):
        if getattr(args, name, None):
            # Megatron-LM derives the iterations from the samples.
            return "--" + name.replace("_", "-"), getattr(args, name)
    raise ConfigError(
        f"{option('schedule')} is given, but neither --train-iters nor --train-samples, so that the run has "
        "no known end: give one of them"
    )


@contextmanager
def _ending_the_run():
    """Turns a :class:`ConfigError` into one that argparse's callers expect."""
    try:
        yield
    except ArgumentsError:
        raise
    except ConfigError as error:
        raise ArgumentsError(str(error)) from None


@_ending_the_run()
def refuse(args) -> None:
    """Refuse what cannot run, before Megatron's own validation, so that our message comes first.

    Raises:
        ArgumentsError: names the option, its value and what to do.
    """
    if is_active(args):
        given_switches()
        _check_settings_alone(args)
        _checked(args)
        return
    for each in OPTIONS:
        value = getattr(args, attribute(each.name), None)
        if value is None:
            continue
        given = each.flag if value is True else f"{each.flag} {value}"
        backend = getattr(args.attention_backend, "name", args.attention_backend)
        raise ConfigError(
            f"{given} is given, but the attention backend is {backend or 'not chosen'}: add "
            f"--attention-backend mtraining or leave {each.flag} out"
        )


@_ending_the_run()
def fill_in(args) -> list[str]:
    """Fill in defaults, and the options of Megatron's that follow, after its validation.

    Refuses what Megatron has derived, too.

    Returns:
        Lines for the log of the run.

    Raises:
        ArgumentsError: as :func:`refuse`.
    """
    if not is_active(args):
        return []
    config, warning = _checked(args)
    values = config.options()
    if config.settings is not None and sets_every_head(config.settings):
        values = {name: value for name, value in values.items() if name not in PER_POLICY}
    for name, value in values.items():
        setattr(args, attribute(name), value)
    setattr(args, FILLED_IN, True)
    given = " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    lines = [f"settings: {given}", *_lines_of_switches(args)]
    ahead = lookahead_warning(config, getattr(args, "num_layers", None), args.num_attention_heads)
    lines += [f"warning: {each}" for each in (warning, ahead, warning_of_loss(args)) if each]
    if config.recompute_attention and getattr(args, "recompute_granularity", None) is None:
        lines.append(
            f"warning: {option('recompute_attention')} has no effect, as nothing is recomputed: give "
            "--recompute-granularity, or leave it out"
        )
    lines += fill_in_documents(args)
    lines += lines_of_balance(args, config)
    chunked = config.loss_chunk != 0 and why_not(args, command_line=True) is None
    if chunked and getattr(args, "cross_entropy_loss_fusion", False):
        lines.append(
            "the loss is computed in chunks of tokens: Megatron's own (--cross-entropy-loss-fusion) is "
            "not used; with --mtraining-loss-chunk 0 it would be"
        )
    if getattr(args, "create_attention_mask_in_dataloader", False):
        args.create_attention_mask_in_dataloader = False
        lines.append(
            "attention is causal by itself: the data loader makes no [sequence, sequence] mask (as with "
            "--no-create-attention-mask-in-dataloader)"
        )
    return lines


def _lines_of_switches(args) -> list[str]:
    """What the environment chooses, and whether a library for dense attention can be used."""
    given = given_switches()
    lines = [
        f"warning: {name} in the environment is not one of {', '.join(SWITCHES)}, and is not used"
        for name in unknown_switches()
    ]
    if not given:
        return lines
    lines += [f"environment: {' '.join(f'{name}={value}' for name, value in given.items())}"]
    library = given.get("MTRAINING_DENSE", "own")
    if library != "own":
        limits = {
            f"--context-parallel-size {args.context_parallel_size}": args.context_parallel_size > 1,
            "--deterministic-mode": getattr(args, "deterministic_mode", False),
            f"heads of dimension {args.kv_channels}": (args.kv_channels or 0) > LIBRARY_HEAD_DIM,
        }
        lines += [
            f"warning: with {what}, MTRAINING_DENSE={library} is not used"
            for what, is_in_the_way in limits.items()
            if is_in_the_way
        ]
    return lines


def _checked(args) -> tuple[MTrainingConfig, str | None]:
    """The settings, and a warning, of arguments that can run."""
    check_settings(args, command_line=True)
    check_documents(args)
    warning = check_rotary_options(args)
    config = config_from_args(args)
    check_loss(args, config.loss_chunk, command_line=True)
    if config.steps is not None and hasattr(args, "train_iters"):
        length_of(args)  # a plan of memory has none
    seq_length, batch = batch_of(args)
    layers, heads = getattr(args, "num_layers", None), args.num_attention_heads
    check_settings_file(config, layers, heads, _layers_with_pattern(args) if layers else None)
    size = args.context_parallel_size
    inner = inner_group_size(args, size, config.gathered_ranks, command_line=True)
    if seq_length is not None:
        config.check_sequence(seq_length, size, inner)
        if config.backward_threshold and heads:
            # Megatron's validation, which is yet to come, refuses sizes that do not divide.
            tensor = getattr(args, "tensor_model_parallel_size", None) or 1
            own = max(heads // tensor, 1)
            check_entries(own, batch, seq_length // size, config.block_size, size, inner)
        check_balance(args, config)
    return config, warning


def _layers_with_pattern(args) -> list[int]:
    """Numbers, from 0, of the layers of attention without a sliding window.

    Raises:
        ConfigError: there are none.
    """
    check_window_layers(args, command_line=True)
    found = [layer for layer in layers_with_attention(args) if not has_window(args, layer)]
    if not found:
        raise ConfigError(
            f"--window-size is {args.window_size}, and all layers of attention have this window, so that "
            "none has a pattern: give --window-attn-skip-freq, or use another attention backend"
        )
    return found


def _check_settings_alone(args) -> None:
    """Refuse options that a settings file with a policy for every head overrules."""
    path = getattr(args, attribute("settings"), None)
    if path is None or not sets_every_head(path):
        return
    for name in PER_POLICY:
        value = getattr(args, attribute(name), None)
        if value is not None:
            raise ConfigError(
                f"{option(name)} is {value}, but {option('settings')} {path} has the policies of all heads: "
                "leave one of them out"
            )


def wrap_add_megatron_arguments(original):
    """``add_megatron_arguments`` with the ``--mtraining-*`` options."""

    def add_megatron_arguments(parser):
        parser = original(parser)
        for action in parser._actions:
            if "--attention-backend" in action.option_strings and callable(action.type):
                action.type = _named(action.type)
        return add_arguments(parser)

    return add_megatron_arguments


def _named(member: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of an argument that looks up a member of an enum by its name. Megatron's own ends in a KeyError,
    which argparse does not catch, of a name that there is not, such as "mtraning"."""

    def named(name: str) -> Any:
        try:
            return member(name)
        except KeyError:
            raise argparse.ArgumentTypeError(f"{name!r} is no attention backend") from None

    return named


def wrap_validate_args(original):
    """``validate_args`` between :func:`refuse` and :func:`fill_in`."""

    def validate_args(args, *others, **named):
        refuse(args)
        result = original(args, *others, **named)
        args = args if result is None else result
        if is_active(args):
            log_replaced()
        for line in fill_in(args):
            log(line)
        return result

    return validate_args


def wrap_load_args_from_checkpoint(original):
    """``load_args_from_checkpoint`` (``--use-checkpoint-args``) that refuses to leave positions out."""

    def load_args_from_checkpoint(args, *others, **named):
        found = original(args, *others, **named)
        if is_active(args) and isinstance(found, tuple):  # there is a checkpoint
            with _ending_the_run():
                check_left_out(*found)
        return found

    return load_args_from_checkpoint


def wrap_parse_args(original):
    """``parse_args`` that refuses ``--yaml-cfg`` with our options."""

    def parse_args(*others, **named):
        words = [word.split("=")[0] for word in sys.argv[1:]]
        ours = [word for word in words if word.startswith("--mtraining-")]
        if ours and "--yaml-cfg" in words:
            raise ArgumentsError(
                f"{ours[0]} cannot be used with --yaml-cfg, which replaces the command line: give "
                "the settings on the command line instead"
            )
        return original(*others, **named)

    return parse_args
