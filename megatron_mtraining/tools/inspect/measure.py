# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Recall of a layer's patterns, which is the attention mass that they keep, and their density."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...config import BlockListPolicy, ConfigError, MTrainingConfig
from ...cp_group import CPGroup
from ...models.types import LayerInput
from ...pattern import VerticalSlashIndex, search_pattern, select_key_blocks
from ...pattern.sampled_rows import rows_of
from .options import ROWS

CHUNK_BYTES = 2**28
"""Memory for the attention probabilities that exist at once, unless a row of all heads needs more."""
CELLS = 256
"""Cells along a side of a picture, at most."""


def held_out_rows(
    seq_length: int, count: int | None, configs: list[MTrainingConfig], seed: int
) -> Tensor:
    """Query rows to evaluate patterns on: int64 ``[count]``, ascending, none of which an estimator samples.

    The remaining rows are cut into ``count`` strata, and one row is drawn from each.

    Args:
        count: None for :data:`~megatron_mtraining.tools.inspect.options.ROWS`, or all that remain.

    Raises:
        ConfigError: fewer rows remain, or none.
    """
    free = torch.ones(seq_length, dtype=torch.bool)
    for config in configs:
        free[rows_of(config.sampling, seq_length)] = False
    rows = free.nonzero()[:, 0]
    if count is None:
        count = min(ROWS, len(rows))
    if not len(rows):
        raise ConfigError(
            f"there are {seq_length} tokens, and patterns are estimated from all of these rows, so that none "
            "remains to evaluate them on: give a longer text, or a larger --seq"
        )
    if count > len(rows):
        raise ConfigError(
            f"--rows is {count}, but patterns are estimated from {seq_length - len(rows)} of the "
            f"{seq_length} rows: use at most {len(rows)}, or a longer text"
        )
    generator = torch.Generator().manual_seed(seed)
    edges = torch.arange(count + 1) * len(rows) // count
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return rows[edges[:-1] + (drawn * edges.diff()).long()]


