# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Recall of a layer's patterns, which is the attention mass that they keep, and their density."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from ...config import ConfigError, MTrainingConfig, has_price
from ...cp_group import CPGroup
from ...models.types import LayerInput
from ...pattern import (
    VerticalSlashIndex,
    search_pattern,
    search_price_series,
    select_key_blocks,
)
from ...pattern.sampled_rows import rows_of
from .options import ROWS

CHUNK_BYTES = 2**28
"""Memory for the attention probabilities that exist at once, unless a row of all heads needs more."""


def held_out_rows(
    seq_length: int, count: int | None, configs: list[MTrainingConfig], seed: int = 0
) -> Tensor:
    """Query rows to evaluate patterns on: int64 ``[count]``, ascending; no estimator samples them.

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


class LayerPattern(Protocol):
    """The patterns of a layer's heads on one rank."""

    density: Tensor
    """Fraction of the causal query-key pairs that are kept: float64 ``[h]``."""

    def kept_mass(self, p: Tensor, block_mass: Tensor, rows: Tensor) -> Tensor:
        """The attention mass that the pattern keeps of each row: float32 ``[h, r]``.

        Args:
            p: from :func:`attention_of_rows`, ``[h, r, keys]``.
            block_mass: its sums over blocks of keys, ``[h, r, keys / block]``.
            rows: int64 ``[r]``.
        """

    def mask(self, head: int, rows: Tensor) -> Tensor:
        """The keys that rows ``[r]`` of a head attend to: bool ``[r, NB x block_size]``, on the device of the
        pattern, as are the rows. Later keys are not masked out."""


class VerticalSlashPattern:
    """See :class:`LayerPattern`; of an index with batch size 1."""

    def __init__(self, index: VerticalSlashIndex):
        self.index = index
        self.density = index.density()[0].double()

    def kept_mass(self, p: Tensor, block_mass: Tensor, rows: Tensor) -> Tensor:
        block, keys = self.index.block_size, p.shape[-1]
        distances = self.index.distances()[0]
        row_block = (rows // block)[:, None]
        # Blocks after the row's have no mass, so that it does not matter what distance 0 says.
        distance = (row_block - torch.arange(keys // block, device=p.device)).clamp_(min=0)
        by_slash = distances[:, distance]
        kept = (block_mass * by_slash).sum(-1)
        columns = self.index.columns[0].long()
        if not columns.shape[-1]:
            return kept
        # One more block for the padding, which is at N or beyond.
        is_column = p.new_zeros(len(p), keys + block)
        is_column.scatter_(-1, columns.clamp(max=keys), 1)
        in_columns = (p * is_column[:, None, :keys]).unflatten(-1, (-1, block)).sum(-1)
        return kept + (in_columns * ~by_slash).sum(-1)

    def mask(self, head: int, rows: Tensor) -> Tensor:
        distances, columns = self.index.distances()[0, head], self.index.columns[0, head]
        block = self.index.block_size
        length = len(distances) * block
        is_column = torch.zeros(length, dtype=torch.bool, device=distances.device)
        is_column[columns[columns < length].long()] = True
        key_block = torch.arange(length, device=distances.device) // block
        return distances[(rows[:, None] // block - key_block).clamp_(min=0)] | is_column


class BlockSparsePattern:
    """See :class:`LayerPattern`; for block lists. Only the lists of the evaluated rows are kept."""

    def __init__(self, blocks: Tensor, rows: Tensor, block_size: int):
        """
        Args:
            blocks: uint8 ``[1, h, NB, NB]``, from :func:`~megatron_mtraining.pattern.select_key_blocks` on
                one rank; each query block sees itself and no later block.
            rows: the evaluated rows, int64 ``[n]``, ascending.
        """
        num_blocks = blocks.shape[-1]
        length = num_blocks * block_size
        pairs = blocks[0].sum((-1, -2)).double() * block_size * block_size
        pairs -= num_blocks * (block_size * (block_size - 1) / 2)
        self.density = pairs / (length * (length + 1) / 2)
        self.query_blocks = (rows // block_size).unique()
        self.seen = blocks[0, :, self.query_blocks].bool()  # [h, query blocks, NB]
        self.block_size = block_size

    def kept_mass(self, p: Tensor, block_mass: Tensor, rows: Tensor) -> Tensor:
        at = torch.searchsorted(self.query_blocks, rows // self.block_size)
        return (block_mass * self.seen[:, at, : block_mass.shape[-1]]).sum(-1)

    def mask(self, head: int, rows: Tensor) -> Tensor:
        at = torch.searchsorted(self.query_blocks, rows // self.block_size)
        return self.seen[head, at].repeat_interleave(self.block_size, -1)


def patterns_of(
    given: LayerInput, configs: list[MTrainingConfig], rows: Tensor
) -> Iterator[LayerPattern]:
    """The pattern that a layer would have on one rank, for each of ``configs``. Neighbours that differ in
    their price alone share a search."""
    cp = CPGroup(None)
    for same, group in groupby(configs, key=_without_price):
        series = list(group)
        if same is None:
            yield from (pattern_of(given, config, rows) for config in series)
        else:
            found = search_price_series(given.query, given.key, series, cp, given.softmax_scale)
            yield from map(VerticalSlashPattern, found)


def _without_price(config: MTrainingConfig) -> MTrainingConfig | None:
    """What configurations of a price series have in common; None for other policies."""
    policy = config.policy
    if not has_price(policy):
        return None
    return replace(config, policy=replace(policy, price=1.0))


def pattern_of(given: LayerInput, config: MTrainingConfig, rows: Tensor) -> LayerPattern:
    """The pattern that a layer would have on one rank."""
    cp, policy = CPGroup(None), config.policy
    if not policy.has_block_lists or config.keeps_all(len(given.query)):
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
    """

    def __init__(self, given: LayerInput, configs: list[MTrainingConfig], rows: Tensor):
        """
        Args:
            rows: the evaluated rows, int64 ``[n]``, ascending.

        Raises:
            ConfigError: attention scores are not finite.
        """
        dtype, rows = given.query.dtype, rows.to(given.query.device)
        given = for_search(given)
        self.patterns = list(patterns_of(given, configs, rows))
        self.density = torch.stack([pattern.density.cpu() for pattern in self.patterns])
        self.recall = recall_of_patterns(given, self.patterns, rows, configs[0].block_size)
        if not self.recall.isfinite().all():
            raise ConfigError(
                f"the attention scores of layer {given.layer} are not finite in {dtype}: is the model "
                "complete? If so, try --dtype float32"
            )


def for_search(given: LayerInput) -> LayerInput:
    """A layer's input as the search reads it fastest."""
    if given.query.is_cuda:
        return given
    # Once; the search's reference implementation would convert them each time.
    return given._replace(query=given.query.float(), key=given.key.float())


def recall_of_patterns(
    given: LayerInput, patterns: list[LayerPattern], rows: Tensor, block_size: int
) -> Tensor:
    """The attention mass that each pattern keeps, mean over rows: float64 ``[patterns, h]``, on the CPU."""
    query, key = given.query, given.key
    shape = len(patterns), query.shape[2]
    recall = torch.zeros(shape, dtype=torch.float64, device=query.device)
    for here, p in attention_of_rows(query, key, rows, given.softmax_scale, block_size):
        mass = p.unflatten(-1, (-1, block_size)).sum(-1)
        for number, pattern in enumerate(patterns):
            recall[number] += pattern.kept_mass(p, mass, here).double().sum(-1)
    return (recall / len(rows)).cpu()


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
