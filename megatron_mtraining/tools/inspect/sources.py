# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Models whose attention can be looked at, layer after layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...config import ConfigError
from ...kernels.limits import HEAD_DIMS


class LayerInput(NamedTuple):
    """What one layer's attention is given."""

    layer: int
    """0 is the first."""
    query: Tensor
    """``[s, 1, h, d]``, positions encoded, in the model's dtype; any strides."""
    key: Tensor
    """``[s, 1, hk, d]``, likewise."""
    softmax_scale: float
    value: Tensor | None = None
    """``[s, 1, hk, d]``; None of a source that cannot be scored."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that are known before its weights are read."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    """The longest sequence it is made for, in tokens."""
    vocabulary: int
    """Token ids are below this."""

    def check(self, place: str) -> None:
        """Raise :class:`ConfigError` unless there is a pattern for such heads."""
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"{place} has heads of dimension {self.head_dim}: attention backend mtraining supports "
                f"{HEAD_DIMS}, so inspect a model with one of these"
            )


class Score(NamedTuple):
    """How well a run predicts its text; nats a token."""

    loss: float
    """Mean cross entropy of the next token."""
    divergence: float
    """Mean Kullback-Leibler divergence of the predictions from those of the first run: what the loss is
    expected to grow by, with far less noise than its difference."""


Visitor = Callable[[LayerInput], Tensor | None]
"""Called with each layer's input, in order. What it returns is the layer's attention, ``[s, 1, h, d]``; with
None that is dense. Of Megatron checkpoints it is not looked at."""


class Source(Protocol):
    """A model that has been found and can be supported, and whose weights are not loaded yet."""

    shape: Shape
    description: str
    """Kind and name of the model, for the output."""

    def tokenizer(self) -> Callable[[str], list[int]]:
        """The model's tokenizer, as a function of a text that gives token ids."""

    def loaded(
        self, scored: bool = False
    ) -> AbstractContextManager[Callable[[Tensor, Visitor], Score | None]]:
        """The weights, in memory while the context lasts, as a function that runs the model.

        It takes token ids ``[s]`` and a visitor of each layer's input. Only one layer's queries and keys are
        held at a time.

        Args:
            scored: return a :class:`Score`. All runs are to be of the same tokens then.

        Raises:
            ConfigError: the model cannot be scored.
        """


def open_source(options) -> Source:
    """The model that ``options.model`` names; nothing large is read.

    Raises:
        ConfigError: there is none, or it cannot be inspected; says why and what can.
    """
    path: Path = options.model
    if not path.exists():
        raise ConfigError(
            f"MODEL is {path}, and there is no such file or folder: give a Hugging Face folder, a .gguf "
            "file or a Megatron checkpoint"
        )
    if path.is_file():
        from ...models.hugging_face import open_gguf

        return open_gguf(options)
    if (path / "config.json").is_file():
        from ...models.hugging_face import open_folder

        return open_folder(options)
    from ...models.megatron_checkpoint import is_checkpoint, open_checkpoint

    if is_checkpoint(path):
        return open_checkpoint(options)
    inside = sorted(path.glob("*.gguf"))
    if inside:
        raise ConfigError(f"MODEL is the folder {path}: name the file, such as {inside[0]}")
    raise ConfigError(
        f"MODEL is the folder {path}, which has no config.json (as a Hugging Face model has), and neither "
        "metadata.json nor latest_checkpointed_iteration.txt (as a Megatron checkpoint has)"
    )


# Not the plain one, which writes out all scores.
_LINEAR_MEMORY = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    """Causal attention in memory that is linear in the sequence length.

    Args:
        query ``[b, h, s, d]``; key, value ``[b, hk, s, d]``.

    Returns:
        ``[b, h, s, d]``.
    """
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    with sdpa_kernel(_LINEAR_MEMORY):
        # A key head at a time: neither copies of keys, nor a kernel that knows of groups.
        for head in range(key.shape[1]):
            here = slice(head * group, (head + 1) * group)
            keys, values = (x[:, head : head + 1].expand(-1, group, -1, -1) for x in (key, value))
            out[:, here] = scaled_dot_product_attention(
                query[:, here], keys, values, is_causal=True, scale=softmax_scale
            )
    return out
