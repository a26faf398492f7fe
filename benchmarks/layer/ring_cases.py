# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The workloads of ``rings.py``: sequence lengths, with budgets of the pattern or a density to draw it at."""

from __future__ import annotations

import dataclasses

from megatron_mtraining import MTrainingConfig

from ..lib.workloads import BLOCK


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload: budgets with which the pattern is chosen, or a drawn pattern of a given density.

    The name begins with the length. A case for slow links runs only where links are slow, or by its name.
    """

    name: str
    seq: int
    vertical: int
    slash: int | None = None  # None: the pattern is drawn, of this density
    density: float | None = None
    slow_link: bool = False

    def at(self, seq: int) -> Case:
        """The same for another length, with budgets that leave something out there too."""
        slash = self.slash
        if slash is not None:
            slash = seq if slash == self.seq else min(slash, seq // 16)
        name = f"{seq / 1024:g}K " + self.name.split(" ", 1)[1]
        vertical = min(self.vertical, seq // 16)
        return dataclasses.replace(self, name=name, seq=seq, vertical=vertical, slash=slash)

    def config(self) -> MTrainingConfig | None:
        if self.slash is None:
            return None
        rows = dict(sample_strata=64, sample_rows=1)
        return MTrainingConfig.from_options(
            vertical=self.vertical, slash=self.slash, block_size=BLOCK, **rows
        )


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


def cases_for(texts: list[str] | None, slow_links: bool) -> list[Case]:
    """The cases with any of these texts in their names; without texts, those for the links that there are."""
    if texts:
        return [case for case in CASES if any(text in case.name for text in texts)]
    return [case for case in CASES if slow_links or not case.slow_link]
