# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How a head's pattern is selected, and from which query rows: one dataclass for each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from ..errors import ConfigError
from .schedule import EXTENSIONS, SCHEDULES, Schedule, parse
from .validation import check_at_least, check_choice, check_share, check_type, option

TARGET_SCOPES = ("head", "model")


class Policy:
    """How a head's pattern is selected: a frozen dataclass, whose fields are settings. A selector
    (:mod:`..pattern.selector`) follows it.

    Attributes:
        name: by which options select it.
        has_block_lists: whether each query block has a list of key blocks.
        price, target_recall, target_scope, schedule, target_schedule, steps: of :class:`PricePolicy`; None
            for a policy without a price.
    """

    name: ClassVar[str]
    has_block_lists: ClassVar[bool] = False
    price: float | None = None
    target_recall: float | None = None
    target_scope: str | None = None
    schedule: str | None = None
    target_schedule: str | None = None

    @property
    def steps(self) -> Schedule | None:
        return None

    @property
    def most_columns(self) -> int:
        """Columns that a head has at most."""
        return 0

    def keeps_all(self, seq_length: int, block_size: int) -> bool:
        """Whether every pair of a sequence is kept, whatever the data."""
        return False

    def check_block_size(self, block_size: int) -> None:
        """Raise :class:`ConfigError` unless the policy goes with blocks of this size."""


@dataclass(frozen=True)
class PricePolicy(Policy):
    """Vertical-slash: keep what has most attention mass per unit of cost, compared over all heads.

    Attributes:
        price: least attention mass per unit of cost of a slash or column that is kept; the Lagrange
            multiplier of density. Higher is sparser; 0 keeps everything, and takes no caps.
        vertical_cap: most columns per head, sink columns included.
        slash_cap: most slashes (block distances) per head beside the local window; None for no limit.
        target_recall: recall to which feedback moves the price from step to step; None for a fixed price.
        target_scope: with a target, "head" for a price for each head (default), "model" for one price.
        schedule: prices over the run (:mod:`.schedule`), in place of one. Heads with another price of their
            own keep its ratio to ``price``.
        target_schedule: target recalls over the run; ``target_recall`` is the first of them.
        schedule_extension: what a schedule does if a run goes on from a checkpoint with another length:
            "continue" or "restart"; None where lengths do not change.
    """

    name: ClassVar[str] = "price"

    price: float = 0.25
    vertical_cap: int = 4096
    slash_cap: int | None = None
    target_recall: float | None = None
    target_scope: str | None = None
    schedule: str | None = None
    target_schedule: str | None = None
    schedule_extension: str | None = None

    def __post_init__(self):
        check_at_least("price", self.price, 0, float)
        self._check_schedule()
        check_at_least("vertical_cap", self.vertical_cap, 1)
        if self.slash_cap is not None:
            check_at_least("slash_cap", self.slash_cap, 0)
        if self.target_recall is not None:
            check_share("target_recall", self.target_recall)
            if self.target_scope is None:
                object.__setattr__(self, "target_scope", "head")
        if self.target_scope is not None:
            check_choice("target_scope", self.target_scope, TARGET_SCOPES)
            if self.target_recall is None:
                raise ConfigError(
                    f"{option('target_scope')} is {self.target_scope}, but there is no "
                    f"{option('target_recall')}: give one, or leave it out"
                )
        if self.price == 0:
            self._check_dense()

    @property
    def steps(self) -> Schedule | None:
        """What the price, or with a target the recall, is over the run; None if it stays."""
        if self.schedule is not None:
            return parse("schedule", self.schedule)
        return (
            None if self.target_schedule is None else parse("target_schedule", self.target_schedule)
        )

    def _check_schedule(self) -> None:
        given = [name for name in SCHEDULES if getattr(self, name) is not None]
        for name in given:
            check_type(name, getattr(self, name), str)
        if self.schedule_extension is not None:
            check_choice("schedule_extension", self.schedule_extension, EXTENSIONS)
            if given == ["schedule_extension"]:
                raise ConfigError(
                    f"{option('schedule_extension')} is {self.schedule_extension}, but there is no "
                    f"{option('schedule')}: give one, or leave it out"
                )
        steps = self.steps
        target = self.target_schedule if self.target_recall is None else self.target_recall
        if self.schedule is not None and target is not None:
            other = "target_schedule" if self.target_recall is None else "target_recall"
            raise ConfigError(
                f"{option('schedule')} is {self.schedule}, but {option(other)} is {target}, which moves the "
                "price: leave one of them out"
            )
        if steps is not None and self.price == 0:
            name = "target_schedule" if self.schedule is None else "schedule"
            raise ConfigError(
                f"{option(name)} is {getattr(self, name)}, but {option('price')} is 0, which is dense "
                "attention: leave one of them out"
            )
        if self.target_schedule is not None:
            assert steps is not None
            first = round(1 - steps.points[0][1], 12)
            if self.target_recall not in (None, first):
                raise ConfigError(
                    f"{option('target_schedule')} is {self.target_schedule}, but {option('target_recall')} "
                    f"is {self.target_recall}: leave one of them out"
                )
            object.__setattr__(self, "target_recall", first)

    def _check_dense(self) -> None:
        if self.target_recall is not None:
            raise ConfigError(
                f"{option('price')} is 0, but {option('target_recall')} is {self.target_recall}: use a "
                "price above 0 to start from"
            )
        for name in ("vertical_cap", "slash_cap"):
            if getattr(self, name) != getattr(PricePolicy, name):
                raise ConfigError(
                    f"{option(name)} is {getattr(self, name)}, but {option('price')} is 0, which keeps "
                    "everything: leave one of them out"
                )

    @property
    def most_columns(self) -> int:
        return self.vertical_cap

    def keeps_all(self, seq_length: int, block_size: int) -> bool:
        return self.price == 0


