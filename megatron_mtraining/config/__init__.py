# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Every knob of the backend, in one dataclass, validated once."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import get_args, get_type_hints

from ..kernels.limits import MAX_BLOCKS

BLOCK_SIZES = (64, 128)
POLICIES = ("price", "coverage", "fixed", "xattention", "moba")
ESTIMATORS = ("strata", "last")
SCOPES = ("head", "model")
OF_POLICY = {
    "price": dict(price=0.25, vertical_floor=0, vertical_cap=4096, slash_floor=0),
    "coverage": dict(
        coverage=0.9, vertical_floor=0, vertical_cap=4096, slash_floor=0, slash_cap=4096
    ),
    "fixed": dict(vertical=1000, slash=100),
    "xattention": dict(block_stride=16, block_threshold=0.9),
    "moba": dict(block_top_k=16),
}
"""Settings that a policy has, and their defaults."""
OPTIONAL = {
    "price": (
        "slash_cap",
        "target_recall",
        "target_density",
        "target_scope",
        "price_start",
    ),
    "coverage": (),
    "fixed": (),
    "xattention": (),
    "moba": (),
}
"""Further settings that a policy has, which stay None unless given."""
STEERED = dict(
    target_recall=None, target_density=None, price_start=None, slash_refresh=1
)  # fmt: skip
"""Settings that move a price from step to step or keep slashes, of heads of policy price alone, and what
leaves them off."""
OF_ESTIMATOR = {
    "strata": dict(sample_strata=128, sample_rows=2),
    "last": dict(sample_rows=64),
}
SIZES = (
    "vertical", "slash", "vertical_floor", "vertical_cap", "slash_floor", "slash_cap", "window", "sink",
)  # fmt: skip
"""Fields that cannot be more than the sequence is long."""


class ConfigError(ValueError):
    """A setting that cannot work; the message names the option, its value and what to do."""


