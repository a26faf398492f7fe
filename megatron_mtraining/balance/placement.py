# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which data-parallel rank and micro-batch gets which sample of a global batch.

Megatron needs the same number of samples on each rank. The problem is number partitioning with exact counts.
The method is longest processing time first (LPT), then swaps between a slow and a fast rank. All arithmetic
after :func:`_levels` uses whole numbers, so ranks on different processors make the same placement.
"""

from __future__ import annotations

import heapq

import numpy as np

from ..errors import ConfigError

LEVELS = 1 << 16
"""Costs are rounded to this many levels of the largest. The last bits of a cost may differ between
processors; rounding removes them. The rounding error is far below the error of any prediction."""
PASSES = 8
"""Largest number of rounds of swaps. If samples are small, each round at least halves the largest gap."""
FEW = 64
"""Up to this many samples a rank, all pairs of a swap are compared at once."""


def megatron_order(dp_size: int, num_microbatches: int, micro_batch_size: int) -> np.ndarray:
    """Megatron's own placement: positions in the global batch, int64 ``[M, dp, mbs]``."""
    shape = (num_microbatches, dp_size, micro_batch_size)
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


def place(costs, dp_size: int, num_microbatches: int, micro_batch_size: int) -> np.ndarray:
    """Place the samples of a global batch so that ranks have equal sums of costs.

    Micro-batches of a rank are in descending order of cost, so micro-batch k has a similar cost on all ranks:
    experts make ranks wait for each other in each micro-batch.

    Args:
        costs: the cost of each sample of the global batch, ``[M * dp * mbs]``, in any unit, finite, 0 or
            more.

    Returns:
        Positions in the global batch, each once: int64 ``[M, dp, mbs]``. Equal costs give equal results.

    Raises:
        ConfigError: another number of costs, or a cost that is negative or not finite.
    """
    costs = np.asarray(costs, np.float64)
    number = dp_size * num_microbatches * micro_batch_size
    if costs.shape != (number,):
        raise ConfigError(
            f"costs are of shape {list(costs.shape)}: give one for each of the {number} = "
            f"{num_microbatches} x {dp_size} x {micro_batch_size} samples of a global batch"
        )
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(wrong):
        raise ConfigError(
            f"the cost of sample {wrong[0]} of the global batch is {costs[wrong[0]]}: give finite costs "
            "of 0 or more"
        )
    levels = _levels(costs)
    ranks = _by_rank(levels, dp_size)
    bins = _even_bins(levels, ranks, num_microbatches)
    sums = levels[bins].sum(2)
    order = np.argsort(-sums, axis=1, kind="stable")
    return np.ascontiguousarray(np.take_along_axis(bins, order[:, :, None], 1).transpose(1, 0, 2))


def _levels(costs: np.ndarray) -> np.ndarray:
    """Costs as whole numbers, int64: the largest is :data:`LEVELS`, none is 0."""
    largest = costs.max()
    if largest == 0:
        return np.ones(len(costs), np.int64)
    return np.maximum(np.rint(costs / largest * LEVELS), 1).astype(np.int64)


def _descending(levels: np.ndarray) -> np.ndarray:
    return np.argsort(-levels, kind="stable")


def _by_rank(levels: np.ndarray, dp_size: int) -> np.ndarray:
    """Samples of each rank, ``[dp, n]``, in descending order of cost."""
    n = len(levels) // dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    heap = [(0, rank) for rank in range(dp_size)]
    values = levels.tolist()
    for sample in _descending(levels).tolist():
        total, rank = heap[0]
        ranks[rank].append(sample)
        if len(ranks[rank]) < n:
            heapq.heapreplace(heap, (total + values[sample], rank))
        else:
            heapq.heappop(heap)
    found = np.array(ranks, np.int64)
    for _ in range(PASSES):
        if not _swap(levels, found):
            break
    order = np.argsort(-levels[found], axis=1, kind="stable")
    return np.take_along_axis(found, order, 1)


def _swap(levels: np.ndarray, ranks: np.ndarray) -> bool:
    """Swap one sample between the slowest and the fastest rank, between the second slowest and the second
    fastest, and so on, in place.

    Returns:
        Whether anything was swapped.
    """
    dp_size, n = ranks.shape
    half = dp_size // 2
    if half == 0:
        return False
    sums = levels[ranks].sum(1)
    by_sum = np.argsort(-sums, kind="stable")
    slow, fast = by_sum[:half], by_sum[::-1][:half]
    gaps = sums[slow] - sums[fast]
    if n <= FEW:
        moved = levels[ranks[slow]][:, :, None] - levels[ranks[fast]][:, None, :]
        left = np.abs(gaps[:, None, None] - 2 * moved).reshape(half, n * n)
        best = left.argmin(1)
        better = left[np.arange(half), best] < gaps
        own, other = best // n, best % n
    else:
        found = [
            _best_swap(levels[ranks[a]], levels[ranks[b]], gap)
            for a, b, gap in zip(slow, fast, gaps)
        ]
        own, other, left = (np.array(each) for each in zip(*found))
        better = left < gaps
    slow, fast, own, other = (each[better] for each in (slow, fast, own, other))
    ranks[slow, own], ranks[fast, other] = ranks[fast, other], ranks[slow, own]
    return bool(better.any())


def _best_swap(slow: np.ndarray, fast: np.ndarray, gap: int) -> tuple[int, int, int]:
    """The samples of two ranks whose swap leaves the smallest gap, and this gap, without comparing all
    pairs."""
    order = np.argsort(fast, kind="stable")
    ascending = fast[order]
    at = np.searchsorted(ascending, slow - gap // 2)
    near = np.stack((at - 1, at)).clip(0, len(fast) - 1)
    left = np.abs(gap - 2 * (slow - ascending[near]))
    best = int(left.argmin())
    own = best % len(slow)
    return own, int(order[near[best // len(slow), own]]), int(left.ravel()[best])


def _even_bins(levels: np.ndarray, groups: np.ndarray, num_bins: int) -> np.ndarray:
    """Cut each row of samples, in descending order of cost, into bins of equal counts and near-equal sums.

    Args:
        groups: samples, ``[g, num_bins * size]``.

    Returns:
        ``[g, num_bins, size]``.
    """
    rows, size = len(groups), groups.shape[1] // num_bins
    bins = np.empty((rows, num_bins, size), np.int64)
    sums: np.ndarray = np.zeros((rows, num_bins), np.int64)
    for place_in_bin in range(size):  # the largest of the samples left go to the bins with least
        samples = groups[:, place_in_bin * num_bins : (place_in_bin + 1) * num_bins]
        emptiest = np.argsort(sums, axis=1, kind="stable")
        np.put_along_axis(bins[:, :, place_in_bin], emptiest, samples, 1)
        np.put_along_axis(
            sums, emptiest, np.take_along_axis(sums, emptiest, 1) + levels[samples], 1
        )
    return bins
