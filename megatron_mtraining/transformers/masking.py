# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Padding and packed sequences of transformers.

Padding is left out: the tokens of a padded batch entry are attended to as they would be alone. Each packed
sequence becomes a document. Where sequences start is said by ``position_ids``, which do not increase there
(positions may skip some), by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by ``seq_idx``, or by an
``attention_mask`` that numbers them; what a batch has of these must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ConfigError
from ..visibility import VisibleRanges
from .sequence import SequenceParallel

_DELTA, _MAMBA = ("cu_seq_lens_q", "seq_idx"), ("seq_idx",)
PACKED_RECURRENT = {
    "qwen3_next": _DELTA, "qwen3_5_text": _DELTA, "qwen3_5_moe_text": _DELTA, "olmo_hybrid": _DELTA,
    "bamba": _MAMBA, "granitemoehybrid": _MAMBA,
}  # fmt: skip
"""What layers of linear attention tell packed sequences apart by, by ``model_type``: convolutions and Mamba-2
by the number of each token's sequence, delta rules by the ends of sequences."""
_NUMBERED_BESIDE_CACHE = (
    "the attention_mask counts packed sequences, and there is a KV cache, as in generate, which takes these "
    "numbers for positions: give 1 for tokens and 0 for padding"
)


class Part(NamedTuple):
    """Batch entries that have their tokens at the same places: what one call of attention computes."""

    entries: slice | list[int]
    """The entries, as an index of the batch."""
    first: int
    """Place of their first token."""
    end: int
    """The place after their last token."""
    documents: VisibleRanges | None = None
    """Packed documents of these tokens; None for one document. With a ring, of those of all ranks."""