def cells_of(seq_length: int, rows: int) -> int:
    """Cells along a side of a picture: a divisor of the length, with two rows per cell if possible."""
    most = max(1, min(CELLS, rows // 2))
    return max(cells for cells in range(1, most + 1) if seq_length % cells == 0)


class HeadPattern(Protocol):
    """One head's pattern, small and on the CPU."""

    def mask(self, rows: Tensor, at: Tensor) -> Tensor:
        """The keys that rows ``rows[at]`` see: bool ``[r, N]``; later keys are not masked out."""


class LayerPattern(Protocol):
    """The patterns of a layer's heads on one rank."""

    density: Tensor
    """Fraction of the causal query-key pairs that are kept: float64 ``[h]``."""

    def kept_mass(self, p: Tensor, block_mass: Tensor, rows: Tensor, first: int) -> Tensor:
        """The attention mass that the pattern keeps of each row: float32 ``[h, r]``.

        Args:
            p: from :func:`attention_of_rows`, ``[h, r, keys]``.
            block_mass: its sums over blocks of keys, ``[h, r, keys / block]``.
            rows: int64 ``[r]``; ``first`` is the number of the first among all evaluated rows.
        """

    def head(self, head: int) -> HeadPattern:
        """One head's pattern."""


class VerticalSlashPattern:
    """See :class:`LayerPattern`; of an index with batch size 1."""

    def __init__(self, index: VerticalSlashIndex):
        self.index = index
        self.density = index.density()[0].double()

    def kept_mass(self, p: Tensor, block_mass: Tensor, rows: Tensor, first: int) -> Tensor:
        block, keys = self.index.block_size, p.shape[-1]
        distances = self.index.distances()[0]
        row_block = (rows // block)[:, None]
        # Blocks after the row's have no mass, so that it does not matter what distance 0 says.
        distance = (row_block - torch.arange(keys // block, device=p.device)).clamp_(min=0)
        kept = (block_mass * distances[:, distance]).sum(-1)
        columns = self.index.columns[0].long()
        if not columns.shape[-1]:
            return kept
        # Later columns, and padding, are moved into the last block: its own rows are at distance 0,
        # which is always kept, and earlier rows have no mass there.
        columns = columns.clamp(max=keys - 1)[:, None].expand(-1, len(rows), -1)
        distance = (row_block - columns // block).clamp_(min=0)
        by_slash = distances.gather(-1, distance.flatten(1)).view_as(distance)
        return kept + p.gather(-1, columns).masked_fill(by_slash, 0).sum(-1)

    def head(self, head: int) -> HeadPattern:
        distances, columns = self.index.distances()[0, head], self.index.columns[0, head]
        return _VerticalSlashHead(distances.cpu(), columns.cpu(), self.index.block_size)


class _VerticalSlashHead:
    def __init__(self, distances: Tensor, columns: Tensor, block_size: int):
        """
        Args:
            distances: bool ``[NB]``; columns: int ``[C]``, padded with values of at least N.
        """
        self.distances, self.columns, self.block_size = distances, columns, block_size

    def mask(self, rows: Tensor, at: Tensor) -> Tensor:
        length = len(self.distances) * self.block_size
        distance = rows[at, None] // self.block_size - torch.arange(length) // self.block_size
        is_column = torch.zeros(length, dtype=torch.bool)
        is_column[self.columns[self.columns < length].long()] = True
        return self.distances[distance.clamp_(min=0)] | is_column


class BlockSparsePattern:
    """See :class:`LayerPattern`; of block lists, of which only the evaluated rows are kept."""

    def __init__(self, blocks: Tensor, rows: Tensor, block_size: int):
        """
        Args:
            blocks: uint8 ``[1, h, NB, NB]``, from :func:`~megatron_mtraining.pattern.select_key_blocks` on
                one rank; each query block sees itself and no later block.
            rows: the evaluated rows, int64 ``[n]``.
        """
        num_blocks = blocks.shape[-1]
        length = num_blocks * block_size
        pairs = blocks[0].sum((-1, -2)).double() * block_size * block_size
        pairs -= num_blocks * (block_size * (block_size - 1) / 2)
        self.density = pairs / (length * (length + 1) / 2)
        self.seen = blocks[0, :, rows // block_size].bool()  # [h, n, NB]
        self.block_size = block_size

    def kept_mass(self, p: Tensor, block_mass: Tensor, rows: Tensor, first: int) -> Tensor:
        seen = self.seen[:, first : first + len(rows), : block_mass.shape[-1]]
        return (block_mass * seen).sum(-1)

    def head(self, head: int) -> HeadPattern:
        return _BlockSparseHead(self.seen[head].cpu(), self.block_size)


class _BlockSparseHead:
    def __init__(self, seen: Tensor, block_size: int):
        self.bits = np.packbits(seen.numpy(), axis=-1)
        self.num_blocks, self.block_size = seen.shape[-1], block_size

    def mask(self, rows: Tensor, at: Tensor) -> Tensor:
        seen = np.unpackbits(self.bits[at.numpy()], axis=-1, count=self.num_blocks)
        return torch.from_numpy(seen).bool().repeat_interleave(self.block_size, -1)


def pattern_of(given: LayerInput, config: MTrainingConfig, rows: Tensor) -> LayerPattern:
    """The pattern that a layer would have on one rank."""
    cp, policy = CPGroup(None), config.policy
    if not isinstance(policy, BlockListPolicy) or config.keeps_all(len(given.query)):
        return VerticalSlashPattern(
            search_pattern(given.query, given.key, config, cp, given.softmax_scale)
        )
    blocks = select_key_blocks(
        given.query,
        given.key,
        policy,
        cp,
        given.softmax_scale,
        block_size=config.block_size,
        window_blocks=-(-config.window // config.block_size),
        sink_blocks=-(-config.sink // config.block_size),
    )
    return BlockSparsePattern(blocks, rows, config.block_size)


class LayerRecall:
    """Recall and density of one layer's heads, for several settings.

    Attributes:
        recall, density: float64 ``[settings, h]``, on the CPU.
        patterns: the pattern of each setting.
        picture: float32 ``[h, cells, cells]``, on the CPU: the attention mass of each cell, averaged over
            its rows; NaN where none of a cell's rows is evaluated.
    """

    patterns: list[LayerPattern]

    def __init__(self, given: LayerInput, configs: list[MTrainingConfig], rows: Tensor):
        query, key = given.query, given.key
        if not query.is_cuda:  # once; the pattern search's reference would convert them each time
            query, key = query.float(), key.float()
        given, rows = given._replace(query=query, key=key), rows.to(query.device)
        self.patterns = [pattern_of(given, config, rows) for config in configs]
        self.density = torch.stack([pattern.density.cpu() for pattern in self.patterns])
        length, _, heads, _ = query.shape
        block, cells = configs[0].block_size, cells_of(length, len(rows))
        recall = torch.zeros(len(configs), heads, dtype=torch.float64, device=query.device)
        picture = torch.zeros(heads, cells, cells, device=query.device)
        multiple, first = math.lcm(block, length // cells), 0
        for here, p in attention_of_rows(query, key, rows, given.softmax_scale, multiple):
            mass = p.unflatten(-1, (-1, block)).sum(-1)
            for number, pattern in enumerate(self.patterns):
                recall[number] += pattern.kept_mass(p, mass, here, first).double().sum(-1)
            first += len(here)
            by_cell = p.unflatten(-1, (-1, length // cells)).sum(-1)
            picture[:, :, : by_cell.shape[-1]].index_add_(1, here * cells // length, by_cell)
        self.recall = (recall / len(rows)).cpu()
        count = torch.bincount(rows * cells // length, minlength=cells)
        self.picture = (picture / count[:, None]).cpu()
        if not self.recall.isfinite().all():
            raise ConfigError(
                f"the attention scores of layer {given.layer} are not finite in "
                f"{given.query.dtype}: is the model complete? If so, try --dtype float32"
            )


def attention_of_rows(
    query: Tensor, key: Tensor, rows: Tensor, softmax_scale: float, multiple: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exact attention probabilities of some rows over all earlier keys, a chunk of rows at a time.

    Args:
        query ``[s, 1, h, d]``, key ``[s, 1, hk, d]``.
        rows: int64 ``[n]``, ascending, on the device of the queries.
        multiple: a divisor of s; the number of keys is a multiple of it.

    Yields:
        Rows of the chunk, ``[r]``, and float32 ``[h, r, keys]``. The keys reach at least up to the last of
        these rows, with probability 0 where a key is later than the row.
    """
    length, _, heads, _ = query.shape
    kv_heads = key.shape[2]
    keys = key[:, 0].permute(1, 2, 0).float()
    chunk = max(1, CHUNK_BYTES // (4 * heads * length))
    for here in rows.split(chunk):
        seen = min(length, (int(here[-1]) // multiple + 1) * multiple)
        queries = query[here, 0].float().transpose(0, 1) * softmax_scale
        scores = queries.reshape(kv_heads, -1, queries.shape[-1]) @ keys[..., :seen]
        scores = scores.view(heads, len(here), seen)
        future = torch.arange(seen, device=query.device) > here[:, None]
        yield here, scores.masked_fill_(future, float("-inf")).softmax(-1)


def density_picture(pattern: HeadPattern, rows: Tensor, seq_length: int, cells: int) -> Tensor:
    """The density of each cell of a head's pattern over the evaluated rows: float32 ``[cells, cells]``.

    Args:
        rows: int64 ``[n]``, on the CPU.
    """
    position, size = torch.arange(seq_length), seq_length // cells
    density = torch.zeros(cells, cells)
    for at in torch.arange(len(rows)).split(max(1, CHUNK_BYTES // (16 * seq_length))):
        kept = pattern.mask(rows, at)[:, :seq_length] & (position <= rows[at, None])
        by_cell = kept.unflatten(-1, (cells, size)).float().mean(-1)
        density.index_add_(0, rows[at] // size, by_cell)
    return density / torch.bincount(rows // size, minlength=cells)[:, None]
