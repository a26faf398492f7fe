# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Padding and packed sequences of transformers.

Padding is left out: the tokens of a padded batch entry are attended to as they would be alone. The
``position_ids`` of packed sequences restart at each sequence; each sequence becomes a document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ConfigError
from ..documents import Documents


class Part(NamedTuple):
    """Batch entries that have their tokens at the same places: what one call of attention computes."""

    entries: slice | list[int]
    """The entries, as an index of the batch."""
    first: int
    """Place of their first token."""
    end: int
    """The place after their last token."""
    documents: Documents | None = None
    """Packed documents of these tokens; None for one document."""


class PatternMask:
    """The mask of a batch, which the mask function passes through the model to the attention function. There
    is one per forward, so that what waits for the device does so once, and not in each layer.

    Args:
        spans: place of the first token and place after the last, of each batch entry; None without padding.
        packed: whether transformers has found packed sequences (``position_ids`` that restart). It looks only
            if there is neither a KV cache nor an attention_mask.
    """

    def __init__(self, spans: list[tuple[int, int]] | None, packed: bool):
        self.spans, self.packed = spans, packed
        self._parts: list[Part] | None = None

    def parts(self, position_ids: Tensor | None, batch: int, length: int) -> list[Part]:
        """What to attend to, made at the first call. Unless transformers has found packed sequences, that
        call waits for the device, to see whether ``position_ids`` restart.

        Args:
            position_ids: int ``[b, s]`` or ``[1, s]``; None if the model does not pass them on.
            batch, length: b and s.

        Raises:
            ConfigError: packed sequences without ``position_ids``.
        """
        if self._parts is None:
            self._parts = self._make_parts(position_ids, batch, length)
        return self._parts

    def _make_parts(self, position_ids: Tensor | None, batch: int, length: int) -> list[Part]:
        starts = self._starts(position_ids, batch, length)
        if self.spans is None:
            documents = None if starts is None else Documents(starts, check=False)
            return [Part(slice(None), 0, length, documents)]
        entries_of: dict[tuple[int, int], list[int]] = {}
        for entry, (first, end) in enumerate(self.spans):
            if first < end:
                entries_of.setdefault((first, end), []).append(entry)
        parts = []
        for (first, end), entries in entries_of.items():
            # One entry is a view, several are copied together.
            chosen = slice(entries[0], entries[0] + 1) if len(entries) == 1 else entries
            documents = None
            if starts is not None:
                own = starts[chosen, first:end].clamp(min=first) - first
                documents = Documents(own, check=False)
            parts.append(Part(chosen, first, end, documents))
        return parts

    def _starts(self, position_ids: Tensor | None, batch: int, length: int) -> Tensor | None:
        """The place of the first token of each token's sequence: int64 ``[b, s]``. None if no sequences are
        packed."""
        if position_ids is None:
            if self.packed:
                raise ConfigError(
                    "the batch has packed sequences (position_ids that restart), but the model does not pass "
                    "position_ids on to its attention: leave packing out"
                )
            return None
        device = position_ids.device
        step = position_ids.diff(dim=-1)
        # As in transformers, where it looks: a sequence starts where a position is not the previous position
        # plus 1. Where it does not, positions may skip some.
        restarts = (step != 1 if self.packed else step < 1).expand(batch, -1)
        position = torch.arange(length, device=device)
        if self.spans is not None:  # the positions of padding say nothing
            spans = torch.tensor(self.spans, device=device)
            restarts = restarts & (position[1:] > spans[:, :1]) & (position[1:] < spans[:, 1:])
        if not self.packed and not bool(restarts.any()):
            return None
        starts = torch.zeros(batch, length, dtype=torch.long, device=device)
        starts[:, 1:] = torch.where(restarts, position[1:], 0)
        return starts.cummax(-1).values


class CacheMask(NamedTuple):
    """The mask of queries that read a KV cache."""

    mask: Tensor | None
    """The mask for transformers' ``sdpa``: bool ``[b, 1, s, skv]``, or None."""


def token_spans(tokens: Tensor) -> list[tuple[int, int]] | None:
    """Place of the first token and place after the last, of each batch entry; None if there is no padding.
    Waits for the device, once.

    Args:
        tokens: bool ``[b, s]``: False for padding.

    Raises:
        ConfigError: the tokens of a batch entry are not contiguous.
    """
    stretches = tokens[:, 0].int() + (tokens[:, 1:] & ~tokens[:, :-1]).sum(-1)
    first = tokens.int().argmax(-1)  # 0 of an entry without tokens
    found = torch.stack((stretches, first, tokens.sum(-1))).T.tolist()
    spans = []
    for entry, (count, begin, number) in enumerate(found):
        if count > 1:
            raise ConfigError(
                f"the attention_mask of batch entry {entry} has {count} separate stretches of tokens: "
                "attention mtraining supports padding before and after the tokens; for packed sequences give "
                "position_ids that restart, and no attention_mask"
            )
        spans.append((begin, begin + number))
    return None if all(span == (0, tokens.shape[1]) for span in spans) else spans
