# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Cases of a test in which every pair of values occurs, in place of all combinations.

A kernel's mistake shows with one setting or with two (a last block that is not full, and heads of 128), and
hardly ever with three alone. Cases with all pairs are a tenth of the combinations, and the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, combinations, product

import pytest


def pairwise(
    values: dict[str, Iterable], possible: Callable[..., bool] = lambda **case: True, **options
):
    """``pytest.mark.parametrize`` in which any two values of a possible case occur together.

    Args:
        values: of each parameter; tuples, of several that belong together and are named in one, with commas.
        possible: whether there is such a case, by its parameters.
        options: of ``pytest.mark.parametrize``.
    """
    names = [name.strip() for name in ",".join(values).split(",")]
    # One parameter's values are tuples of one, like those of several.
    lists = [each if "," in name else [(v,) for v in each] for name, each in values.items()]
    cases = {row: tuple(chain.from_iterable(row)) for row in product(*lists)}
    rows = [row for row, case in cases.items() if possible(**dict(zip(names, case)))]
    return pytest.mark.parametrize(names, [cases[row] for row in all_pairs(rows)], **options)


def all_pairs(rows: list[tuple]) -> list[tuple]:
    """The rows to take for all pairs of values, at two places, that any row has.

    Greedy: each is one with the most pairs that no row before has, and of those one whose values are rare.
    """
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen: list[tuple] = []
    uses: Counter = Counter()

    def gain(row: tuple) -> tuple[int, int]:
        return len(pairs[row] & missing), -sum(uses[value] for value in enumerate(row))

    while missing:
        chosen.append(max(rows, key=gain))
        missing -= pairs[chosen[-1]]
        uses.update(enumerate(chosen[-1]))
    return chosen
