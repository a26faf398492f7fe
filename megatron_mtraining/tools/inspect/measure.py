# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How much of a layer's true attention a pattern keeps, and of how many pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import BlockListPolicy, ConfigError, MTrainingConfig
from ...models.types import LayerInput
from ...pattern import VerticalSlashIndex, choose_index
from ...pattern.blocks import choose_blocks
from ...pattern.estimate import rows_of
from ...ring import Ring
from .options import ROWS

CHUNK_BYTES = 2**28
"""Of the probabilities that are held at a time, unless a single row of all heads takes more."""
CELLS = 256
"""Cells along a side of a picture, at most."""


def held_out_rows(
    seq_length: int, count: int | None, configs: list[MTrainingConfig], seed: int
) -> Tensor:
    """Query rows to judge patterns by: int64 ``[count]``, ascending, none of which an estimator sees.

    What is left of the sequence is cut into ``count`` stretches, and one row is drawn from each. None is
    for :data:`~megatron_mtraining.tools.inspect.options.ROWS`, or all that are left.

    Raises:
        ConfigError: there are not so many rows left, or none.
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
            "is left to judge them by: give a longer text, or a larger --seq"
        )
    if count > len(rows):
        raise ConfigError(
            f"--rows is {count}, but of {seq_length} tokens {seq_length - len(rows)} are rows that patterns "
            f"are estimated from: use at most {len(rows)}, or a longer text"
        )
    generator = torch.Generator().manual_seed(seed)
    edges = torch.arange(count + 1) * len(rows) // count
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return rows[edges[:-1] + (drawn * edges.diff()).long()]


def cells_of(seq_length: int, rows: int) -> int:
    """Cells along a side of a picture: a divisor of the length, with two rows a cell if it can be."""
    most = max(1, min(CELLS, rows // 2))
    return max(cells for cells in range(1, most + 1) if seq_length % cells == 0)


class ListsAtRows(NamedTuple):
    """Of block lists, what some rows see."""

    seen: Tensor
    """bool ``[h, n, NB]``, by row and key block."""
    share: Tensor
    """Of the causal pairs that all rows keep: float64 ``[h]``."""

    def density(self) -> Tensor:
        return self.share[None]


def lists_at_rows(blocks: Tensor, rows: Tensor, block: int) -> ListsAtRows:
    """From lists as :func:`~megatron_mtraining.pattern.choose_block_lists` gives them on one rank for a
    whole number of blocks.

    Args:
        blocks: uint8 ``[1, h, NB, NB]``; each query block sees itself, and none a later one.
        rows: int64 ``[n]``.
    """
    num_blocks = blocks.shape[-1]
    length = num_blocks * block
    pairs = blocks[0].sum((-1, -2)).double() * block * block
    pairs -= num_blocks * (block * (block - 1) / 2)
    share = pairs / (length * (length + 1) / 2)
    return ListsAtRows(blocks[0, :, rows // block].bool(), share)


def pattern_of(
    given: LayerInput, config: MTrainingConfig, rows: Tensor
) -> VerticalSlashIndex | ListsAtRows:
    """A layer's pattern on one rank; of block lists, what these rows see."""
    ring = Ring(None)
    policy = config.policy
    if not isinstance(policy, BlockListPolicy) or config.keeps_all(len(given.query)):
        return choose_index(given.query, given.key, config, ring, given.softmax_scale)
    near = -(-config.window // config.block_size) + 1
    blocks = choose_blocks(given.query, given.key, policy, config, near, ring, given.softmax_scale)
    return lists_at_rows(blocks, rows, config.block_size)


class LayerRecall:
    """Recall and density of one layer's heads, for several settings.

    Attributes:
        recall, density: float64 ``[settings, h]``, on the CPU.
        patterns: the pattern of each setting.
        picture: float32 ``[h, cells, cells]``, on the CPU: the true attention mass that an average
            query of a cell's rows has in a cell's keys; NaN for rows without held-out rows.
    """

    def __init__(self, given: LayerInput, configs: list[MTrainingConfig], rows: Tensor):
        query, key = given.query, given.key
        if not query.is_cuda:  # the choice's twins on CPUs do so each time, exactly
            query, key = query.float(), key.float()
        given, rows = given._replace(query=query, key=key), rows.to(query.device)
        self.patterns = [pattern_of(given, config, rows) for config in configs]
        length, _, heads, _ = query.shape
        density = [pattern.density()[0].double().cpu() for pattern in self.patterns]
        self.density = torch.stack(density)
        block = configs[0].block_size
        cells, at = cells_of(length, len(rows)), 0
        recall = torch.zeros(len(configs), heads, dtype=torch.float64, device=query.device)
        picture = torch.zeros(heads, cells, cells, device=query.device)
        step = math.lcm(block, length // cells)
        for here, p in row_probabilities(query, key, rows, given.softmax_scale, step):
            mass = p.unflatten(-1, (-1, block)).sum(-1)
            for number, pattern in enumerate(self.patterns):
                recall[number] += kept_of(pattern, p, mass, here, at).double().sum(-1)
            at += len(here)
            by_key = p.unflatten(-1, (-1, length // cells)).sum(-1)
            picture[:, :, : by_key.shape[-1]].index_add_(1, here * cells // length, by_key)
        self.recall = (recall / len(rows)).cpu()
        count = torch.bincount(rows * cells // length, minlength=cells)
        self.picture = (picture / count[:, None]).cpu()
        if not self.recall.isfinite().all():
            raise ConfigError(
                f"the attention scores of layer {given.layer} are not finite numbers in "
                f"{given.query.dtype}: is the model whole? If so, try --dtype float32"
            )


def row_probabilities(
    query: Tensor, key: Tensor, rows: Tensor, softmax_scale: float, multiple: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exact attention probabilities of some rows, over all earlier keys, a few rows at a time.

    Args:
        query ``[s, 1, h, d]``, key ``[s, 1, hk, d]``.
        rows: int64 ``[n]``, ascending, on the queries' device.
        multiple: of which the number of keys is to be one; it divides s.

    Yields:
        A part of the rows ``[r]``, and float32 ``[h, r, keys]``: keys up to the last of these rows or
        a little farther, with probability 0 where a key is later than the row.
    """
    length, _, heads, _ = query.shape
    kv_heads = key.shape[2]
    keys = key[:, 0].permute(1, 2, 0).float()
    chunk = max(1, CHUNK_BYTES // (4 * heads * length))
    for here in rows.split(chunk):
        seen = min(length, (int(here[-1]) // multiple + 1) * multiple)
        some = query[here, 0].float().transpose(0, 1) * softmax_scale
        scores = some.reshape(kv_heads, -1, some.shape[-1]) @ keys[..., :seen]
        scores = scores.view(heads, len(here), seen)
        future = torch.arange(seen, device=query.device) > here[:, None]
        yield here, scores.masked_fill_(future, float("-inf")).softmax(-1)


def kept_of(
    pattern: VerticalSlashIndex | ListsAtRows,
    p: Tensor,
    block_mass: Tensor,
    rows: Tensor,
    first: int,
) -> Tensor:
    """:func:`kept_mass` of either kind; ``rows`` are those of the lists from number ``first`` on."""
    if isinstance(pattern, ListsAtRows):
        seen = pattern.seen[:, first : first + len(rows), : block_mass.shape[-1]]
        return (block_mass * seen).sum(-1)
    return kept_mass(p, block_mass, rows, pattern)


def kept_mass(p: Tensor, block_mass: Tensor, rows: Tensor, index: VerticalSlashIndex) -> Tensor:
    """The probability that a pattern keeps of each row: float32 ``[h, r]``.

    Args:
        p: as :func:`row_probabilities` gives it, ``[h, r, keys]``.
        block_mass: its sums over blocks of keys, ``[h, r, keys / block]``.
        rows: int64 ``[r]``.
        index: of batch 1 on one rank.
    """
    block, keys = index.block_size, p.shape[-1]
    distances = index.distances()[0]
    row_block = (rows // block)[:, None]
    # Blocks after the row's have no mass, whatever distance 0 says of them.
    apart = (row_block - torch.arange(keys // block, device=p.device)).clamp_(min=0)
    kept = (block_mass * distances[:, apart]).sum(-1)
    columns = index.columns[0].long()
    if not columns.shape[-1]:
        return kept
    # Later columns, and none, are put into the last block: of its own rows it is at distance 0, which is
    # always kept, and earlier rows have no mass there.
    columns = columns.clamp(max=keys - 1)[:, None].expand(-1, len(rows), -1)
    apart = (row_block - columns // block).clamp_(min=0)
    by_slash = distances.gather(-1, apart.flatten(1)).view_as(apart)
    return kept + p.gather(-1, columns).masked_fill(by_slash, 0).sum(-1)


def pattern_picture(
    distances: Tensor, columns: Tensor, rows: Tensor, seq_length: int, block_size: int, cells: int
) -> Tensor:
    """A head's pattern at the rows it is judged by: float32 ``[cells, cells]``, the share of pairs kept.

    Args:
        distances: bool ``[NB]``; columns: int ``[C]``, N or more for none; rows: int64 ``[n]``; all on
            the CPU.
    """
    block = torch.arange(seq_length) // block_size
    is_column = torch.zeros(seq_length, dtype=torch.bool)
    is_column[columns[columns < seq_length].long()] = True

    def mask(at: Tensor) -> Tensor:
        apart = (rows[at, None] // block_size - block).clamp_(min=0)
        return distances[apart] | is_column

    return _shares(mask, rows, seq_length, cells)


def lists_picture(
    seen: Tensor, rows: Tensor, seq_length: int, block_size: int, cells: int
) -> Tensor:
    """:func:`pattern_picture` of a head whose rows see key blocks: bool ``[n, NB]``, on the CPU."""
    return _shares(
        lambda at: seen[at].repeat_interleave(block_size, -1)[:, :seq_length],
        rows,
        seq_length,
        cells,
    )


def _shares(mask: Callable, rows: Tensor, seq_length: int, cells: int) -> Tensor:
    """``mask``: of rows by their numbers, bool ``[r, N]``; later keys are left out here."""
    position, size = torch.arange(seq_length), seq_length // cells
    shares = torch.zeros(cells, cells)
    for at in torch.arange(len(rows)).split(max(1, CHUNK_BYTES // (16 * seq_length))):
        kept = mask(at) & (position <= rows[at, None])
        shares.index_add_(0, rows[at] // size, kept.unflatten(-1, (cells, size)).float().mean(-1))
    return shares / torch.bincount(rows // size, minlength=cells)[:, None]
