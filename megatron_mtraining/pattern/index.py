# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The vertical-slash index: which keys each query head sees, in the coordinates the kernels use.

With blocks of ``B`` tokens, query ``i`` attends to key ``k`` exactly when

    k <= i   and   ( blk(i) - blk(k) in D   or   k in V )

for a set ``D`` of block distances (0 always in) and a set ``V`` of token columns, per batch entry and
query head. Nothing of the size of blocks x blocks is built.

In the block-striped layout over ``W`` ranks with ``nb`` local blocks each, a ring step whose queries
and keys are ``t`` ranks apart sees the distances ``d = e * W + t``: local query block ``a`` meets local
key block ``c = a - e - wrap``, where ``wrap`` is 1 if the keys come from a higher rank, else 0. So the
list of slashes is sorted by (residue t, quotient e), and prefix counts give any loop its bounds without
a search, forward (query blocks) and backward (key blocks) alike. Columns are gathered from all ranks and
attended in one step of each head: query block ``i`` sees the first ``column_ptr[i]`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import index_lists


@dataclass(frozen=True)
class VerticalSlashIndex:
    """A step's pattern of one layer. Every tensor is on the device of the queries, and identical on
    all context-parallel ranks.

    Attributes:
        slash_member: uint8 ``[b, h, W, nb]``: whether distance ``e * W + t`` is in D, at ``[t, e]``.
        slash_list: int16 ``[b, h, L]``: quotients ``e`` of D sorted by (t, e); undefined past the count.
        slash_ptr: int32 ``[b, h, W * nb + 1]``: how many of D come before ``(t, e)``, at ``t * nb + e``.
        columns: int32 ``[b, h, C]``: V ascending, positions over all ranks; N past the count.
        column_ptr: int32 ``[b, h, W * nb + 1]``: how many of V come before each block.
        seq_length, block_size, world: N tokens in all, B, W.

    A head takes 11 bytes a block of the sequence and 4 a column: 49 KB at 512K tokens with 1000 columns.
    """

    slash_member: Tensor
    slash_list: Tensor
    slash_ptr: Tensor
    columns: Tensor
    column_ptr: Tensor
    seq_length: int
    block_size: int
    world: int

    @property
    def local_blocks(self) -> int:
        """Blocks on each rank (nb)."""
        return self.slash_member.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes the index holds on the device."""
        tensors = (
            self.slash_member, self.slash_list, self.slash_ptr, self.columns, self.column_ptr,
        )  # fmt: skip
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def work(self) -> Tensor:
        """Attended pairs, float64 ``[b, h, rank, distance]``, exact; on the index's device.

        At distance ``t``, step t of a flat ring, rank ``r`` takes the keys of rank ``(r - t) % W``, and the
        columns, of all ranks, of the heads h with ``h * W // H == t``.
        """
        world, nb, block = self.world, self.local_blocks, self.block_size
        device = self.slash_member.device
        member = self.slash_member.double()
        e = torch.arange(nb, device=device)
        out = member.new_zeros(*member.shape[:2], world, world)
        for rank in range(world):
            for t in range(world):
                wrap = int((rank - t) % world > rank)
                blocks = (nb - e - wrap).clamp(min=0)
                out[:, :, rank, t] = (member[:, :, t] * blocks).sum(-1) * block * block
        out[..., 0] -= nb * block * (block - 1) / 2
        columns = self._columns_seen().unflatten(-1, (nb, world)).sum(-2) * block
        for head in range(member.shape[1]):
            out[:, head, :, head * world // member.shape[1]] += columns[:, head]
        # Queries of the global last block are fewer when N is not a multiple of B (one rank only).
        missing = world * nb * block - self.seq_length
        if missing:
            out[:, :, 0, 0] -= missing * self._keys_of_last_query()
        return out

    def _columns_seen(self) -> Tensor:
        """Columns that each query block attends to as columns: float64 ``[b, h, W * nb]``.

        A column in block ``j`` is seen by the blocks ``i > j`` with ``i - j`` not in D: counted by
        distance, as the product of two polynomials.
        """
        counts = self.column_ptr.diff(dim=-1).double()
        outside = (~self.distances()).double()
        length = 2 * counts.shape[-1]
        product = torch.fft.rfft(counts, length) * torch.fft.rfft(outside, length)
        return torch.fft.irfft(product, length)[..., : counts.shape[-1]].round()

    def _keys_of_last_query(self) -> Tensor:
        """Keys that a query past the end would see, averaged over those of the last block: [b, h]."""
        nb, block = self.local_blocks, self.block_size
        kept = self.seq_length - (nb - 1) * block
        slashes = self.slash_member[:, :, 0].double().sum(-1)
        return (slashes - 1) * block + self._columns_seen()[..., -1] + (block + kept + 1) / 2

    def density(self) -> Tensor:
        """Share of the causal pairs that is attended: float32 ``[b, h]``, on the index's device.

        The sum of :meth:`work`, in a few operations whatever the number of ranks.
        """
        block, distances = self.block_size, self.distances()
        num_blocks = distances.shape[-1]
        missing = num_blocks * block - self.seq_length
        far = torch.arange(num_blocks, device=distances.device)
        slash = (distances.double() * (num_blocks - far)).sum(-1) * block * block
        slash = slash - num_blocks * block * (block - 1) / 2
        # A column in block c is seen by the distances up to NB - 1 - c that are not in D.
        outside = (~distances).long().cumsum(-1).flip(-1).double()
        pairs = slash + (self.column_ptr.diff(dim=-1) * outside).sum(-1) * block
        if missing:
            pairs = pairs - missing * self._keys_of_last_query()
        return (pairs / (self.seq_length * (self.seq_length + 1) / 2)).float()

    def distances(self) -> Tensor:
        """D as bool ``[b, h, W * nb]``, by global block distance."""
        return self.slash_member.transpose(-1, -2).flatten(-2).bool()

    def token_mask(self, batch: int, head: int) -> Tensor:
        """The pattern of one head written out: bool ``[N, N]`` (query, key). For small N only."""
        distances = self.distances()[batch, head]
        position = torch.arange(self.seq_length, device=distances.device)
        block = position // self.block_size
        mask = distances[(block[:, None] - block[None, :]).clamp(min=0)]
        count = int(self.column_ptr[batch, head, -1])
        mask[:, self.columns[batch, head, :count].long()] = True
        return mask & (position[:, None] >= position[None, :])


def build_index(
    distances: Tensor, columns: Tensor, seq_length: int, block_size: int, world: int
) -> VerticalSlashIndex:
    """Put chosen distances and columns into the coordinates of the ring; reads nothing on the host.

    Args:
        distances: bool ``[b, h, NB]``, D by block distance, NB = ceil(N / B). Distance 0 is added.
        columns: int ``[b, h, C]``, V as global token positions, in any order, each once; entries
            of N or more stand for no column.
        seq_length, block_size, world: N, B and the number of context-parallel ranks W.
    """
    num_blocks = -(-seq_length // block_size)
    if distances.shape[-1] != num_blocks or num_blocks % world:
        raise ValueError(
            f"distances for {distances.shape[-1]} blocks, but {seq_length} tokens make {num_blocks} "
            f"blocks of {block_size}, to be divided by {world} ranks"
        )
    return VerticalSlashIndex(
        *index_lists(distances, None, 0, columns, seq_length, block_size, world),
        seq_length=seq_length,
        block_size=block_size,
        world=world,
    )


def index_of_choice(
    near: int, diagonals: Tensor, columns: Tensor, seq_length: int, block_size: int, world: int
) -> VerticalSlashIndex:
    """:func:`build_index` of the ``near`` first block distances, and of those that token diagonals
    cross: two, unless the diagonal is a multiple of the block size.

    Args:
        diagonals: int ``[b, h, K]``, token distances; those of N or more stand for none.
    """
    return VerticalSlashIndex(
        *index_lists(None, diagonals, near, columns, seq_length, block_size, world),
        seq_length=seq_length,
        block_size=block_size,
        world=world,
    )


def full_index(
    batch: int, heads: int, seq_length: int, block_size: int, world: int, device
) -> VerticalSlashIndex:
    """The index that keeps every pair: dense causal attention."""
    num_blocks = -(-seq_length // block_size)
    distances = torch.ones(batch, heads, num_blocks, dtype=torch.bool, device=device)
    columns = torch.zeros(batch, heads, 0, dtype=torch.int64, device=device)
    return build_index(distances, columns, seq_length, block_size, world)
