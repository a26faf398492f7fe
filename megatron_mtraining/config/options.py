# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The table of options: the flat name of each setting, its type, and its help text.

The command line (``--mtraining-NAME``, underscores become hyphens), settings files, and docs/options.md are
made from :data:`OPTIONS`. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigError
from .policies import (
    POLICIES,
    SAMPLINGS,
    TARGET_SCOPES,
    FixedPolicy,
    LastRowsSampling,
    MobaPolicy,
    Policy,
    PricePolicy,
    Sampling,
    StratifiedSampling,
    XAttentionPolicy,
)
from .schedule import EXTENSIONS, NAMED, SCHEDULES
from .validation import check_choice, check_type, option

BATCHING = ("off", "length", "cost")
TUNING = ("off", "on")
Section = type[Policy] | type[Sampling]
"""A dataclass of policies.py."""
Values = dict[str, Any]
"""Options by flat name. What type a value has is in the table: ``check_type`` looks."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: the flat name, as in settings files; ``flag`` is the one of the command line.
        type: of its value.
        help: what it does. The first sentence alone is :attr:`summary`.
        sections: the policies or samplings that have it; empty for a field of :class:`~.MTrainingConfig`.
        field: its name there.
        choices: values it can have; empty for any of the type.
        common: whether the short help shows it.
        metavar: its value in help texts, if the type does not say it.
        default_help: the default in words, if it is not the default of the first section's field.
    """

    name: str
    type: type
    help: str
    sections: tuple[Section, ...] = ()
    field: str = ""
    choices: tuple[str, ...] = ()
    common: bool = False
    default_help: str = ""
    metavar: str = ""

    @property
    def flag(self) -> str:
        """The option of the command line."""
        return option(self.name)

    @property
    def field_name(self) -> str:
        """Its name in the dataclass."""
        return self.field or self.name

    @property
    def default(self) -> str:
        """The default, in words."""
        if self.default_help:
            return self.default_help
        return str(getattr(self.sections[0], self.field_name))

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that have it; empty for an option of all policies."""
        return tuple(name for name, policy in POLICIES.items() if policy in self.sections)

    @property
    def summary(self) -> str:
        """The first sentence of the help text."""
        first = self.help.split(". ")[0]
        return first if first.endswith(".") else first + "."

    @property
    def full_help(self) -> str:
        """The help text with the policies that have the option, and the default."""
        of = ""
        if self.policies:
            of = f"{'Policy' if len(self.policies) == 1 else 'Policies'} {', '.join(self.policies)}: "
        return f"{of}{self.help} (default: {self.default})"


OPTIONS = (
    Option(
        "policy", str,
        "How the pattern of each head is selected. price: columns and slashes by attention mass per unit of "
        "cost, with one threshold for all heads; fixed: fixed numbers of columns and diagonals per head. "
        "These select by queries of the whole sequence: later tokens can change which earlier keys a query "
        "attends to. xattention, moba: key blocks for each query block, by antidiagonal scores (arXiv "
        "2503.16428) or by mean keys (arXiv 2502.13189) of the block before: later tokens change nothing.",
        choices=tuple(POLICIES), common=True,
        default_help="price; fixed if --mtraining-vertical or --mtraining-slash is given",
    ),
    Option(
        "price", float,
        "Threshold of attention mass per unit of cost. A slash or column is selected if its share of the "
        "attention (mass) over its share of the causal query-key pairs (cost) is at least this. Higher is "
        "sparser; 0 is dense attention, and takes no caps.",
        (PricePolicy,), common=True,
    ),
    Option(
        "vertical", int,
        "Key columns per head, including sink columns. The sequence length is dense attention.",
        (FixedPolicy,), common=True,
    ),
    Option(
        "slash", int,
        "Token diagonals per head, in addition to the local window. The sequence length ('all' on the "
        "command line) is dense attention.",
        (FixedPolicy,), common=True,
    ),
    Option(
        "vertical_cap", int,
        "Maximum number of columns per head, including sink columns.",
        (PricePolicy,),
    ),
    Option(
        "slash_cap", int,
        "Maximum number of slashes (block distances) per head, in addition to the local window.",
        (PricePolicy,), default_help="no limit",
    ),
    Option(
        "block_stride", int,
        "Tokens along an antidiagonal that share one score. Divides the block size.",
        (XAttentionPolicy,), "stride",
    ),
    Option(
        "block_threshold", float,
        "Share of each query block's scored attention that its key blocks must hold. 1 is dense attention.",
        (XAttentionPolicy,), "threshold",
    ),
    Option(
        "block_top_k", int,
        "Key blocks per query block, in addition to the local window and the sink.",
        (MobaPolicy,), "top_k",
    ),
    Option(
        "block_lookahead", bool,
        "LOOKS AHEAD: a query block's own queries select its key blocks, as published, in place of the "
        "queries of the block before it. Each query then sees what later queries of its block ask for, so "
        "outputs, losses and training depend on up to a block of later tokens. To compare with published "
        "methods.",
        (XAttentionPolicy, MobaPolicy), "lookahead", default_help="off",
    ),
    Option(
        "window", int,
        "Tokens before each query that are always selected. Rounded up to whole blocks.",
        common=True, default_help="128",
    ),
    Option(
        "sink", int,
        "First tokens of the sequence that are always selected as columns.",
        default_help="4",
    ),
    Option(
        "block_size", int,
        "Tokens in a block: the granularity of slashes and of the striped layout. 64 or 128.",
        default_help="128",
    ),
    Option(
        "estimator", str,
        "Query rows that the pattern is estimated from. strata: a few rows in each of many equal ranges of "
        "the sequence; last: the last rows, as published.",
        field="sampling", choices=tuple(SAMPLINGS), default_help="strata",
    ),
    Option(
        "sample_strata", int,
        "Estimator strata: number of equal ranges of the sequence that rows are sampled from.",
        (StratifiedSampling,), "strata",
    ),
    Option(
        "sample_rows", int,
        "Query rows sampled in each stratum; with estimator last, the total number.",
        (StratifiedSampling, LastRowsSampling), "rows",
        default_help="2; 64 with estimator last",
    ),
    Option(
        "held_out_rows", int,
        "Estimator strata: sampled rows of each stratum that measure recall and do not select the pattern. "
        "With 0, recall is measured on the rows that select, and is too high.",
        (StratifiedSampling,), default_help="half of the sampled rows",
    ),
    Option(
        "target_recall", float,
        "Recall to keep by moving the price from step to step. Recall is the share of the attention that the "
        "pattern holds, measured on held-out rows that see keys beyond window and sinks: of each head, or "
        "the mean over layers and heads (--mtraining-target-scope).",
        (PricePolicy,), common=True, default_help="off: the price is fixed",
    ),
    Option(
        "target_scope", str,
        "With --mtraining-target-recall: head moves the price of each head, model moves one price for all "
        "heads.",
        (PricePolicy,), choices=TARGET_SCOPES, default_help="head",
    ),
    Option(
        "schedule", str,
        "Prices over the run, such as anneal or 0:1.2,0.9:0. "
        + "".join(f"{name} is {points}. " for name, points in NAMED["schedule"].items()) +
        "Points are SHARE:PRICE: from each share of the run on the price is that of the point, and between "
        "points it changes geometrically; 0 at the last point is dense attention from there to the end. The "
        "share is of --train-samples, or of --train-iters.",
        (PricePolicy,), common=True, default_help="off: one price for the whole run", metavar="POINTS",
    ),
    Option(
        "target_schedule", str,
        "Target recalls over the run, in place of --mtraining-target-recall: points SHARE:RECALL as in "
        "--mtraining-schedule, such as 0:0.8,0.9:0.95,0.9:1. What may be lost changes geometrically; 1 at "
        "the last point is dense attention.",
        (PricePolicy,), default_help="off: one target for the whole run", metavar="POINTS",
    ),
    Option(
        "schedule_extension", str,
        "What a schedule does if a run goes on from a checkpoint with another length (--train-iters or "
        "--train-samples) than it was saved with. continue: shares are of the whole new length, so that a "
        "finished run that is made longer becomes sparse again; restart: the schedule begins again at the "
        "checkpoint. Without it such a run is refused.",
        (PricePolicy,), choices=EXTENSIONS, default_help="none",
    ),
    Option(
        "settings", str,
        "JSON or YAML file of settings, also by layer and head. Either "
        '{"price": 0.3, "layers": {"0": {"dense": true}, "7": {"heads": {"3": {"dense": true}}}}}'
        ", with the names of these options, or a best-pattern file in MInference's format (entries "
        "vertical_and_slash).",
        common=True, default_help="none",
    ),
    Option(
        "gathered_ranks", int,
        "Size of the inner groups, whose ranks gather one another's keys. At most the context-parallel ranks "
        "of a host, which are its GPUs / --tensor-model-parallel-size. Larger groups usually take less time. "
        "One group of all ranks takes the least memory if the model has 8 or more query heads per KV head; "
        "several groups of more than one rank take more than a plain ring, which is 1. 0 uses the inner size "
        "of --hierarchical-context-parallel-sizes or, without it, the largest divisor of "
        "--context-parallel-size up to 8.",
        common=True, default_help="0",
    ),
    Option(
        "recompute_attention", bool,
        "Run attention again in activation recomputation, instead of saving its output: more time, less "
        "memory.",
        common=True, default_help="off",
    ),
    Option(
        "backward_threshold", float,
        "Leaves blocks with little attention out of the backward; the forward stays as it is. A block of "
        "keys is kept if some query of a query block gives it at least this many times the attention of a "
        "block under even attention over half of the sequence. 0 is the gradient of every pair in the "
        "pattern. The log line has the density of the backward, and how much attention it leaves out.",
        default_help="0.0",
    ),
    Option(
        "dense_evaluation", bool,
        "Evaluate with dense attention, as a trained model is usually served. Without it, evaluations use "
        "the pattern of the last training step.",
        default_help="off",
    ),
    Option(
        "loss_chunk", int,
        "Tokens per chunk of the output layer and the loss: the logits of one chunk exist at a time. 0 uses "
        "Megatron's own output layer and loss, with the logits of all tokens.",
        default_help="4096; 0 where Megatron's options allow no chunks",
    ),
    Option(
        "batching", str,
        "How the samples of a global batch are placed on data-parallel ranks and micro-batches. off: in "
        "Megatron's order; length: ranks get nearly equal numbers of visible query-key pairs; cost: "
        "ranks get nearly equal predicted attention time, from the times of an H200 and a running estimate "
        "of density for each kind of data. The samples of each global batch stay the same.",
        choices=BATCHING, default_help="off",
    ),
    Option(
        "tuning", str,
        "on: the price of each micro-batch moves, within bounds, to bring the predicted attention times of "
        "the data-parallel ranks together: up on slow ranks, down on idle ranks. Needs policy price.",
        choices=TUNING, default_help="off",
    ),
    Option(
        "tuning_mass", float,
        "With --mtraining-tuning on: the largest share of attention mass that tuning may add to or take from "
        "a micro-batch.",
        default_help="0.01",
    ),
)  # fmt: skip
"""Every option, in the order of help and docs."""

BY_NAME = {each.name: each for each in OPTIONS}
BALANCE = ("batching", "tuning", "tuning_mass")
"""Options that balance data-parallel ranks. They are options of a run; layers do not read them."""
MOVING = ("target_recall", "target_scope", *SCHEDULES)
"""Options that change prices from step to step, which only training does."""
SIZES = ("vertical", "slash", "vertical_cap", "slash_cap", "window", "sink")
"""Options that cannot be more than the sequence is long."""

MEGATRON_ONLY = (
    "gathered_ranks", "recompute_attention", "dense_evaluation", "loss_chunk", "batching", "tuning",
)  # fmt: skip
"""Options that only Megatron's runs read. Options of ``BALANCE`` have an effect with the last two."""


