# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The workloads of ``rings.py``: sequence lengths, with budgets of the pattern, a density at which policy
price selects it, or a density to draw it at; and how much of it the backward keeps."""

from __future__ import annotations

import dataclasses

from megatron_mtraining import MTrainingConfig

from ..lib.workloads import BLOCK


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload: budgets with which the pattern is selected, or a density at which policy price selects it,
    or a drawn pattern of a given density.

    The name begins with the length. A case for slow links runs only where links are slow, or by its name; a
    case of one host's table (``by_name``) only by its whole name.

    Attributes:
        price: policy price selects the pattern, at the price that gives ``density``.
        threshold: of the pruned backward, as ``--mtraining-backward-threshold``; 0 for the gradient of every
            pair.
    """

    name: str
    seq: int
    vertical: int
    slash: int | None = None  # None: the pattern has this density
    density: float | None = None
    slow_link: bool = False
    price: bool = False
    threshold: float = 0.0
    by_name: bool = False

    def at(self, seq: int) -> Case:
        """The same for another length, with budgets that leave something out there too."""
        slash = self.slash
        if slash is not None:
            slash = seq if slash == self.seq else min(slash, seq // 16)
        name = f"{seq / 1024:g}K " + self.name.split(" ", 1)[1]
        vertical = min(self.vertical, seq // 16)
        return dataclasses.replace(self, name=name, seq=seq, vertical=vertical, slash=slash)

    def config(self, price: float | None = None) -> MTrainingConfig | None:
        """The settings; None if the pattern is drawn.

        Args:
            price: for policy price: the price that gives the case's density.
        """
        if self.price:
            return MTrainingConfig.from_options(
                price=price, block_size=BLOCK, backward_threshold=self.threshold
            )
        if self.slash is None:
            return None
        return MTrainingConfig.from_options(
            vertical=self.vertical, slash=self.slash, block_size=BLOCK, sample_strata=64, sample_rows=1,
            backward_threshold=self.threshold,
        )  # fmt: skip


CASES = [
    Case("512K 1000 columns, 100 diagonals", 524288, 1000, 100),
    Case("512K 3500 columns, 30 diagonals", 524288, 3500, 30),
    Case("128K 1000 columns, 100 diagonals", 131072, 1000, 100),
    Case("512K 3% density, 1000 columns", 524288, 1000, density=0.03),
    Case("512K all distances", 524288, 0, 524288),
    # Over slow links, kernels of the sparse cases above are far shorter than transfers, and those of all
    # distances far longer. In between it shows how much of the transfers the ring hides.
    Case("512K 10% density, 1000 columns", 524288, 1000, density=0.10, slow_link=True),
    Case("128K 25% density, 1000 columns", 131072, 1000, density=0.25, slow_link=True),
    Case("128K 50% density, 1000 columns", 131072, 1000, density=0.5, slow_link=True),
]

PRICED = 0.145
"""The density at which policy price loses at most 0.5% after training (docs/frontier.md)."""
THRESHOLD = 3.0
"""Of the pruned backward."""
LENGTHS = (131072, 262144, 524288, 1048576, 2097152)
"""Tokens of one host's table."""


def host_cases(seq: int) -> list[Case]:
    """The cases of one host's table at a length of :data:`LENGTHS`; the last but one is dense attention."""
    priced = f"price at {PRICED:.1%}"
    pruned = f"backward threshold {THRESHOLD:g}"
    price = dict(vertical=1000, price=True, density=PRICED)
    found = {
        "1000 columns, 100 diagonals": dict(vertical=1000, slash=100),
        "3500 columns, 30 diagonals": dict(vertical=3500, slash=30),
        priced: price,
        f"{priced}, {pruned}": dict(price, threshold=THRESHOLD),
        "all distances": dict(vertical=0, slash=seq),
        f"all distances, {pruned}": dict(vertical=0, slash=seq, threshold=THRESHOLD),
    }
    return [
        Case(f"{seq // 1024}K {name}", seq, by_name=True, **fields)
        for name, fields in found.items()
    ]


def _further() -> list[Case]:
    """The cases of one host's table that are not in :data:`CASES`."""
    known = {case.name for case in CASES}
    return [case for seq in LENGTHS for case in host_cases(seq) if case.name not in known]


CASES += _further()


def cases_for(texts: list[str] | None, slow_links: bool) -> list[Case]:
    """The cases named by any of these texts, by their whole names or, but for those of one host's table, by a
    part of them; without texts, those for the links that there are."""
    if texts:
        return [
            case
            for case in CASES
            if case.name in texts or (not case.by_name and any(text in case.name for text in texts))
        ]
    return [case for case in CASES if not case.by_name and (slow_links or not case.slow_link)]