@dataclass(frozen=True)
class FixedPolicy(Policy):
    """Vertical-slash: fixed numbers of columns and token diagonals per head, those with the most mass.

    Attributes:
        vertical: columns per head, sink columns included.
        slash: token diagonals per head beside the local window.
    """

    name: ClassVar[str] = "fixed"

    vertical: int = 1000
    slash: int = 100

    def __post_init__(self):
        check_at_least("vertical", self.vertical, 0)
        check_at_least("slash", self.slash, 0)

    @property
    def most_columns(self) -> int:
        return self.vertical

    def keeps_all(self, seq_length: int, block_size: int) -> bool:
        return max(self.vertical, self.slash) >= seq_length


class BlockListPolicy(Policy):
    """Selects key blocks for each query block.

    Attributes:
        lookahead: a query block's own queries select, in place of those of the block before it.
    """

    has_block_lists = True
    lookahead: bool = False


@dataclass(frozen=True)
class XAttentionPolicy(BlockListPolicy):
    """Block-sparse: the fewest key blocks of each query block that hold a share of its antidiagonal scores
    (arXiv 2503.16428).

    Attributes:
        stride: tokens along an antidiagonal that share one score; divides the block size.
        threshold: the share of each query block's attention, as scored.
        lookahead: a query block's own queries select, in place of those of the block before it.
    """

    name: ClassVar[str] = "xattention"

    stride: int = 16
    threshold: float = 0.9
    lookahead: bool = False

    def __post_init__(self):
        check_type("block_lookahead", self.lookahead, bool)
        check_at_least("block_stride", self.stride, 1)
        check_share("block_threshold", self.threshold)

    def keeps_all(self, seq_length: int, block_size: int) -> bool:
        return self.threshold == 1

    def check_block_size(self, block_size: int) -> None:
        if block_size % self.stride:
            raise ConfigError(
                f"{option('block_stride')} is {self.stride}, which does not divide "
                f"{option('block_size')} ({block_size}): use 8 or 16, for example"
            )


@dataclass(frozen=True)
class MobaPolicy(BlockListPolicy):
    """Block-sparse: the key blocks of each query block with the best mean keys (arXiv 2502.13189).

    Attributes:
        top_k: key blocks per query block, beside the local window and the sink.
        lookahead: a query block's own queries select, in place of those of the block before it.
    """

    name: ClassVar[str] = "moba"

    top_k: int = 16
    lookahead: bool = False

    def __post_init__(self):
        check_type("block_lookahead", self.lookahead, bool)
        check_at_least("block_top_k", self.top_k, 0)

    def keeps_all(self, seq_length: int, block_size: int) -> bool:
        return self.top_k * block_size >= seq_length


def has_price(policy: Policy) -> TypeGuard[PricePolicy]:
    """Whether a price above 0 selects: one that a target recall or tuning can move."""
    return bool(policy.price)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (PricePolicy, FixedPolicy, XAttentionPolicy, MobaPolicy)
}


@dataclass(frozen=True)
class StratifiedSampling:
    """Query rows spread over the whole sequence: a few in each of many strata.

    Attributes:
        strata: equal stretches of the sequence.
        rows: query rows sampled in each.
        held_out_rows: how many of these measure recall, and do not select the pattern. None for half. With 0
            recall is measured on the rows that select, and is too high.
    """

    name: ClassVar[str] = "strata"

    strata: int = 128
    rows: int = 2
    held_out_rows: int | None = None

    def __post_init__(self):
        check_at_least("sample_strata", self.strata, 2)
        check_at_least("sample_rows", self.rows, 1)
        if self.held_out_rows is None:
            object.__setattr__(self, "held_out_rows", self.rows // 2)
        assert self.held_out_rows is not None
        check_at_least("held_out_rows", self.held_out_rows, 0)
        if self.held_out_rows >= self.rows:
            raise ConfigError(
                f"{option('held_out_rows')} is {self.held_out_rows}, which leaves none of the "
                f"{option('sample_rows')} ({self.rows}) to select by: use fewer"
            )

    @property
    def num_rows(self) -> int:
        """Query rows sampled in all, held-out ones too."""
        return self.strata * self.rows


@dataclass(frozen=True)
class LastRowsSampling:
    """The last query rows of the sequence, as MInference and MTraining publish it.

    Attributes:
        rows: query rows sampled.
    """

    name: ClassVar[str] = "last"

    rows: int = 64

    def __post_init__(self):
        check_at_least("sample_rows", self.rows, 1)

    @property
    def num_rows(self) -> int:
        """Query rows sampled in all."""
        return self.rows


Sampling = StratifiedSampling | LastRowsSampling

SAMPLINGS: dict[str, type[Sampling]] = {
    sampling.name: sampling for sampling in (StratifiedSampling, LastRowsSampling)
}