class PatternMask:
    """The mask of a batch, which the mask function passes through the model to the attention function. There
    is one per forward, so that what waits for the device does so once, and not in each layer.

    Args:
        given: keyword arguments of the model's forward. Those of :data:`CARRIERS` are read.
        parallel: the ranks whose tokens ``given`` is of, if the model has a part of them; None if all.
        recurrent: the ``model_type`` of a model with layers of linear attention, which tell packed sequences
            apart by what they are given themselves, or not at all; None of others.
    """

    CARRIERS = ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")

    def __init__(
        self, given: dict, parallel: SequenceParallel | None = None, recurrent: str | None = None
    ):
        self.parallel, self._recurrent = parallel, recurrent
        names = ("past_key_values", "cache")  # in older and newer versions of transformers
        self._has_cache = any(given.get(name) is not None for name in names)
        self.given = {name: given[name] for name in self.CARRIERS if given.get(name) is not None}
        self._parts: list[list[Part]] = []
        self._sequences: list[Tensor | None] = []  # the result of _starts, with the parts
        self._function: Callable | None = None
        self._checked: set[int | None] = set()

    def __getitem__(self, index: tuple[slice, ...]) -> PatternMask:
        """All of it: Gemma 4 slices masks where layers share keys, to the queries of the last tokens.

        Raises:
            ConfigError: these are not all tokens.
        """
        if any(each not in (slice(None), slice(0, None)) for each in index):
            raise ConfigError(
                "logits_to_keep is given, by which the model leaves queries out of layers that share keys, "
                "and a pattern is chosen for all of a sequence: leave it out, or give "
                "output_hidden_states=True, with which the model has all queries (in generate, too)"
            )
        return self

    def under(self, function: Callable | None) -> PatternMask:
        """This batch, under a mask function of transformers; None if that is its causal one. What is made of
        the batch is shared."""
        made = copy.copy(self)
        made._function, made._checked = function, set()
        return made

    def check_window(
        self, window: int | None, batch: int, length: int, device: torch.device, place: str
    ) -> None:
        """Raise :class:`ConfigError` unless the model's mask is that of a sliding window of so many keys, or
        of none. Looked at once a forward; waits for the device if the mask is not causal alone.

        Args:
            place: of the layer, for the message.
        """
        if window in self._checked:
            return
        self._checked.add(window)
        if window is not None and (type(window) is not int or window < 1):
            raise ConfigError(f"the {place} has sliding_window {window!r}: give 1 or more, or None")
        if self._function is None and (window is None or window >= length):
            return
        self.parts(batch, length, device)
        begin = self._begins(length, device)  # [b or 1, rows], of this rank's
        row = torch.arange(begin.shape[1], device=device)
        entry = torch.arange(batch, device=device)[:, None]
        first = begin if window is None else (row - window + 1).maximum(begin)
        if self._function is None:
            wrong = bool((first > begin).any())
        else:
            seen = self._function(entry, 0, row, first)
            before = self._function(entry, 0, row, (first - 1).clamp(min=0)) & (first > begin)
            wrong = bool((~seen | before).any())
        if wrong:
            raise ConfigError(
                f"the {place} has {'no sliding window' if window is None else f'sliding_window {window}'}, "
                "but its model's mask is another one: attention mtraining supports causal masks, with the "
                "sliding window that the layer is given"
            )

    def _begins(self, length: int, device: torch.device) -> Tensor:
        """The first token that each of this rank's tokens may see by the mask without a window, int64
        ``[b or 1, s]``: of its sequence, and of its positions that skip none, where transformers cuts."""
        starts = self._sequences[0]
        if starts is None:
            starts = torch.zeros(1, length, dtype=torch.long, device=device)
        if "position_ids" in self.given:
            position_ids = self.given["position_ids"]
            position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
            skips = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0)).to(device)
            place = torch.arange(length, device=device)
            starts = torch.where(skips, place, 0).cummax(-1).values.maximum(starts)
        if self.parallel is None:
            return starts
        own = length // self.parallel.ranks.world
        before = self.parallel.ranks.rank * own
        return (starts[:, before : before + own] - before).clamp(min=0)

    def parts(self, batch: int, length: int, device: torch.device) -> list[Part]:
        """What to attend to, made at the first call, which waits for the device.

        Args:
            batch, length: size of the model's input, over all ranks that have parts of it.

        Raises:
            ConfigError: something given that cannot be, or that differs from what else is given.
        """
        if not self._parts:
            self._parts.append(self._make_parts(batch, length, device))
        return self._parts[0]

    def check_continuation(self) -> None:
        """Raise :class:`ConfigError` if a batch that reads a KV cache says where its sequences start, or is
        a part of one."""
        if self.parallel is not None:
            raise ConfigError(
                "a KV cache is continued with sequence_parallel, where each rank has a part of the sequence: "
                "train without a cache; to generate, call model.eval()"
            )
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
            if name in self.given:
                raise ConfigError(
                    f"{name} is given beside a KV cache: attention to a cache is to all of it; leave it out"
                )
        mask = self.given.get("attention_mask")
        if mask is not None and bool((mask > 1).any()):
            raise ConfigError(_NUMBERED_BESIDE_CACHE)

    def _make_parts(self, batch: int, length: int, device: torch.device) -> list[Part]:
        spans, numbers = None, None
        if "attention_mask" in self.given:
            mask = self._of_tokens("attention_mask", batch, length)
            spans, is_numbered = token_spans(mask)
            numbers = mask if is_numbered else None
            if is_numbered and self._has_cache:
                raise ConfigError(_NUMBERED_BESIDE_CACHE)
        starts = self._starts(spans, numbers, batch, length, device)
        self._sequences.append(starts)
        if self.parallel is not None and self.parallel.ring is not None:
            return self._parts_of_ring(self.parallel, spans, starts, batch, length, device)
        if spans is None:
            documents = None if starts is None else VisibleRanges(starts, check=False)
            return [Part(slice(None), 0, length, documents)]
        entries_of: dict[tuple[int, int], list[int]] = {}
        for entry, (first, end) in enumerate(spans):
            if first < end:
                entries_of.setdefault((first, end), []).append(entry)
        parts = []
        for (first, end), entries in entries_of.items():
            # One entry is a view, several are copied together.
            chosen = slice(entries[0], entries[0] + 1) if len(entries) == 1 else entries
            documents = None
            if starts is not None:
                own = starts[chosen, first:end].clamp(min=first) - first
                documents = VisibleRanges(own, check=False)
            parts.append(Part(chosen, first, end, documents))
        return parts

    @staticmethod
    def _parts_of_ring(
        parallel: SequenceParallel,
        spans: list[tuple[int, int]] | None,
        starts: Tensor | None,
        batch: int,
        length: int,
        device: torch.device,
    ) -> list[Part]:
        """All of this rank's tokens of each entry, or of all entries if none is padded. Padding is not left
        out, as it is anywhere in the striped layout: a token of it sees itself alone, and does not count."""
        end = parallel.padded(length)
        own = end // parallel.ranks.world
        if spans is None and end == length:
            documents = None if starts is None else VisibleRanges(starts, check=False)
            return [Part(slice(None), 0, own, documents)]
        parts = []
        for entry, (first, last) in enumerate(spans or [(0, length)] * batch):
            if first:
                raise ConfigError(
                    f"batch entry {entry} has {first} tokens of padding before its own, and the ranks of "
                    "sequence_parallel cannot share the heads evenly: pad after the tokens"
                )
            start = torch.arange(end, device=device)
            start[:last] = 0 if starts is None else starts[entry, :last]
            rows = torch.arange(last, device=device)
            if last:
                documents = VisibleRanges(start[None], check=False, rows=rows)
                parts.append(Part(slice(entry, entry + 1), 0, own, documents))
        return parts

    def _of_tokens(self, name: str, batch: int, length: int) -> Tensor:
        """What is given of each token."""
        value = self.given[name]
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != [batch, length]:
            raise ConfigError(
                f"{name} is of shape {shape}: attention mtraining takes the two-dimensional {name} of the "
                f"batch, {[batch, length]}"
            )
        return value

    def _starts(
        self,
        spans: list[tuple[int, int]] | None,
        numbers: Tensor | None,
        batch: int,
        length: int,
        device: torch.device,
    ) -> Tensor | None:
        """The place of the first token of each token's sequence: int64 ``[b, s]``. None if no sequences are
        packed."""
        place = torch.arange(1, length, device=device)
        inside = torch.ones(batch, length - 1, dtype=torch.bool, device=device)
        if spans is not None:  # what is said of padding says nothing
            span = torch.tensor(spans, device=device)
            inside = (place > span[:, :1]) & (place < span[:, 1:])
        # By name: whether a sequence starts at a token, of all tokens but the first, bool [b, s - 1].
        found = {}
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if name in self.given:
                found[name] = _after_ends(name, self.given[name], batch, length)
        if "seq_idx" in self.given:
            seq_idx = self._of_tokens("seq_idx", batch, length)
            found["seq_idx"] = _new_numbers("seq_idx", seq_idx, inside)
        if numbers is not None:
            found["attention_mask"] = _new_numbers("attention_mask", numbers, inside)
        if "position_ids" in self.given:
            found["position_ids"] = _restarts(self.given["position_ids"])
        found = {name: each.to(device) & inside for name, each in found.items()}
        if "position_ids" in found and not bool(found["position_ids"].any()):
            # Those that a model or a collator counts for all of a batch entry: they say nothing.
            del found["position_ids"]
        if not found:
            return None
        first, *others = found
        if self._recurrent is not None and bool(found[first].any()):
            self._check_recurrent(self._recurrent, found)
        for name in others:
            differs = found[name] != found[first]
            if bool(differs.any()):
                entry, at = differs.nonzero()[0].tolist()
                raise ConfigError(
                    f"{first} and {name} differ on whether a packed sequence starts at token {at + 1} of "
                    f"batch entry {entry}: leave out the one that is wrong"
                )
        starts = torch.zeros(batch, length, dtype=torch.long, device=device)
        starts[:, 1:] = torch.where(found[first], place, 0)
        return starts.cummax(-1).values

    @staticmethod
    def _check_recurrent(kind: str, found: Container[str]) -> None:
        """Raise :class:`ConfigError` unless a batch has what layers of linear attention tell packed sequences
        apart by."""
        if kind not in PACKED_RECURRENT:
            raise ConfigError(
                f"the batch has packed sequences, which the layers of linear attention of {kind} do not tell "
                f"apart: do not pack (those of {', '.join(PACKED_RECURRENT)} do)"
            )
        wanted = PACKED_RECURRENT[kind]
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ConfigError(
                "the batch has packed sequences, which the model's layers of linear attention know by "
                f"{' and '.join(wanted)} alone: give {' and '.join(missing)}, too "
                "(DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)), or do not "
                "pack"
            )