@dataclass(frozen=True)
class MTrainingConfig:
    """Settings of dynamic sparse attention, as a user gives them with ``--mtraining-*``.

    Each field ``name`` is the option ``--mtraining-name`` (underscores become hyphens), the string
    under it the option's help text. Sizes are in tokens unless said otherwise. A field that None stands
    for is filled in: ``policy``, and what the policy that is chosen needs.
    """

    policy: str | None = None
    """How keys are chosen. price: what keeps most attention for its cost, over all heads alike; coverage: as
    few as hold a share of it, in each head; fixed: as many as --mtraining-vertical and --mtraining-slash
    say; xattention, moba: key blocks of each query block by itself, scored along antidiagonals (arXiv
    2503.16428) or by means of keys. (default: price, but fixed if one of those two is given)"""
    price: float | None = None
    """Policy price: keys are kept whose share of attention, over their share of the pairs, is this or more.
    0 keeps everything, and takes no caps. (default: 0.25)"""
    coverage: float | None = None
    """Policy coverage: the share of attention that columns are to hold, and diagonals, each by themselves,
    within the caps; 1 keeps everything only if --mtraining-slash-cap is the sequence length or more. What the
    published choice takes; with estimator strata much less will do. (default: 0.9)"""
    vertical: int | None = None
    """Policy fixed: key columns each query head keeps, the first ``sink`` columns counted in; the sequence
    length keeps everything. (default: 1000)"""
    slash: int | None = None
    """Policy fixed: token diagonals each query head keeps beside the local window; the sequence length keeps
    every diagonal, which is dense causal attention. (default: 100)"""
    vertical_floor: int | None = None
    """Policies price, coverage: columns a head keeps at least. (default: 0)"""
    vertical_cap: int | None = None
    """Policies price, coverage: columns a head keeps at most, the sink counted in. (default: 4096)"""
    slash_floor: int | None = None
    """Policies price, coverage: diagonals beside the window that a head keeps at least; block distances with
    policy price, token diagonals with coverage. (default: 0)"""
    slash_cap: int | None = None
    """Policies price, coverage: diagonals beside the window that a head keeps at most. (default: no limit
    with policy price, 4096 with coverage)"""
    block_stride: int | None = None
    """Policy xattention: tokens along an antidiagonal that are scored as one; divides the block size.
    (default: 16)"""
    block_threshold: float | None = None
    """Policy xattention: the share of each query block's attention, as scored, that its key blocks are to
    hold. 1 keeps everything. (default: 0.9)"""
    block_top_k: int | None = None
    """Policy moba: key blocks of each query block, beside those that always are. (default: 16)"""
    window: int = 128
    """Tokens before each query that are always kept (rounded up to whole blocks)."""
    sink: int = 4
    """First columns of the sequence that are always kept, also if no others are."""
    block_size: int = 128
    """Tokens in a block: the granularity of slashes and of the striped layout."""
    estimator: str = "strata"
    """Query rows that the pattern is estimated from. strata: spread over the whole sequence; last: its last
    rows, as published."""
    sample_strata: int | None = None
    """Estimator strata: stretches of the sequence that rows are sampled from. (default: 128)"""
    sample_rows: int | None = None
    """Query rows sampled in each stretch; with estimator last, in all. (default: 2; 64 with estimator
    last)"""
    held_out_rows: int | None = None
    """So many of the rows of each stretch measure what share of attention the pattern keeps, and do not
    choose it. 0 measures by the rows that choose, which flatters. (default: half; 0 with estimator last)"""
    target_recall: float | None = None
    """Policy price: move the price, from step to step, until this share of attention is kept, measured on
    held-out rows: by each head, or in the mean over layers and heads (--mtraining-target-scope)."""
    target_density: float | None = None
    """Policy price: move the price, from step to step, until this share of the causal pairs is kept in the
    mean over layers and heads."""
    target_scope: str | None = None
    """With --mtraining-target-recall: head moves a price for each head, until that head keeps so much; model
    moves one price for all. (default: head)"""
    dense_steps: int = 0
    """Training steps at the start in which attention is dense."""
    price_start: float | None = None
    """Policy price: the price of the first step after the dense ones, from which it goes to
    --mtraining-price, evenly in ratio, over --mtraining-price-steps."""
    price_steps: int = 0
    """Policy price: steps over which the price goes from --mtraining-price-start to
    --mtraining-price."""
    slash_refresh: int = 1
    """Policy price: choose the slashes anew every so many steps, and keep them in between; columns are
    chosen in every step."""
    overrides: str | None = None
    """A JSON or YAML file of settings that differ for layers and heads: {"layers": {"0": {"dense": true},
    "7": {"price": 0.2, "heads": {"3": {"dense": true}}}}}."""
    budgets: str | None = None
    """A JSON file of budgets a layer and head as MInference publishes them (best pattern files), with entries
    vertical_and_slash and flex_vertical_and_slash."""
    gathered_ranks: int = 0
    """Context-parallel ranks whose keys a rank has at hand at once: more take less time and more memory, 1
    is a ring of single ranks. 0 takes the ranks a node of --hierarchical-context-parallel-sizes or,
    without those, the largest divisor of --context-parallel-size up to 8."""
    recompute_attention: bool = False
    """Compute attention again in the replay of activation recomputation, in place of keeping what the
    first pass has found: takes more time and less memory."""
    bf16_gradients: bool = False
    """Send the gradients of keys and values between context-parallel ranks in bfloat16 in place of
    float32: half the bytes; over 4 ranks their error becomes 0.29 percent, from 0.24."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at once: output layer and loss are computed in such chunks. 0 leaves them to
    Megatron, with the logits of all tokens. (default: 4096; 0 where Megatron's options allow no chunks)"""

    def __post_init__(self):
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.default is None)
        self._choose_policy()
        self._choose_estimator()
        self._check_values()

    def _fill(self, name: str, value) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _choose_policy(self) -> None:
        counted = self.vertical is not None or self.slash is not None
        self._fill("policy", "fixed" if counted else "price")
        _check_choice("policy", self.policy, POLICIES)
        for name, value in OF_POLICY[self.policy].items():
            self._fill(name, value)
        has = (*OF_POLICY[self.policy], *OPTIONAL[self.policy])
        for policy in POLICIES:
            for name in (*OF_POLICY[policy], *OPTIONAL[policy]):
                if name not in has and getattr(self, name) is not None:
                    raise ConfigError(
                        f"{option(name)} is {getattr(self, name)}, but {option('policy')} is {self.policy}, "
                        f"which has no such setting: leave it out or use {option('policy')} {policy}"
                    )

    def _choose_estimator(self) -> None:
        _check_choice("estimator", self.estimator, ESTIMATORS)
        for name, value in OF_ESTIMATOR[self.estimator].items():
            self._fill(name, value)
        if self.estimator == "last" and self.sample_strata not in (None, 1):
            raise ConfigError(
                f"{option('sample_strata')} is {self.sample_strata}, but {option('estimator')} is last, "
                f"which looks at one stretch: leave it out"
            )
        self._fill("sample_strata", 1)
        self._fill("held_out_rows", self.sample_rows // 2 if self.estimator == "strata" else 0)

    def _check_values(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"{option('block_size')} is {self.block_size}: use one of {BLOCK_SIZES}"
            )
        zero = (*SIZES, "held_out_rows", "gathered_ranks", "dense_steps", "loss_chunk")
        at_least = dict.fromkeys(zero, 0)
        at_least.update(
            block_stride=1, block_top_k=0, sample_rows=1, slash_refresh=1, price_steps=0, price=0
        )
        at_least.update(sample_strata=2 if self.estimator == "strata" else 1)
        for name, low in at_least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{option(name)} is {value}: use {low} or more")
        for name in ("coverage", "block_threshold", "target_recall", "target_density"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{option(name)} is {value}: use a share, above 0 and at most 1")
        if self.sink > (self.vertical or self.vertical_cap or self.sink):
            name = "vertical" if self.policy == "fixed" else "vertical_cap"
            raise ConfigError(
                f"{option('sink')} is {self.sink}, more than {option(name)} ({getattr(self, name)}), which "
                f"counts the sink columns in: raise {option(name)} or lower {option('sink')}"
            )
        for kind in ("vertical", "slash"):
            floor, cap = getattr(self, f"{kind}_floor"), getattr(self, f"{kind}_cap")
            if floor is not None and cap is not None and floor > cap:
                raise ConfigError(
                    f"{option(f'{kind}_floor')} is {floor}, more than {option(f'{kind}_cap')} ({cap}): "
                    "lower it or raise the cap"
                )
        if self.vertical_cap is not None and self.vertical_cap < max(1, self.sink):
            raise ConfigError(f"{option('vertical_cap')} is {self.vertical_cap}: use 1 or more")
        for name, usual in (
            ("vertical_cap", OF_POLICY["price"]["vertical_cap"]),
            ("slash_cap", None),
        ):
            if self.price == 0 and getattr(self, name) != usual:
                raise ConfigError(
                    f"{option(name)} is {getattr(self, name)}, but {option('price')} is 0, which keeps "
                    "everything: leave one of them out"
                )
        if self.held_out_rows and self.estimator == "last":
            raise ConfigError(
                f"{option('held_out_rows')} is {self.held_out_rows}, but {option('estimator')} is last, "
                "which holds none out: leave it out"
            )
        if self.held_out_rows >= self.sample_rows:
            raise ConfigError(
                f"{option('held_out_rows')} is {self.held_out_rows}, which leaves none of the "
                f"{option('sample_rows')} ({self.sample_rows}) to choose by: use fewer"
            )
        if self.block_stride is not None and self.block_size % self.block_stride:
            raise ConfigError(
                f"{option('block_stride')} is {self.block_stride}, which does not divide "
                f"{option('block_size')} ({self.block_size}): use 8 or 16, for example"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.target_recall is not None and self.target_density is not None:
            raise ConfigError(
                f"{option('target_recall')} is {self.target_recall} and {option('target_density')} is "
                f"{self.target_density}: one price cannot meet both, leave one out"
            )
        if self.target_recall is not None:
            self._fill("target_scope", "head")
        if self.target_scope is not None:
            _check_choice("target_scope", self.target_scope, SCOPES)
            if self.target_recall is None:  # a density is the heads' mean
                raise ConfigError(
                    f"{option('target_scope')} is {self.target_scope}, but there is no "
                    f"{option('target_recall')}: give one, or leave it out"
                )
        target = "target_recall" if self.target_recall is not None else "target_density"
        if getattr(self, target) is not None and self.price_start is not None:
            raise ConfigError(
                f"{option(target)} is {getattr(self, target)}, which moves the price from step to step: "
                f"leave {option('price_start')} out"
            )
        if getattr(self, target) is not None and self.price == 0:
            raise ConfigError(
                f"{option('price')} is 0, but {option(target)} is {getattr(self, target)}: use a price above "
                "0 to start from"
            )
        if (self.price_start is None) != (self.price_steps == 0):
            raise ConfigError(
                f"{option('price_start')} is {self.price_start} and {option('price_steps')} is "
                f"{self.price_steps}: give both, or leave both out"
            )
        if self.price_start is not None and not (self.price_start > 0 and self.price > 0):
            raise ConfigError(
                f"{option('price_start')} is {self.price_start} and {option('price')} is {self.price}: use "
                "prices above 0, as the price goes from one to the other evenly in ratio"
            )
        if self.slash_refresh > 1 and self.policy != "price":
            raise ConfigError(
                f"{option('slash_refresh')} is {self.slash_refresh}, but {option('policy')} is "
                f"{self.policy}: use {option('policy')} price or leave it out"
            )
        if self.overrides is not None and self.budgets is not None:
            raise ConfigError(
                f"{option('overrides')} is {self.overrides} and {option('budgets')} is {self.budgets}: "
                "give one file"
            )
        for name, usual in {**dict.fromkeys(OPTIONAL["price"]), **STEERED}.items():
            as_usual = getattr(self, name) in (usual, OF_POLICY[self.policy].get(name))
            if self.budgets is not None and not as_usual:
                raise ConfigError(
                    f"{option(name)} is {getattr(self, name)}, but {option('budgets')} {self.budgets} has "
                    "the budgets of all heads: leave one of them out"
                )

    def shared(self, **policy) -> MTrainingConfig:
        """These settings with another policy: what is no policy's stays as it is."""
        of_policies = {
            name for known in (*OF_POLICY.values(), *OPTIONAL.values()) for name in known
        }
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: value for name, value in kept.items() if name not in of_policies}
        return MTrainingConfig(**{**kept, "price_steps": 0, "slash_refresh": 1, **policy})

    @lru_cache(maxsize=64)  # noqa: B019 few settings, all small
    def dense(self) -> MTrainingConfig:
        """These settings, but keeping everything."""
        return self.shared(policy="price", price=0.0)

    @property
    def rows(self) -> int:
        """Query rows sampled in all, held-out ones too."""
        return self.sample_strata * self.sample_rows

    def check_sequence(self, seq_length: int, cp_size: int, inner: int = 1) -> None:
        """Raise :class:`ConfigError` if a sequence of ``seq_length`` tokens cannot be laid out
        over ``cp_size`` ranks, ``inner`` of which gather their keys, or :meth:`check_budgets` does."""
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
        self.check_budgets(seq_length)

    def check_budgets(self, seq_length: int) -> None:
        """Raise :class:`ConfigError` if the budgets do not fit ``seq_length`` tokens."""
        for name in ("vertical", "slash", "vertical_floor", "slash_floor", "window", "sink"):
            value = getattr(self, name)
            if value is not None and value > seq_length:
                raise ConfigError(
                    f"{option(name)} is {value}, more than --seq-length ({seq_length}): use at most "
                    f"{seq_length}"
                )
        if self.keeps_all(seq_length):
            return
        if self.rows > seq_length:
            raise ConfigError(
                f"{option('sample_strata')} x {option('sample_rows')} = {self.sample_strata} x "
                f"{self.sample_rows} rows are more than --seq-length ({seq_length})"
            )

    def keeps_all(self, seq_length: int) -> bool:
        """Whether the budgets keep every pair of a sequence of ``seq_length`` tokens."""
        if self.policy == "price":
            kept = self.price == 0 and self.target_recall is None and self.target_density is None
        elif self.policy == "coverage":
            kept = self.coverage == 1 and self.slash_cap >= seq_length
        elif self.policy == "xattention":
            kept = self.block_threshold == 1
        elif self.policy == "moba":
            kept = self.block_top_k * self.block_size >= seq_length
        else:
            kept = max(self.vertical, self.slash) >= seq_length
        return kept or self.window >= seq_length


@lru_cache(maxsize=1)
def field_types() -> dict[str, type]:
    """The type of each field of :class:`MTrainingConfig`, None left out."""
    hints = get_type_hints(MTrainingConfig)
    names = [field.name for field in fields(MTrainingConfig)]
    return {name: (get_args(hints[name]) or (hints[name],))[0] for name in names}


TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def _check_type(name: str, value, may_be_none: bool) -> None:
    kind = field_types()[name]
    if value is None and may_be_none:
        return
    allowed = (int, float) if kind is float else kind
    wrong = not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool)
    # A whole number may be too large for a float, or for a tensor.
    if wrong or (kind is float and not abs(value) <= sys.float_info.max):
        raise ConfigError(f"{option(name)} must be {TYPE_NAMES[kind]}, but is {value!r}")
    if kind is int and abs(value) >= 2**63:
        raise ConfigError(f"{option(name)} is {value}: use less than 2^63")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option(name)} is {value}: use one of {', '.join(choices)}")


def option(name: str) -> str:
    """The command-line option of a field."""
    return "--mtraining-" + name.replace("_", "-")
