# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a model is to a tool: how it is asked for, its sizes, and the inputs of its attention layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.limits import HEAD_DIMS
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelOptions:
    """Which model to open, and how to run it.

    Attributes:
        path: a Hugging Face folder, a GGUF file or a Megatron checkpoint's folder.
        tokenizer: used in place of the model's own.
        yarn_factor: extend the model's positions by this factor with YaRN.
        name: what the command line calls the model; error messages use it.
    """

    path: Path
    device: torch.device
    dtype: torch.dtype
    tokenizer: Path | None = None
    yarn_factor: float | None = None
    name: str = "MODEL"

    @property
    def label(self) -> str:
        return f"{self.name} ({self.path})"


class LayerInput(NamedTuple):
    """The input of one layer's core attention."""

    layer: int
    """Counted from 0."""
    query: Tensor
    """``[s, 1, h, d]`` after the position embedding, in the model's dtype; any strides."""
    key: Tensor
    """``[s, 1, hk, d]``, likewise."""
    softmax_scale: float
    value: Tensor | None = None
    """``[s, 1, hk, d]``; None for a model that cannot be scored."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that are known before its weights are read."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    """The longest sequence that the model supports, in tokens."""
    vocabulary: int
    """Token ids are below this."""

    def check(self, label: str) -> None:
        """Raise :class:`ConfigError` if the backend does not support the head dimension."""
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"{label} has attention heads of dimension {self.head_dim}; attention backend mtraining "
                f"supports {HEAD_DIMS}"
            )


class Score(NamedTuple):
    """How well a run predicts its text, in nats per token."""

    loss: float
    """Mean cross entropy of the next token."""
    divergence: float
    """Mean Kullback-Leibler divergence from the predictions of the first run. It estimates the increase of
    the loss with far less noise than the difference of two losses."""


Visitor = Callable[[LayerInput], Tensor | None]
"""Called with each layer's input, in order. It returns the layer's attention output, ``[s, 1, h, d]``, or
None for dense attention. For Megatron checkpoints the result is ignored and attention is dense."""


class Source(Protocol):
    """A supported model whose weights are not loaded yet."""

    shape: Shape
    description: str
    """Kind and path of the model, for the output."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was asked for, else the model's own."""

    def loaded(
        self, scored: bool = False
    ) -> AbstractContextManager[Callable[[Tensor, Visitor], Score | None]]:
        """Load the weights while the context lasts.

        Args:
            scored: return a :class:`Score` from each run. All runs must be over the same tokens then.

        Returns:
            a function that runs the model over token ids ``[s]`` and calls the visitor with each layer's
            input. Only one layer's queries and keys are held at a time.

        Raises:
            ConfigError: the model cannot be scored.
        """
