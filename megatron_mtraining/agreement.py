# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Whether ranks that work together were given the same: settings, versions, shapes.

Ranks that differ train on with wrong results, or wait for each other until a timeout. So they compare what
they were given before they communicate about anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cp_group import RankGroup
from .errors import ConfigError

_MOST_NAMED = 4
"""Differences that an error names; the others are counted."""


def check_agreement(ranks: RankGroup, given: Mapping[str, Any], who: str) -> None:
    """Raise :class:`ConfigError`, on every rank, unless all ranks were given the same. A collective.

    Args:
        given: by name, as the user knows it (``--mtraining-price``, ``the query's dtype``): values that have
            the same ``repr`` on all ranks if they are the same.
        who: the ranks, for the message: ``the context-parallel ranks``.
    """
    if ranks.world == 1:
        return
    # Text alone: a rank with another version may not know another's classes.
    found = ranks.gather_objects({name: repr(value) for name, value in given.items()})
    if all(each == found[0] for each in found):
        return
    names = dict.fromkeys(name for each in found for name in each)
    lines = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            by_value.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            values = [f"{value} on {_listed(at)}" for value, at in by_value.items()]
            lines.append(f"{name} is {', '.join(values)}")
    more = len(lines) - _MOST_NAMED
    told = "; ".join(lines[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    raise ConfigError(f"{who} must be started alike, but {told}. Give all of them the same.")


def _listed(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    shown = ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
