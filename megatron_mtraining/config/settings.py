# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""All settings of the backend, validated when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..errors import ConfigError, check_whole
from .options import (
    BATCHING,
    OPTIONS,
    SIZES,
    TUNING,
    Values,
    config_fields,
)
from .policies import (
    POLICIES,
    SAMPLINGS,
    Policy,
    PricePolicy,
    Sampling,
    StratifiedSampling,
)
from .schedule import Schedule
from .settings_content import settings_of_run
from .validation import check_at_least, check_choice, check_share, check_type, option

BLOCK_SIZES = (64, 128)


@dataclass(frozen=True)
class MTrainingConfig:
    """Settings of dynamic sparse attention. :data:`.options.OPTIONS` has the option of each field.

    Attributes:
        policy: how the pattern is selected.
        sampling: query rows that the pattern is estimated from.
        window: tokens before each query that are always kept, rounded up to whole blocks.
        sink: first columns of the sequence that are always kept.
        block_size: tokens in a block: the granularity of slashes and of the striped layout.
        settings: a file of settings that differ for layers and heads (:mod:`.settings_file`).
        gathered_ranks: context-parallel ranks whose keys are gathered, the inner group; 0 for a default.
        recompute_attention: compute attention again under activation recomputation.
        backward_threshold: leave blocks without attention out of the backward (:mod:`..ring.pruning`); 0 for
            the gradient of all.
        dense_evaluation: evaluate with dense attention, whatever training attends by.
        loss_chunk: tokens whose logits exist at once; 0 for Megatron's own loss; None for a default.
        batching, tuning: whether samples are placed, and prices moved, so that data-parallel ranks have equal
            attention time; these and the following are options of the run, which layers do not read.
        tuning_mass: the bound of tuning.

    Raises:
        ConfigError: a value that cannot work; the message names its option.
    """

    policy: Policy = field(default_factory=PricePolicy)
    sampling: Sampling = field(default_factory=StratifiedSampling)
    window: int = 128
    sink: int = 4
    block_size: int = 128
    settings: str | None = None
    gathered_ranks: int = 0
    recompute_attention: bool = False
    backward_threshold: float = 0.0
    dense_evaluation: bool = False
    loss_chunk: int | None = None
    batching: str = "off"
    tuning: str = "off"
    tuning_mass: float = 0.01

    def __post_init__(self):
        for name, kind, known in (("policy", Policy, POLICIES), ("sampling", Sampling, SAMPLINGS)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                names = ", ".join(each.__name__ for each in known.values())
                raise ConfigError(f"{name} is {value!r}: give one of {names}")
        for name in ("window", "sink", "gathered_ranks"):
            check_at_least(name, getattr(self, name), 0)
        check_type("block_size", self.block_size, int)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"{option('block_size')} is {self.block_size}: use one of {BLOCK_SIZES}"
            )
        for name in ("recompute_attention", "dense_evaluation"):
            check_type(name, getattr(self, name), bool)
        check_at_least("backward_threshold", self.backward_threshold, 0, float)
        if self.settings is not None:
            check_type("settings", self.settings, str)
        if self.loss_chunk is not None:
            check_at_least("loss_chunk", self.loss_chunk, 0)
        self._check_balance()
        schedule, price = self.policy.schedule, self.policy.price
        if schedule is not None and self.settings is None and price != PricePolicy.price:
            raise _beside("schedule", schedule, "price", price)
        dense = price == 0  # whose caps are not read
        for name in ("vertical", "vertical_cap"):
            columns = getattr(self.policy, name, None)
            if columns and not dense and self.sink > columns:
                raise ConfigError(
                    f"{option('sink')} is {self.sink}, more than {option(name)} ({columns}), which "
                    f"includes the sink columns: raise {option(name)} or lower {option('sink')}"
                )
        self.policy.check_block_size(self.block_size)

    def _check_balance(self) -> None:
        check_choice("batching", self.batching, BATCHING)
        check_choice("tuning", self.tuning, TUNING)
        check_share("tuning_mass", self.tuning_mass)
        if self.tuning_mass != type(self).tuning_mass and self.tuning == "off":
            raise ConfigError(
                f"{option('tuning_mass')} is {self.tuning_mass}, but {option('tuning')} is off: use "
                f"{option('tuning')} on, or leave it out"
            )

    @property
    def predicts(self) -> bool:
        """Whether the run predicts times of attention."""
        return self.batching == "cost" or self.tuning == "on"

    @property
    def steps(self) -> Schedule | None:
        """What the price, or the target recall, is over the run; None if it stays, or no policy has one."""
        return self.policy.steps

    @property
    def balances(self) -> bool:
        """Whether the run balances its data-parallel ranks: batching or tuning is on."""
        return self.batching != "off" or self.tuning == "on"

    def check_tuning(self) -> None:
        """Raise :class:`ConfigError` if tuning is on and there is no price that it could move."""
        if self.tuning == "off":
            return
        if self.policy.price is None:
            raise ConfigError(
                f"{option('tuning')} is on, but {option('policy')} is {self.policy.name}, which has no price "
                f"to tune: use {option('policy')} price, or {option('tuning')} off"
            )
        if self.steps is not None:
            raise ConfigError(
                f"{option('tuning')} is on, but the price follows a schedule, which tuning does not support: "
                f"leave the schedule out, or use {option('tuning')} off"
            )
        if self.policy.price == 0:
            raise ConfigError(
                f"{option('tuning')} is on, but {option('price')} is 0, which is dense attention: use a "
                f"price above 0, or {option('tuning')} off"
            )

    @classmethod
    def from_options(cls, **options) -> MTrainingConfig:
        """Settings from flat option names, as on the command line: ``from_options(policy="fixed",
        vertical=500)``. An option that is left out, or None, has the value that a file (``settings``) has for
        all layers, or its default.

        Raises:
            ConfigError: an unknown option, one of another policy, a value that cannot work, or a file that
                cannot be read. A file that has another value than is given is refused where it is applied to
                a model.
        """
        merged = _with_file(options)
        for schedule, name in (("schedule", "price"), ("target_schedule", "target_recall")):
            if merged.get(schedule) is None or options.get(name) is None:
                continue
            # A file's price is what its heads' own prices are relative to.
            if options[name] != _with_file({**options, name: None}).get(name):
                raise _beside(schedule, merged[schedule], name, options[name])
        return cls(**config_fields(merged))

    @classmethod
    def for_sequence(cls, seq_length: int, **options) -> MTrainingConfig:
        """:meth:`from_options`, with defaults cut to the sequence length. Options that are given, or that a
        file has, must fit it.

        Raises:
            ConfigError: as :meth:`from_options`, or ``seq_length`` is not a number of 1 or more.
        """
        _check_length(seq_length)
        config, given = cls.from_options(**options), _with_file(options)
        flat = config.options()
        cut = {
            name: seq_length
            for name in SIZES
            if given.get(name) is None and (flat[name] or 0) > seq_length
        }
        if flat["price"] == 0:  # takes no cap, and needs none
            cut.pop("vertical_cap", None)
        return cls.from_options(**{**flat, **cut}) if cut else config

    def options(self) -> Values:
        """The inverse of :meth:`from_options`: the value of every option, None where the policy or the
        sampling has no such setting. A schedule replaces a target recall, and a price but for a file's
        own, to which the file's heads are relative."""
        values: Values = {}
        for each in OPTIONS:
            parts = [p for p in (self.policy, self.sampling) if isinstance(p, each.sections)]
            part = parts[0] if parts else None if each.sections else self
            values[each.name] = getattr(part, each.field_name, None)
        if values["schedule"] is not None and values["price"] == PricePolicy.price:
            values["price"] = None
        if values["target_schedule"] is not None:
            values["target_recall"] = None
        return {**values, "policy": self.policy.name, "estimator": self.sampling.name}

    def given(self) -> Values:
        """Every option that has a value, by the name that a user knows it by. A policy of a module of its
        own, whose settings no option has, is there as a whole."""
        found = {option(name): value for name, value in self.options().items() if value is not None}
        is_own = type(self.policy) is not POLICIES.get(self.policy.name)
        return {**found, "the policy": self.policy} if is_own else found

    def with_policy(self, policy: Policy) -> MTrainingConfig:
        """These settings with another policy.

        Raises:
            ConfigError: it does not fit them.
        """
        return self if policy == self.policy else replace(self, policy=policy)

    def dense(self) -> MTrainingConfig:
        """These settings, but keeping everything."""
        return self.with_policy(DENSE)

    def check_sequence(self, seq_length: int, cp_size: int, inner: int = 1) -> None:
        """Raise :class:`ConfigError` if a sequence of ``seq_length`` tokens cannot be laid out
        over ``cp_size`` ranks with inner groups of ``inner``, or :meth:`check_sizes` does."""
        from ..kernels.limits import MAX_BLOCKS

        check_whole(seq_length=seq_length, cp_size=cp_size, inner=inner)
        if cp_size < 1:
            raise ConfigError(f"--context-parallel-size is {cp_size}: use 1 or more")
        if inner < 1 or cp_size % inner:
            raise ConfigError(
                f"{cp_size} context-parallel ranks cannot be cut into inner groups of {inner}: use a divisor"
            )
        multiple = self.block_size * cp_size
        if seq_length <= 0 or seq_length % multiple:
            near = max(multiple, round(seq_length / multiple) * multiple)
            raise ConfigError(
                f"--seq-length is {seq_length}, which is not a multiple of {multiple} = "
                f"{option('block_size')} ({self.block_size}) x --context-parallel-size "
                f"({cp_size}): use {near}, for example"
            )
        if seq_length > MAX_BLOCKS * multiple:
            raise ConfigError(
                f"--seq-length is {seq_length}: each of {cp_size} context-parallel ranks would have more "
                f"than {MAX_BLOCKS} blocks of {self.block_size} tokens; use at least "
                f"{-(-seq_length // (MAX_BLOCKS * self.block_size))} ranks"
            )
        if seq_length > MAX_BLOCKS * self.block_size * (cp_size // inner):
            raise ConfigError(
                f"--seq-length is {seq_length}: {inner} context-parallel ranks that gather their keys would "
                f"have more than {MAX_BLOCKS} blocks of {self.block_size} tokens; use fewer: "
                f"{option('gathered_ranks')} or --hierarchical-context-parallel-sizes"
            )
        self.check_sizes(seq_length)

    @property
    def window_blocks(self) -> int:
        """Block distances that the local window takes: from the first query of a block, its farthest key is
        a block further than from the last."""
        return -(-self.window // self.block_size) + 1

    def check_sizes(self, seq_length: int) -> None:
        """Raise :class:`ConfigError` if window, sink or the policy's numbers do not fit ``seq_length``
        tokens. Caps may be larger: they are cut to the sequence."""
        _check_length(seq_length)
        for name in ("vertical", "slash", "window", "sink"):
            value = getattr(self, name, getattr(self.policy, name, None))
            if value is not None and value > seq_length:
                raise ConfigError(
                    f"{option(name)} is {value}, more than --seq-length ({seq_length}): use at most "
                    f"{seq_length}"
                )
        if not self.keeps_all(seq_length) and self.sampling.num_rows > seq_length:
            sampling = self.sampling
            strata = getattr(sampling, "strata", 1)
            raise ConfigError(
                f"{option('sample_strata')} x {option('sample_rows')} = {strata} x "
                f"{sampling.rows} rows are more than --seq-length ({seq_length})"
            )

    def keeps_all(self, seq_length: int) -> bool:
        """Whether every pair of a sequence of ``seq_length`` tokens is kept, whatever the data."""
        _check_length(seq_length)
        return self.window >= seq_length or self.policy.keeps_all(seq_length, self.block_size)


def _with_file(options: Values) -> Values:
    """Flat options, and those not given that a settings file among them has for all layers."""
    path = options.get("settings")
    if path is None:
        return options
    given = {name: value for name, value in options.items() if value is not None}
    return {**settings_of_run(path), **given}


def _beside(schedule: str, points: str, name: str, value: float | None) -> ConfigError:
    return ConfigError(
        f"{option(schedule)} is {points}, but {option(name)} is {value}: leave one of them out"
    )


def _check_length(seq_length: int) -> None:
    """Raise :class:`ConfigError` unless a sequence can have this many tokens."""
    check_whole(seq_length=seq_length)
    if seq_length < 1:
        raise ConfigError(f"--seq-length is {seq_length}: use 1 or more")


DENSE = PricePolicy(price=0.0)
"""The policy that keeps everything."""
