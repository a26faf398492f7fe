# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Documents packed into one sequence: which tokens may see each other at all.

Documents are contiguous, so ``k <= i`` and ``doc(k) == doc(i)`` together are ``start(i) <= k <= i``, with
``start(i)`` the first token of i's document: one number a token. For blocks this gives bounds. A query block
sees no key block before the one of its first row's start, and all key blocks from its last row's start on;
between the two it needs a mask of tokens. Documents are made once per batch and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError, check_whole
from .layout import WHOLE, block_at, check_rank, inner_size, positions_at
from .tensors import check_values

MOST_TOKENS = 2**24
"""Tokens of a sequence with documents: the kernels compare positions as float32."""


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


@dataclass(frozen=True)
class LocalDocuments:
    """What the kernels of one rank need of documents; of N tokens in NB blocks, s and nb of them here.

    Attributes:
        start: int32 ``[b, s]``: where the documents of this rank's tokens start, as positions over all ranks.
        start_f32: float32, the same.
        kv_block_bounds: int32 ``[b, 2, nb]``, by own query block: the first key block that it attends to
            (first_kv_block), and the first from which on it needs no document mask
            (first_unmasked_kv_block). Blocks are numbered over all ranks.
        q_block_bounds: int32 ``[b, 2, NB]``, by key block: the end of the query blocks that need no document
            mask for it (end_unmasked_q_block), and the end of those that attend to it (end_q_block).
    """

    start: Tensor
    start_f32: Tensor
    kv_block_bounds: Tensor
    q_block_bounds: Tensor


class Costs(NamedTuple):
    """What the pattern search needs of documents: how much slashes and columns add."""

    further: Tensor
    """int32 ``[b, NB]``: how many query blocks after a key block see something of it."""
    seen: Tensor
    """float32 ``[b, NB]``, by block distance: visible pairs, in pairs of whole blocks times ``factor``."""
    factor: Tensor
    """float32 ``[b]``: causal pairs of the sequence over visible ones."""


