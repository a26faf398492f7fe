# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The time of a layer's attention, from its length, density and pattern kind.

A time is a sum of terms (:mod:`.terms`), each with a coefficient of 0 or more that ``mtraining profile``
fits to measurements on a GPU. Times are therefore never negative and never fall with density. Beyond the
measured lengths they grow as the work does.

Times are GPU times. A layer of a short sequence may wait for the host to launch its kernels: ``launch_bound``
gives the larger of GPU time and host time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from . import profile_file
from .terms import (
    KINDS,
    PARTS,
    PROCESSORS,
    AttentionShape,
    Entry,
    Error,
    Latency,
    Numbers,
    quantities,
)


@dataclass(frozen=True)
class LatencyModel:
    """Predicts the time of a layer's attention on one GPU; see the module's text.

    Attributes:
        gpu: the name that torch has for the GPU.
        entries: the coefficients, one entry for each kind and head dimension.
        errors: errors on held-out shapes, by "total", "search", "forward" and "backward", and by kind.
        versions: versions of the packages at the time of measuring, by name.
        commit, command: commit and command that measured the profile; ``seconds``: the time of the command.
        points: the measurements: "columns" (names) and "rows".
        processors: multiprocessors of the GPU.
        left_out: shapes that could not be measured, and why.
        warning: a text for the user if the profile is of another GPU; else empty.
    """

    gpu: str
    entries: tuple[Entry, ...]
    errors: Mapping[str, Error] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = "unknown"
    command: str = ""
    seconds: float = 0.0
    points: Mapping[str, list] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    processors: int = PROCESSORS
    warning: str = ""

    def predict(
        self,
        tokens: Numbers,
        pairs: Numbers,
        density: Numbers,
        shape: AttentionShape,
        *,
        kind: str = "vertical_slash",
        cp_size: int = 1,
        packed: bool | None = None,
        launch_bound: bool = False,
    ) -> Latency:
        """One attention layer of one sequence on one context-parallel rank.

        Args:
            tokens: tokens of the whole sequence, a number or an array. The time of 0 tokens is 0.
            pairs: visible query-key pairs of the whole sequence (:func:`visible_pairs`), a number or an
                array.
            density: the share of these pairs that is attended to, a number or an array; clipped to 0 to 1.
            shape: heads of one tensor-parallel rank.
            kind: one of :data:`KINDS`.
            cp_size: context-parallel ranks, which have equal work.
            packed: whether the layer is given documents (also if it is one document). None: yes if not all
                pairs of the sequence are visible.
            launch_bound: return the larger of GPU time and host time, for each part.

        Returns:
            Milliseconds, arrays of the shape that the arguments broadcast to.

        Raises:
            ConfigError: the profile has no such kind or head dimension.
        """
        entry = self.entry(kind, shape.head_dim)
        amounts = quantities(
            tokens,
            pairs,
            density,
            shape,
            cp_size,
            kind=kind,
            packed=packed,
            processors=self.processors,
        )
        there = np.asarray(tokens, dtype=np.float64) > 0
        found = []
        for part, host in zip(PARTS, entry.host):
            time = sum(
                coefficient * amounts[term]
                for term, coefficient in entry.coefficients[part].items()
            )
            time = np.maximum(time, host if launch_bound else 0.0)
            # [()] makes a number of an array without dimensions.
            found.append(np.where(there, time + np.zeros_like(amounts["pairs"]), 0.0)[()])
        return Latency(*found)

    def entry(self, kind: str, head_dim: int) -> Entry:
        """The coefficients of a kind and head dimension.

        Raises:
            ConfigError: there are none.
        """
        if kind not in KINDS:
            raise ConfigError(f"the kind of pattern is {kind!r}: use one of {', '.join(KINDS)}")
        for entry in self.entries:
            if (entry.kind, entry.head_dim) == (kind, head_dim):
                return entry
        raise ConfigError(
            f"the latency profile of {self.gpu} has no {kind} attention of head dim {head_dim}: run "
            f"mtraining profile, and give --mtraining-profile FILE"
        )

    @classmethod
    def load(cls, path: Path | str) -> LatencyModel:
        """Read a profile.

        Raises:
            ConfigError: the file cannot be read, or is no profile of this version.
        """
        return cls(**profile_file.read(Path(path)))

    def save(self, path: Path | str) -> None:
        """Write the profile; an existing file is replaced when all is written."""
        profile_file.write(vars(self), Path(path))

    @classmethod
    def for_gpu(cls, name: str, path: Path | str | None = None) -> LatencyModel:
        """The profile of a GPU.

        Args:
            name: the GPU's name, as ``torch.cuda.get_device_name`` has it.
            path: the user's profile (``--mtraining-profile``); None for one that the package has.

        Returns:
            The profile; if it is of another GPU, :attr:`warning` says so. If the package has no profile of
            the GPU, the H200's is used: its absolute times are wrong, its relative times are closer.

        Raises:
            ConfigError: see :meth:`load`.
        """
        found, warning = profile_file.find(name, None if path is None else Path(path))
        return cls(**found, warning=warning)


def visible_pairs(lengths: Iterable[float] | np.ndarray) -> float:
    """The visible query-key pairs of packed documents: the sum of ``l (l + 1) / 2`` over their lengths."""
    if not isinstance(lengths, np.ndarray):
        lengths = list(lengths)
    lengths = np.asarray(lengths, dtype=np.float64)
    return float((lengths * (lengths + 1) / 2).sum())
