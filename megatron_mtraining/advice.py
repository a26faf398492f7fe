# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a run should be told of its pattern, as its log shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .config import MTrainingConfig, Policy, PricePolicy, option
from .kernels.types import PatternOperand
from .pattern.constants import constant

UNBOUNDED = 2**31 - 1
NEARLY_DENSE = 0.95
"""Mean density from which on a run whose price should leave something out is told that it does not."""
SETTLED, MISSED = 50, 0.02
"""Steps after which a mean recall that is so far below the target is told: prices have moved by then."""
CAPPED = 0.1
"""Share of the heads at a cap from which on it is told."""


class Caps(NamedTuple):
    """The most columns of each head, and the most slashes with those of the local window."""

    columns: tuple[int, ...]
    slashes: tuple[int, ...]

    @classmethod
    def of(cls, policies: Sequence[Policy], config: MTrainingConfig) -> Caps | None:
        """Those of the heads' policies; None if no head has caps.

        Args:
            config: of the run, for the local window.
        """
        if not any(isinstance(each, PricePolicy) for each in policies):
            return None
        columns, slashes = [], []
        for each in policies:
            is_price = isinstance(each, PricePolicy)
            slash_cap = each.slash_cap if is_price else None
            columns.append(each.vertical_cap if is_price else UNBOUNDED)
            # None at all, by a cap of 0, are meant.
            slashes.append(slash_cap + config.window_blocks if slash_cap else UNBOUNDED)
        return cls(tuple(columns), tuple(slashes))

    def reached(self, index: PatternOperand) -> Tensor:
        """Which heads have as many as they may: bool ``[b, h]``."""
        columns, slashes = (constant(each, index.member.device, torch.int32) for each in self)
        reached = index.column_ptr[..., -1] >= columns
        return (
            reached | (index.member.sum(-1) >= slashes)
            if min(self.slashes) < UNBOUNDED
            else reached
        )


def warnings_of(
    step: int,
    price: float | None,
    density: float,
    recall: float,
    target: float | None = None,
    capped: float | None = None,
) -> dict[str, str]:
    """What a user should be told, by a name for each kind of warning.

    Args:
        step: steps that are done.
        price: of the step; None without one.
        density, recall: means over layers and heads.
        target: recall that prices move to; None without, or if it changes.
        capped: share of heads that have as many columns or slashes as a cap lets them.
    """
    found = {}
    caps = f"{option('vertical_cap')} and {option('slash_cap')}"
    if price and density >= NEARLY_DENSE:
        found["density"] = (
            f"density is {density:.4f}: price {price:.4g} keeps nearly all query-key pairs, as with random "
            "weights, whose attention is even, or sequences that are hardly longer than the local window. "
            f"Use trained weights, raise {option('price')}, or bound the pattern with {caps} or with fixed "
            f"budgets ({option('vertical')}, {option('slash')})"
        )
    if target is not None and step >= SETTLED and recall < target - MISSED:
        if capped == 0:
            why = f"prices have not reached it yet: start from a lower {option('price')}, or go on"
        else:
            why = f"a bound keeps it there. Raise {caps}, or lower the target"
        found["recall"] = f"recall is {recall:.4f}, and {option('target_recall')} {target:g}: {why}"
    elif capped is not None and capped >= CAPPED:
        found["capped"] = (
            f"{capped:.1%} of the heads have as many columns or slashes as a cap lets them: where recall is "
            f"too low, raise {caps}"
        )
    return found
