# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Visible ranges: which keys a query may attend to at all, whatever the pattern.

Query ``i`` sees the keys ``start(i) <= k <= i``, and key ``k`` is seen by the queries ``k <= i <= end(k)``.
Neither descends, so ``end`` follows from ``start``: one number a token. Packed documents, padded sequences
and sliding windows are such ranges. For blocks this gives bounds. A query block sees no key block before the
one of its first row's start, and all key blocks from its last row's start on; between the two it needs a mask
of tokens. Ranges are made once per batch and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError, check_whole
from .layout import WHOLE, block_at, check_rank, inner_size, positions_at
from .tensors import check_values

MOST_TOKENS = 2**24
"""Tokens of a sequence with visible ranges: the kernels compare positions as float32."""


def _whole_numbers(values, name: str) -> Tensor:
    """int64, on the host. Fractions are refused, not cut."""
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ConfigError(f"{name} are {values!r}: give a list of whole numbers") from None
    check_values(**{name: values})
    found = values.detach().cpu()
    if found.dtype not in WHOLE and found.numel():
        raise ConfigError(f"{name} are of {found.dtype}: give whole numbers")
    return found.long()


def _check_block(block: int) -> None:
    """Raise :class:`ConfigError` unless a block has tokens."""
    check_whole(block_size=block)
    if block < 1:
        raise ConfigError(f"block_size is {block}: use 1 or more")


def _refuse(start: Tensor, check: bool, kind: str) -> None:
    """Raise :class:`ConfigError` with the first of ``start``, ``[b, N]``, that is wrong for a ``kind`` of
    ranges; on a GPU, unless ``check``, the device stops later."""
    # Of the numbers as they are given: 2^32 would be 0 in int32.
    given, before = start.detach(), start.detach().roll(1, 1)
    before[:, 0] = 0
    position = torch.arange(start.shape[1], dtype=torch.int32, device=start.device)
    if kind == "document":
        wrong, wanted = (given != before) & (given != position), "the same, or"
    else:
        wrong, wanted = (given < before) | (given > position), "from there to"
    # On the CPU it costs nothing to look.
    if (check or not start.is_cuda) and bool(wrong.any()):
        entry, at = wrong.nonzero()[0].tolist()
        raise ConfigError(
            f"{kind}s are wrong: token {at} of batch entry {entry} has its {kind} start at "
            f"{int(given[entry, at])}, but the token before at {int(before[entry, at])}; it must be "
            f"{wanted} {at}"
        )
    torch._assert_async(~wrong.any(), f"{kind}s do not start from the token before's on")


@dataclass(frozen=True)
class LocalRanges:
    """What the kernels of one rank need of visible ranges; of N tokens in NB blocks, s and nb of them here.

    Attributes:
        start: int32 ``[b, s]``: the first key that each of this rank's queries sees, as a position over all
            ranks.
        start_f32: float32, the same.
        kv_block_bounds: int32 ``[b, 2, nb]``, by own query block: the first key block that it attends to
            (first_kv_block), and the first that all of its queries see whole, as they see those after it
            (first_unmasked_kv_block). Blocks are numbered over all ranks.
        q_block_bounds: int32 ``[b, 2, NB]``, by key block: the end of the query blocks that see it whole
            (end_unmasked_q_block), and the end of those that attend to it (end_q_block).
    """

    start: Tensor
    start_f32: Tensor
    kv_block_bounds: Tensor
    q_block_bounds: Tensor


class Costs(NamedTuple):
    """What the pattern search needs of visible ranges: how much slashes and columns add."""

    further: Tensor
    """int32 ``[b, NB]``: how many query blocks after a key block see something of it."""
    seen: Tensor
    """float32 ``[b, NB]``, by block distance: visible pairs, in pairs of whole blocks times ``factor``."""
    factor: Tensor
    """float32 ``[b]``: causal pairs of the sequence over visible ones."""