class Documents:
    """Documents of a batch of sequences.

    Args:
        starts: int ``[b, N]``: for each token of the whole sequence, whatever rank it lives on, the position
            of the first token of its document. 0 all over is one document.
        check: look whether they are that. On a GPU this waits for the device; where False, the device looks
            later, and stops if they are not.

    Raises:
        ConfigError: they are not such positions; named with the first that is wrong.
    """

    def __init__(self, starts: Tensor, check: bool = True):
        check_values(starts=starts)
        if starts.dim() != 2 or 0 in starts.shape or starts.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"starts of documents are {starts.dtype} {list(starts.shape)}: give int32 or int64 "
                "[batch, tokens of the whole sequence]"
            )
        if starts.shape[1] > MOST_TOKENS:
            raise ConfigError(
                f"a sequence of {starts.shape[1]} tokens is too long for packed documents: use at most "
                f"{MOST_TOKENS}"
            )
        self.starts = starts.detach().int().contiguous()
        self._local: dict[tuple, LocalDocuments] = {}
        self._pairs: dict[int, Tensor] = {}
        self._costs: dict[int, Costs] = {}
        self._once: dict[Hashable, Tensor] = {}
        position = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device)
        # Of the numbers as they are given: 2^32 would be 0 in int32.
        given = starts.detach()
        before = given.roll(1, 1)
        before[:, 0] = 0
        wrong = (given != before) & (given != position)
        # On the CPU it costs nothing to look.
        if (check or not starts.is_cuda) and bool(wrong.any()):
            entry, at = wrong.nonzero()[0].tolist()
            raise ConfigError(
                f"documents are wrong: token {at} of batch entry {entry} has its document start at "
                f"{int(given[entry, at])}, but the token before at {int(before[entry, at])}; it must "
                f"be the same, or {at}"
            )
        torch._assert_async(
            ~wrong.any(), "documents do not start where a token before has ended one"
        )
        self._is_start = self.starts == position

    @classmethod
    def from_lengths(cls, lengths, seq_length: int, device=None) -> Documents:
        """Of the lengths of documents, a list of numbers for each batch entry (or one list for one entry).

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
    def from_cu_seqlens(cls, cu_seqlens: Tensor, seq_length: int, device=None) -> Documents:
        """Of where documents end, as flash attention has it: ascending ``[0, end of the first, ...,
        seq_length]``, one dimension (or one row), of one batch entry; equal ones are filling. Read on the
        host.

        Raises:
            ConfigError: they do not begin with 0, descend, or do not end with ``seq_length``.
        """
        check_whole(seq_length=seq_length)
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
        return cls.from_lengths(
            lengths[lengths > 0].tolist(), seq_length, device or getattr(cu_seqlens, "device", None)
        )

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, check: bool = True) -> Documents:
        """Of position ids that restart at 0 with each document: int ``[b, N]``, of the whole sequence.

        Raises:
            ConfigError: as for :class:`Documents`.
        """
        check_values(position_ids=position_ids)
        if position_ids.dim() != 2 or position_ids.dtype not in WHOLE:
            raise ConfigError(
                f"position_ids are {position_ids.dtype} {list(position_ids.shape)}: give whole numbers "
                "[batch, tokens of the whole sequence]"
            )
        position = torch.arange(position_ids.shape[-1], device=position_ids.device)
        return cls(position - position_ids, check)

    @property
    def batch(self) -> int:
        """b."""
        return self.starts.shape[0]

    @property
    def seq_length(self) -> int:
        """N."""
        return self.starts.shape[1]

    def check(self, batch: int, seq_length: int, device) -> None:
        """Raise :class:`ConfigError` unless these documents have this batch size and sequence length,
        on ``device``."""
        if tuple(self.starts.shape) != (batch, seq_length):
            raise ConfigError(
                f"documents are of {self.batch} sequences of {self.seq_length} tokens, but there are "
                f"{batch} of {seq_length} (over all context-parallel ranks)"
            )
        if self.starts.device != device:
            raise ConfigError(
                f"documents are on {self.starts.device}, but the queries on {device}: put them there "
                "once a batch"
            )

    def ends(self) -> Tensor:
        """The last token of each token's document: int32 ``[b, N]``."""
        if not hasattr(self, "_ends"):
            n = self.seq_length
            last = self._is_start.roll(-1, 1)
            last[:, -1] = True
            position = torch.arange(n, dtype=torch.int32, device=last.device)
            ends = torch.where(last, position, n - 1)
            self._ends = ends.flip(1).cummin(1).values.flip(1)
        return self._ends

    def on(self, rank: int, world: int, inner: int | None, block_size: int) -> LocalDocuments:
        """The documents of one rank in the striped layout (:mod:`.layout`); computed once.

        Raises:
            ConfigError: there is no such layout or rank.
        """
        inner = inner_size(world, inner)
        at = (rank, world, inner, block_size)
        if at not in self._local:
            self._local[at] = self._on(*at)
        return self._local[at]

    def _on(self, rank, world, inner, block) -> LocalDocuments:
        n, device = self.seq_length, self.starts.device
        check_rank(rank, world)
        _check_block(block)
        if world > 1 and n % (block * world):
            raise ConfigError(
                f"documents of {n} tokens cannot be striped in blocks of {block} over {world} ranks"
            )
        num_blocks = -(-n // block)
        local = torch.arange(n // world, device=device)
        start = self.starts[:, positions_at(local, rank, world, block, inner)]
        own = block_at(torch.arange(num_blocks // world, device=device), rank, world, inner)
        first = own * block
        last = (first + block - 1).clamp(max=n - 1)
        kv_bounds = (self.starts[:, first] // block, (self.starts[:, last] + block - 1) // block)
        every = torch.arange(num_blocks, device=device) * block
        ends = self.ends()
        # The last block of queries may be partial; its rows that are not there need no mask.
        whole = (ends[:, every] + 1) // block
        whole = torch.where(ends[:, every] == n - 1, num_blocks, whole)
        seen = ends[:, (every + block - 1).clamp(max=n - 1)] // block + 1
        return LocalDocuments(
            start.contiguous(),
            start.float(),
            torch.stack(kv_bounds, 1).int().contiguous(),
            torch.stack((whole, seen), 1).int().contiguous(),
        )

    def pairs(self, block: int) -> Tensor:
        """Visible pairs of a query and a key by block distance: float64 ``[b, NB]``, exact."""
        if block not in self._pairs:
            _check_block(block)
            n, device = self.seq_length, self.starts.device
            num_blocks = -(-n // block)
            position = torch.arange(n, device=device)
            starts = self.starts.long()
            apart = position // block - starts // block
            # A row sees part of the block where its document starts, all blocks between, and its own block
            # up to itself.
            part = torch.where(apart > 0, block - starts % block, 0).double()
            pairs = torch.zeros(self.batch, num_blocks + 1, dtype=torch.float64, device=device)
            rows = pairs.clone().scatter_add_(1, apart, torch.ones_like(part))
            further = (
                rows.flip(1).cumsum(1).flip(1).roll(-1, 1)
            )  # rows that see more than d blocks back
            pairs.scatter_add_(1, apart, part)
            pairs += further * block
            own = position - torch.maximum(starts, position // block * block) + 1
            pairs[:, 0] = own.sum(1).double()
            self._pairs[block] = pairs[:, :num_blocks].contiguous()
        return self._pairs[block]

    def once(self, what: Hashable, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``make`` returns for the starts; kept by the name ``what``."""
        if what not in self._once:
            self._once[what] = make(self.starts)
        return self._once[what]

    def costs(self, block: int) -> Costs:
        """See :class:`Costs`; kept."""
        if block not in self._costs:
            n, pairs = self.seq_length, self.pairs(block)
            factor = n * (n + 1) / 2 / pairs.sum(1)
            every = torch.arange(pairs.shape[1], device=pairs.device)
            last = (every * block + block - 1).clamp(max=n - 1)
            self._costs[block] = Costs(
                (self.ends()[:, last] // block - every).int().contiguous(),
                (pairs / block**2 * factor[:, None]).float(),
                factor.float(),
            )
        return self._costs[block]
