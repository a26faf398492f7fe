# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Padding and packed sequences of transformers as packed documents.

The tokens of a padded batch entry become one document. The padding before them and the padding after them
become documents of their own, which no other token attends to. The ``position_ids`` of packed sequences
restart at each sequence; each sequence becomes a document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ConfigError
from ..documents import Documents


class PatternMask:
    """The mask of a padded or packed batch, which the mask function passes through the model to the attention
    function. There is one per forward.

    Args:
        tokens: bool ``[b, s]``: False for padding; None without padding.
        packed: whether transformers has found packed sequences (``position_ids`` that restart).
    """

    def __init__(self, tokens: Tensor | None, packed: bool):
        self.tokens, self.packed = tokens, packed
        self._documents: Documents | None = None
        self._ends: bool | None = None

    def ends_in_padding(self) -> bool:
        """Whether some batch entry has padding after its tokens. Waits for the device, once."""
        if self._ends is None:
            self._ends = self.tokens is not None and not bool(self.tokens[:, -1].all())
        return self._ends

    def documents(self, position_ids: Tensor | None, batch: int, length: int) -> Documents:
        """The documents of the batch, made at the first call.

        Args:
            position_ids: int ``[b, s]`` or ``[1, s]``; None if the model does not pass them on.
            batch, length: b and s.

        Raises:
            ConfigError: packed sequences without ``position_ids``.
        """
        if self._documents is None:
            self._documents = self._make_documents(position_ids, batch, length)
        return self._documents

    def _make_documents(self, position_ids: Tensor | None, batch: int, length: int) -> Documents:
        if self.packed and position_ids is None:
            raise ConfigError(
                "the batch has packed sequences (position_ids that restart), but the model does not pass "
                "position_ids on to its attention: leave packing out"
            )
        device = position_ids.device if self.tokens is None else self.tokens.device
        starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
        starts[:, 0] = True
        if self.tokens is not None:
            starts[:, 1:] |= self.tokens[:, 1:] != self.tokens[:, :-1]
        if self.packed:
            # As in transformers: a sequence starts where a position is not the previous position plus 1.
            restarts = position_ids.diff(dim=-1) != 1
            starts[:, 1:] |= restarts if self.tokens is None else restarts & self.tokens[:, 1:]
        position = torch.arange(length, device=device)
        return Documents(torch.where(starts, position, 0).cummax(-1).values, check=False)


class CacheMask(NamedTuple):
    """The mask of queries that read a KV cache."""

    mask: Tensor | None
    """The mask for transformers' ``sdpa``: bool ``[b, 1, s, skv]``, or None."""


def check_padding(tokens: Tensor) -> None:
    """Raise :class:`ConfigError` unless the tokens of each batch entry are contiguous. Waits for the device.

    Args:
        tokens: bool ``[b, s]``: False for padding.
    """
    stretches = tokens[:, 0].int() + (tokens[:, 1:] & ~tokens[:, :-1]).sum(-1)
    if bool((stretches > 1).any()):
        entry = int((stretches > 1).nonzero()[0])
        raise ConfigError(
            f"the attention_mask of batch entry {entry} has {int(stretches[entry])} separate stretches of "
            "tokens: attention mtraining supports padding before and after the tokens; for packed sequences "
            "give position_ids that restart, and no attention_mask"
        )