def _restarts(position_ids: Tensor) -> Tensor:
    """Where positions do not increase, of all tokens but the first: bool ``[b or 1, s - 1]``."""
    # [3, b, s] are of time, height and width, [4, b, s] of text first.
    first = position_ids[0] if position_ids.dim() == 3 else position_ids
    before, after = first[:, :-1], first[:, 1:]
    if position_ids.dim() == 3 and len(position_ids) == 3:
        # Tokens of a picture share a time. A sequence of one token, or picture, begins and ends at 0.
        return (after < before) | (position_ids[..., 1:] == 0).all(0)
    return after <= before


def _new_numbers(name: str, numbers: Tensor, inside: Tensor) -> Tensor:
    """Where the numbers of sequences, int ``[b, s]``, change, of all tokens but the first: bool
    ``[b, s - 1]``.

    Args:
        inside: where to look, of the same shape.
    """
    step = numbers.to(inside.device).diff(dim=-1)
    falls = (step < 0) & inside
    if bool(falls.any()):
        entry, at = falls.nonzero()[0].tolist()
        raise ConfigError(
            f"{name} numbers the packed sequences of batch entry {entry} so that "
            f"{int(numbers[entry, at])} is followed by {int(numbers[entry, at + 1])}, at token {at + 1}: "
            "number them in order"
        )
    return step != 0


