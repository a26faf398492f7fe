# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a benchmark is to the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Planned:
    """One task at one length, whose data is made.

    Attributes:
        name: of the task, in tables and files.
        length: tokens of a sequence; None where each sample has its own.
        task: lm-eval's Task.
        metric: the name of the score in lm-eval's results.
        target: the right answer of a document, as it would follow the prompt, for the loss of its tokens;
            None for no loss.
        about: further values of a document that a sample's results have.
        data: what the samples are made from: values and digests, by the names of options where there is one.
    """

    name: str
    length: int | None
    task: Any
    metric: str
    target: Callable[[dict], str] | None = None
    about: Callable[[dict], dict] = lambda document: {}
    data: dict = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and length, for files."""
        return self.name if self.length is None else f"{self.name}-{self.length}"

    @property
    def title(self) -> str:
        """For progress bars and messages."""
        return self.label