class VisibleRanges:
    """The visible ranges of a batch of sequences.

    Args:
        start: int ``[b, N]``: for each token of the whole sequence, whatever rank it lives on, the position
            of the first key that it sees. It never descends. 0 all over is causal attention.
        check: look whether they are that. On a GPU this waits for the device; where False, the device looks
            later, and stops if they are not.
        rows: int64 ``[M]``, ascending: the tokens that are no padding, of one batch entry; None if all are.
            A token of padding sees itself alone. No pattern is searched from it, and its pair does not count.

    Attributes:
        start: int32 ``[b, N]``.
        rows: as given.

    Raises:
        ConfigError: they are not such positions; named with the first that is wrong.
    """

    def __init__(self, start: Tensor, check: bool = True, rows: Tensor | None = None):
        check_values(start=start)
        if start.dim() != 2 or 0 in start.shape or start.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"starts of visible ranges are {start.dtype} {list(start.shape)}: give int32 or int64 "
                "[batch, tokens of the whole sequence]"
            )
        if start.shape[1] > MOST_TOKENS:
            raise ConfigError(
                f"a sequence of {start.shape[1]} tokens is too long for visible ranges: use at most "
                f"{MOST_TOKENS}"
            )
        # A copy: a backward reads it, and a loop may fill its buffer for the next batch before.
        self.start = start.detach().to(torch.int32, copy=True).contiguous()
        self.rows = rows
        self._once: dict[Hashable, Any] = {}
        _refuse(start, check, "visible range")

    @classmethod
    def from_lengths(cls, lengths, seq_length: int, device=None) -> VisibleRanges:
        """Of packed documents, by their lengths: a list of numbers for each batch entry (or one list for one
        entry).

        Raises:
            ConfigError: a length is not positive, or they do not add up to ``seq_length``.
        """
        check_whole(seq_length=seq_length)
        if isinstance(lengths, Tensor):
            lengths = lengths.unbind() if lengths.dim() > 1 else [lengths]
        # A set has no order, and a text no lengths.
        if not isinstance(lengths, Iterable) or isinstance(lengths, str | bytes | Set | Mapping):
            raise ConfigError(
                f"lengths of documents are a {type(lengths).__name__}: give a list of numbers, or one for "
                "each batch entry"
            )
        lengths = list(lengths)
        if not lengths or not isinstance(lengths[0], list | tuple | Tensor):
            lengths = [lengths]
        starts = []
        for entry, own in enumerate(lengths):
            own = _whole_numbers(own, name := f"lengths of documents of batch entry {entry}")
            if own.dim() != 1:
                raise ConfigError(f"{name} have {own.dim()} dimensions: give one list of numbers")
            if (own > seq_length).any():  # they may be too large to add
                at = int((own > seq_length).nonzero()[0])
                raise ConfigError(
                    f"document {at} of batch entry {entry} has {int(own[at])} tokens, but the sequence "
                    f"{seq_length}: their lengths must add up to it"
                )
            if (own <= 0).any():
                at = int((own <= 0).nonzero()[0])
                raise ConfigError(
                    f"document {at} of batch entry {entry} has {int(own[at])} tokens: use 1 or more"
                )
            if int(own.sum()) != seq_length:
                raise ConfigError(
                    f"the {len(own)} documents of batch entry {entry} have {int(own.sum())} tokens, but the "
                    f"sequence {seq_length}: their lengths must add up to it"
                )
            starts.append((own.cumsum(0) - own).repeat_interleave(own))
        return cls(torch.stack(starts).to(device), check=False)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, seq_length: int, device=None, lengths: Tensor | None = None
    ) -> VisibleRanges:
        """Of packed documents, by where they end, as flash attention has it: ascending ``[0, end of the
        first, ..., seq_length]``, one dimension (or one row), of one batch entry; equal ones are filling.
        Read on the host.

        Args:
            lengths: int ``[documents]``, on the host: their tokens without padding, which comes last; None if
                there is none, or it is not known.

        Raises:
            ConfigError: they do not begin with 0, descend, or do not end with ``seq_length``; a length is
                more than its document has.
        """
        check_whole(seq_length=seq_length)
        own = None if lengths is None else _whole_numbers(lengths, "lengths of documents")
        ends = _whole_numbers(cu_seqlens, "cu_seqlens")
        if ends.dim() > 1 and ends.numel() != ends.shape[-1]:
            raise ConfigError(
                f"cu_seqlens are of shape {list(ends.shape)}: give one list, of one batch entry"
            )
        ends = ends.flatten()
        lengths = ends.diff()
        if len(ends) < 2 or int(ends[0]) != 0 or int(ends[-1]) != seq_length or (lengths < 0).any():
            shown = ", ".join(str(int(end)) for end in ends[:6])
            raise ConfigError(
                f"cu_seqlens are [{shown}{', ...' if len(ends) > 6 else ''}] up to "
                f"{int(ends[-1]) if len(ends) else None}: they must ascend from 0 to the {seq_length} tokens "
                "of the sequence"
            )
        device = device or getattr(cu_seqlens, "device", None)
        if own is None or own.equal(lengths):
            return cls.from_lengths(lengths[lengths > 0].tolist(), seq_length, device)
        if own.shape != lengths.shape or ((own < 0) | (own > lengths)).any():
            raise ConfigError(
                f"documents have {own.tolist()[:6]} tokens without padding, but {lengths.tolist()[:6]} with "
                "it: give for each document at most as many"
            )
        position = torch.arange(seq_length)
        start = ends[:-1].repeat_interleave(lengths)
        is_padding = position >= start + own.repeat_interleave(lengths)
        rows = None if is_padding.all() else (~is_padding).nonzero().flatten().to(device)
        return cls(torch.where(is_padding, position, start)[None].to(device), False, rows)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, check: bool = True) -> VisibleRanges:
        """Of packed documents, by position ids that restart at 0 with each: int ``[b, N]``, of the whole
        sequence.

        Args:
            check: as for :class:`VisibleRanges`.

        Raises:
            ConfigError: they are not such position ids; named with the first that is wrong.
        """
        check_values(position_ids=position_ids)
        shape = position_ids.shape
        if len(shape) != 2 or 0 in shape or position_ids.dtype not in WHOLE:
            raise ConfigError(
                f"position_ids are {position_ids.dtype} {list(shape)}: give whole numbers "
                "[batch, tokens of the whole sequence]"
            )
        position = torch.arange(shape[1], device=position_ids.device)
        start = position - position_ids
        _refuse(start, check, "document")
        return cls(start, check=False)

    def windowed(self, size: int) -> VisibleRanges:
        """These ranges within a sliding window: a query sees its own key and ``size - 1`` before it, at most.

        Raises:
            ConfigError: the size is not 1 or more.
        """
        check_whole(window_size=size)
        if size < 1:
            raise ConfigError(f"window_size is {size}: use 1 or more")
        first = torch.arange(1 - size, self.seq_length + 1 - size, device=self.start.device)
        return VisibleRanges(torch.maximum(self.start, first), check=False, rows=self.rows)

    @property
    def batch(self) -> int:
        """b."""
        return self.start.shape[0]

    @property
    def seq_length(self) -> int:
        """N."""
        return self.start.shape[1]

    def check(self, batch: int, seq_length: int, device) -> None:
        """Raise :class:`ConfigError` unless these ranges have this batch size and sequence length,
        on ``device``."""
        if tuple(self.start.shape) != (batch, seq_length):
            raise ConfigError(
                f"documents are of {self.batch} sequences of {self.seq_length} tokens, but there are "
                f"{batch} of {seq_length} (over all context-parallel ranks)"
            )
        if self.start.device != device:
            raise ConfigError(
                f"documents are on {self.start.device}, but the queries on {device}: put them there "
                "once a batch"
            )

    @cached_property
    def end(self) -> Tensor:
        """The last query that sees each key: int32 ``[b, N]``."""
        position = torch.arange(self.seq_length, dtype=torch.int32, device=self.start.device)
        keys = position.expand_as(self.start).contiguous()
        return torch.searchsorted(self.start, keys, right=True, out_int32=True) - 1

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns; kept by the name ``what``."""
        if what not in self._once:
            self._once[what] = make()
        return self._once[what]

    def on(self, rank: int, world: int, inner: int | None, block_size: int) -> LocalRanges:
        """The ranges of one rank in the striped layout (:mod:`.layout`); computed once.

        Raises:
            ConfigError: there is no such layout or rank.
        """
        at = (rank, world, inner_size(world, inner), block_size)
        return self.once(("on", *at), lambda: self._on(*at))

    def _on(self, rank, world, inner, block) -> LocalRanges:
        n, device = self.seq_length, self.start.device
        check_rank(rank, world)
        _check_block(block)
        if world > 1 and n % (block * world):
            raise ConfigError(
                f"documents of {n} tokens cannot be striped in blocks of {block} over {world} ranks"
            )
        num_blocks = -(-n // block)
        local = torch.arange(n // world, device=device)
        start = self.start[:, positions_at(local, rank, world, block, inner)]
        own = block_at(torch.arange(num_blocks // world, device=device), rank, world, inner)
        first = own * block
        last = (first + block - 1).clamp(max=n - 1)
        kv_bounds = (self.start[:, first] // block, (self.start[:, last] + block - 1) // block)
        every = torch.arange(num_blocks, device=device) * block
        ends = self.end
        # The last block of queries may be partial; its rows that are not there need no mask.
        whole = (ends[:, every] + 1) // block
        whole = torch.where(ends[:, every] == n - 1, num_blocks, whole)
        seen = ends[:, (every + block - 1).clamp(max=n - 1)] // block + 1
        return LocalRanges(
            start.contiguous(),
            start.float(),
            torch.stack(kv_bounds, 1).int().contiguous(),
            torch.stack((whole, seen), 1).int().contiguous(),
        )

    def pairs(self, block: int) -> Tensor:
        """Visible pairs of a query and a key by block distance, without those of padding: float64 ``[b,
        NB]``, exact; kept."""
        return self.once(("pairs", block), lambda: self._pairs(block))

    def _pairs(self, block: int) -> Tensor:
        _check_block(block)
        n, device = self.seq_length, self.start.device
        num_blocks = -(-n // block)
        position = torch.arange(n, device=device)
        start = self.start.long()
        apart = position // block - start // block
        # A row sees part of the block where its range starts, all blocks between, and its own block
        # up to itself.
        part = torch.where(apart > 0, block - start % block, 0).double()
        pairs = torch.zeros(self.batch, num_blocks + 1, dtype=torch.float64, device=device)
        rows = pairs.clone().scatter_add_(1, apart, torch.ones_like(part))
        further = rows.flip(1).cumsum(1).flip(1).roll(-1, 1)  # see more than d blocks back
        pairs.scatter_add_(1, apart, part)
        pairs += further * block
        own = position - torch.maximum(start, position // block * block) + 1
        if self.rows is not None:
            own = own[:, self.rows]
        pairs[:, 0] = own.sum(1).double()
        return pairs[:, :num_blocks].contiguous()

    def costs(self, block: int) -> Costs:
        """See :class:`Costs`; kept."""
        return self.once(("costs", block), lambda: self._costs(block))

    def _costs(self, block: int) -> Costs:
        n, pairs = self.seq_length, self.pairs(block)
        factor = n * (n + 1) / 2 / pairs.sum(1)
        every = torch.arange(pairs.shape[1], device=pairs.device)
        last = (every * block + block - 1).clamp(max=n - 1)
        return Costs(
            (self.end[:, last] // block - every).int().contiguous(),
            (pairs / block**2 * factor[:, None]).float(),
            factor.float(),
        )
