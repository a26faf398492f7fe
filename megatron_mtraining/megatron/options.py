# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options ``--mtraining-*`` of Megatron's command line, from :data:`~megatron_mtraining.config.OPTIONS`.

``--help`` shows the common ones, ``--mtraining-help-all`` all of them. An option that is not given is not in
the arguments: it must be told from one that is given without the backend.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from ..config import OPTIONS, ConfigError, MTrainingConfig, Option
from ..config.options import config_fields

ALL = "all"
TITLE = "mtraining"
DESCRIPTION = "Dynamic sparse ring attention, with --attention-backend mtraining."
METAVARS = {int: "N", float: "X", str: "FILE"}
FILLED_IN = "mtraining_filled_in"
"""The argument that says that all options have values, with what a settings file has."""


def attribute(name: str) -> str:
    """Where Megatron's arguments hold an option."""
    return "mtraining_" + name


def add_arguments(
    parser: argparse.ArgumentParser, description: str = DESCRIPTION, without: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Add the group "mtraining" to a parser and return the parser.

    Args:
        without: options that are parsed, but that no help names; the caller refuses them.
    """
    group = parser.add_argument_group(title=TITLE, description=description)
    for each in OPTIONS:
        shown = each.common and each.name not in without
        _add_option(group, each, each.summary if shown else argparse.SUPPRESS)
    group.add_argument(
        "--mtraining-help-all",
        action=_HelpAll,
        const=[each for each in OPTIONS if each.name not in without],
        nargs=0,
        default=argparse.SUPPRESS,
        help="Show all options of mtraining, in full, and exit.",
    )
    return parser


def _add_option(group, each: Option, text: str) -> None:
    how = {"type": each.type, "metavar": each.metavar or METAVARS.get(each.type)}
    if each.type is bool:
        how = {"action": "store_true"}
    elif each.name == "slash":
        how = {"type": _size_or_all, "metavar": f"N|{ALL}"}
    elif each.choices:
        how = {"choices": each.choices}
    group.add_argument(
        each.flag, dest=attribute(each.name), default=argparse.SUPPRESS, help=text, **how
    )


def _size_or_all(text: str) -> int | str:
    return text if text == ALL else int(text)


_size_or_all.__name__ = f"whole number (or '{ALL}')"


class _HelpAll(argparse.Action):
    """Prints the options in ``const`` with their whole help texts."""

    def __call__(self, parser, namespace, values, option_string=None):
        only = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
        group = only.add_argument_group(title=TITLE, description=DESCRIPTION)
        for each in self.const:
            _add_option(group, each, each.full_help.replace("%", "%%"))
        only.print_help()
        parser.exit()


def batch_of(args) -> tuple[int | None, int]:
    """Tokens of a sequence, None if nothing says, and sequences of a micro-batch, as attention has them."""
    length = getattr(args, "seq_length", None) or getattr(args, "encoder_seq_length", None)
    batch = getattr(args, "micro_batch_size", None) or 1
    if length is not None and getattr(args, "dataloader_inter_document_masking", False):
        return length * batch, 1  # they become documents of one sequence
    return length, batch


def config_from_args(args) -> MTrainingConfig:
    """The settings in Megatron's arguments, whether filled in yet or not.

    Filled-in arguments hold the content of the settings file, which is not read again: it may change during a
    run.
    """
    seq_length, _ = batch_of(args)
    values = {}
    for each in OPTIONS:
        value = getattr(args, attribute(each.name), None)
        if value == ALL:
            if seq_length is None:
                raise ConfigError(f"{each.flag} {ALL} needs --seq-length")
            value = seq_length
        if value is not None:
            values[each.name] = value
    if getattr(args, FILLED_IN, False):
        return _filled_in(tuple(values.items()))
    if seq_length is None:
        return MTrainingConfig.from_options(**values)
    return MTrainingConfig.for_sequence(seq_length, **values)


@lru_cache(maxsize=8, typed=True)
def _filled_in(values: tuple[tuple[str, Any], ...]) -> MTrainingConfig:
    """Made once: every micro-batch and layer asks for it."""
    return MTrainingConfig(**config_fields(dict(values)))
