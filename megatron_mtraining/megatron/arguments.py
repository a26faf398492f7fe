# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options ``--mtraining-*``: one for each field of :class:`MTrainingConfig`, and their
validation before anything is built.

Defaults are filled in after parsing: an option that was given without the backend must be told from
one that was not given. What is kept in Megatron's arguments are plain values (they are pickled
into checkpoints, which must stay readable without this package).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from dataclasses import MISSING, fields, replace
from itertools import pairwise

from ..config import (
    ESTIMATORS,
    OF_POLICY,
    POLICIES,
    SCOPES,
    SIZES,
    ConfigError,
    MTrainingConfig,
    field_types,
    option,
)
from ..pattern import Steering, check_files, settings_of_run, steering_of
from .backend import is_active, training_arguments
from .checks import check_settings, ranks_a_node
from .output import check_loss, why_not
from .packing import check_documents
from .positions import check_positions
from .wrapping import is_first_local_rank

ALL = "all"
FILLED = "mtraining_filled_in"
"""An attribute of arguments in which defaults are filled in: they look like given ones then."""
CHOICES = {"policy": POLICIES, "estimator": ESTIMATORS, "target_scope": SCOPES}


class ArgumentsError(ConfigError, SystemExit):
    """A refused command line.

    Every rank raises it at the same place, before any process group exists. Uncaught, it ends the
    process with status 1 and the message instead of a traceback, once on each node.
    """

    def __init__(self, message: str):
        ConfigError.__init__(self, message)
        self.code = f"error: {message}" if is_first_local_rank() else 1


def attribute(name: str) -> str:
    """Where Megatron's arguments hold a field."""
    return "mtraining_" + name