def _after_ends(name: str, ends, batch: int, length: int) -> Tensor:
    """Where sequences start that end at ``ends``, counted over all batch entries, of all tokens but the first
    of each: bool ``[b, s - 1]``."""
    try:
        starts = VisibleRanges.from_cu_seqlens(ends, batch * length, device="cpu").start[0].long()
    except ConfigError as error:
        raise ConfigError(f"{name} of the batch: {error}") from error
    begins = (starts == torch.arange(batch * length)).view(batch, length)
    if not bool(begins[:, 0].all()):
        entry = int((~begins[:, 0]).nonzero()[0])
        raise ConfigError(
            f"{name} has a sequence that goes on from batch entry {entry - 1} to {entry}: it counts tokens "
            f"over all entries, {length} in each"
        )
    return begins[:, 1:]


under_way: ContextVar[PatternMask | None] = ContextVar("under_way", default=None)
"""The mask of the forward under way: what transformers gives to mask functions has lost some of it."""


class CacheMask(NamedTuple):
    """The mask of queries that read a KV cache."""

    mask: Tensor | None
    """The mask for transformers' ``sdpa``: bool ``[b, 1, s, skv]``, or None."""


def zeros_and_ones(mask: Tensor) -> Tensor:
    """A mask for all but attention, which take the numbers of packed sequences for factors and positions.

    Raises:
        ConfigError: no tensor.
    """
    if not isinstance(mask, Tensor):
        raise ConfigError(
            f"attention_mask is a {type(mask).__name__}: attention mtraining takes a two-dimensional tensor"
        )
    return mask if mask.is_floating_point() else mask.bool().to(mask.dtype)


def token_spans(mask: Tensor) -> tuple[list[tuple[int, int]] | None, bool]:
    """Place of the first token and place after the last, of each batch entry; None if there is no padding.
    And whether the mask numbers packed sequences. Waits for the device, once.

    Args:
        mask: ``[b, s]``: 0 for padding; 1, or the number of the token's sequence, for others.

    Raises:
        ConfigError: the tokens of a batch entry are not contiguous, there is none in any, or the mask has
            values of another kind, such as those to be added to scores.
    """
    tokens = mask.bool()
    odd = (mask != tokens).any(-1)  # beyond 0 and 1
    wrong = odd if mask.is_floating_point() else (mask < 0).any(-1)
    stretches = tokens[:, 0].int() + (tokens[:, 1:] & ~tokens[:, :-1]).sum(-1)
    first = tokens.int().argmax(-1)  # 0 of an entry without tokens
    found = torch.stack((stretches, first, tokens.sum(-1), odd, wrong)).T.tolist()
    spans = []
    for entry, (count, begin, number, _, is_wrong) in enumerate(found):
        if is_wrong:
            raise ConfigError(
                f"the attention_mask of batch entry {entry} is {mask.dtype} with values other than 0 and 1: "
                "give 1 for tokens and 0 for padding, or whole numbers that count packed sequences from 1"
            )
        if count > 1:
            raise ConfigError(
                f"the attention_mask of batch entry {entry} has {count} separate stretches of tokens: "
                "attention mtraining supports padding before and after the tokens; for packed sequences give "
                "position_ids that restart, and no attention_mask"
            )
        spans.append((begin, begin + number))
    if all(begin == end for begin, end in spans):
        raise ConfigError("the attention_mask is 0 everywhere: give 1 for tokens")
    whole = all(span == (0, mask.shape[1]) for span in spans)
    return None if whole else spans, any(odd for *_, odd, _ in found)