def check_known(name: str, where: str = "") -> None:
    """Raise :class:`ConfigError` if there is no such option; the message names a near one.

    Args:
        name: a flat name.
        where: where it was read; empty for the command line.
    """
    if name in BY_NAME:
        return
    near = get_close_matches(str(name), BY_NAME, 1)
    advice = f"did you mean {near[0] if where else option(near[0])}?" if near else "leave it out"
    shown = f"{where} has {name!r}, which" if where else option(name)
    raise ConfigError(f"{shown} is not a setting: {advice}")


def config_fields(options: Values) -> Values:
    """The fields of :class:`~.MTrainingConfig` that flat options make; None stands for an option left out.

    Raises:
        ConfigError: an unknown option, one of another policy, or a value that cannot work.
    """
    given: Values = {}
    for name, value in options.items():
        if value is None:
            continue
        check_known(name)
        check_type(name, value, BY_NAME[name].type)
        given[name] = value
    general = {
        name: value
        for name, value in given.items()
        if not BY_NAME[name].sections and name not in ("policy", "estimator")
    }
    return {"policy": policy_from(given), "sampling": sampling_from(given), **general}


def policy_from(given: Values) -> Policy:
    """The policy that flat options make; options of no policy are ignored.

    Raises:
        ConfigError: an unknown policy, or an option of another one than is selected.
    """
    fixed = "vertical" in given or "slash" in given
    name = given.get("policy", "fixed" if fixed else "price")
    check_choice("policy", name, POLICIES)
    section = POLICIES[name]
    values = {}
    for key, value in given.items():
        each = BY_NAME[key]
        if section in each.sections:
            values[each.field_name] = value
        elif each.policies:
            raise ConfigError(
                f"{option(key)} is {value}, but {option('policy')} is {name}, which has no such setting: "
                f"leave it out or use {option('policy')} {each.policies[0]}"
            )
    return section(**values)


def sampling_from(given: Values) -> Sampling:
    """The sampling that flat options make; options of no sampling are ignored.

    Raises:
        ConfigError: an unknown estimator, or an option of the other one.
    """
    name = given.get("estimator", "strata")
    check_choice("estimator", name, SAMPLINGS)
    section = SAMPLINGS[name]
    values = {}
    for key, value in given.items():
        each = BY_NAME[key]
        if section in each.sections:
            values[each.field_name] = value
        elif StratifiedSampling in each.sections and value != {"sample_strata": 1}.get(key, 0):
            has = "no strata" if key == "sample_strata" else "no held-out rows"
            raise ConfigError(
                f"{option(key)} is {value}, but {option('estimator')} {name} has {has}: remove {option(key)}"
            )
    return section(**values)


def policy_values(policy: Policy) -> Values:
    """The flat options of a policy, its name too."""
    own = {each.name: each.field_name for each in OPTIONS if type(policy) in each.sections}
    return {
        "policy": policy.name,
        **{name: getattr(policy, field_name) for name, field_name in own.items()},
    }