def help_texts() -> dict[str, str]:
    """The text under each field of :class:`MTrainingConfig`, which is its option's help."""
    try:
        source = textwrap.dedent(inspect.getsource(MTrainingConfig))
    except OSError:  # installed without sources
        return {}
    body = ast.parse(source).body[0].body
    texts = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            texts[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "mtraining" to a parser and return the parser."""
    group = parser.add_argument_group(
        title="mtraining",
        description="dynamic sparse ring attention; only with --attention-backend mtraining",
    )
    texts = help_texts()
    for field in fields(MTrainingConfig):
        default = None if field.default is MISSING else field.default
        text = texts.get(field.name, "").replace("%", "%%")
        how = {"type": field_types()[field.name]}
        if isinstance(default, bool):
            how = {"action": "store_true"}
        elif field.name == "slash":
            how = {"type": _size_or_all, "metavar": f"N|{ALL}"}
            text += f" '{ALL}' stands for the sequence length."
        elif field.name in CHOICES:
            how = {"choices": CHOICES[field.name]}
        if default is not None:
            text += f" (default: {default})"
        group.add_argument(
            option(field.name),
            dest=attribute(field.name),
            default=argparse.SUPPRESS,
            help=text,
            **how,
        )
    return parser


def _size_or_all(text: str) -> int | str:
    return text if text == ALL else int(text)


_size_or_all.__name__ = f"whole number (or '{ALL}')"


def config_from_args(args) -> MTrainingConfig:
    """The settings in Megatron's arguments, whether filled in yet or not."""
    seq_length = getattr(args, "seq_length", None) or getattr(args, "encoder_seq_length", None)
    values = {}
    for field in fields(MTrainingConfig):
        value = getattr(args, attribute(field.name), None)
        if value == ALL:
            if seq_length is None:
                raise ConfigError(f"{option(field.name)} {ALL} needs --seq-length")
            value = seq_length
        if value is not None:
            values[field.name] = value
    if "overrides" in values:
        values = {**settings_of_run(values["overrides"]), **values}
    config = MTrainingConfig(**values)
    if seq_length is None:
        return config
    # A default is cut to the sequence; what was given must fit it.
    cut = {
        name: seq_length
        for name in SIZES
        if name not in values and (getattr(config, name) or 0) > seq_length
    }
    if config.price == 0:  # which takes no cap, and needs none
        cut.pop("vertical_cap", None)
    return replace(config, **cut)


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


def run_steering(config: MTrainingConfig | None = None) -> Steering:
    """What moves the price of a run of Megatron-LM: the one that its layers share, also on a rank without.

    Args:
        config: a layer's settings; None for the command line's.
    """
    args = training_arguments()
    return steering_of(config or settings(), args.num_layers, args.num_attention_heads)


def check_arguments(args) -> None:
    """Refuse what cannot run, and fill in what was left out.

    Called before and after Megatron's own validation: before, so that our message comes first
    and the printed arguments are the ones used; after, for what Megatron derives.

    Raises:
        ArgumentsError: names the option, its value and what to do.
    """
    try:
        if not is_active(args):
            given = [
                field.name
                for field in fields(MTrainingConfig)
                if getattr(args, attribute(field.name), None) is not None
            ]
            if given:
                name = given[0]
                value = getattr(args, attribute(name))
                words = option(name) if value is True else f"{option(name)} {value}"
                backend = getattr(args.attention_backend, "name", args.attention_backend)
                raise ConfigError(
                    f"{words} is given, but the attention backend is {backend or 'not chosen'}: add "
                    f"--attention-backend mtraining or leave {option(name)} out"
                )
            return
        check_settings(args, command_line=True)
        check_documents(args)
        beyond = check_positions(args)
        _check_budgets_alone(args)
        config = config_from_args(args)
        check_loss(args, config.loss_chunk, command_line=True)
        seq_length = args.seq_length or getattr(args, "encoder_seq_length", None)
        layers, heads = getattr(args, "num_layers", None), args.num_attention_heads
        check_files(config, layers, heads, seq_length)
        size = args.context_parallel_size
        inner = ranks_a_node(args, size, config.gathered_ranks, command_line=True)
        first = not getattr(args, FILLED, False)
        if seq_length is not None:
            config.check_sequence(seq_length, size, inner)
            for field in fields(MTrainingConfig):
                setattr(args, attribute(field.name), getattr(config, field.name))
            setattr(args, FILLED, True)
        if first and beyond and getattr(args, "rank", 0) == 0:
            print(f"[mtraining] warning: {beyond}", flush=True)
        chunked = config.loss_chunk != 0 and why_not(args, command_line=True) is None
        if first and chunked and getattr(args, "cross_entropy_loss_fusion", False):
            if getattr(args, "rank", 0) == 0:
                print(
                    "[mtraining] the loss is computed in chunks of tokens: Megatron's own "
                    "(--cross-entropy-loss-fusion) is not used; --mtraining-loss-chunk 0 would",
                    flush=True,
                )
        if getattr(args, "create_attention_mask_in_dataloader", False):
            args.create_attention_mask_in_dataloader = False
            if getattr(args, "rank", 0) == 0:
                print(
                    "[mtraining] attention is causal by itself: the data loader makes no "
                    "[sequence, sequence] mask (as with --no-create-attention-mask-in-dataloader)",
                    flush=True,
                )
    except ArgumentsError:
        raise
    except ConfigError as error:
        raise ArgumentsError(str(error)) from None


def _check_budgets_alone(args) -> None:
    """A file of all heads' budgets would overrule what the command line says of them."""
    if getattr(args, attribute("budgets"), None) is None or getattr(args, FILLED, False):
        return
    for name in ("policy", *(name for known in OF_POLICY.values() for name in known)):
        value = getattr(args, attribute(name), None)
        if value is not None:
            raise ConfigError(
                f"{option(name)} is {value}, but {option('budgets')} {args.mtraining_budgets} has the "
                "budgets of all heads: leave one of them out"
            )


def wrap_add_megatron_arguments(original):
    def add_megatron_arguments(parser):
        """Adds the options of attention backend mtraining after Megatron's own: no hook of
        Megatron lets a package that is not the training script add options."""
        return add_arguments(original(parser))

    return add_megatron_arguments


def wrap_validate_args(original):
    def validate_args(args, *others, **named):
        """Refuses what cannot run with attention backend mtraining before any process group
        exists, so that all ranks stop with one message and none waits for another."""
        check_arguments(args)
        result = original(args, *others, **named)
        check_arguments(args if result is None else result)
        return result

    return validate_args


def wrap_parse_args(original):
    def parse_args(*others, **named):
        """Refuses --yaml-cfg with attention backend mtraining: Megatron replaces the whole
        command line by the file's contents then, and would drop these options unseen."""
        words = [word.split("=")[0] for word in sys.argv[1:]]
        ours = [word for word in words if word.startswith("--mtraining-")]
        if ours and "--yaml-cfg" in words:
            raise ArgumentsError(
                f"{ours[0]} cannot be used with --yaml-cfg, which replaces the command line: give "
                "the settings on the command line instead"
            )
        return original(*others, **named)

    return parse_args


WRAPPERS = {
    "add_megatron_arguments": wrap_add_megatron_arguments,
    "validate_args": wrap_validate_args,
    "parse_args": wrap_parse_args,
}
