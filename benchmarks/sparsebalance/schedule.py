# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How long a step takes, event by event, if each micro-batch of each replica takes a given time.

- ``step``: a replica's micro-batches run one after the other; replicas meet at the end.
- ``microbatch``: replicas meet in each micro-batch too (expert parallelism).
- ``pipeline``: each replica is a pipeline with Megatron's schedule 1F1B; replicas meet at the end.
"""

from __future__ import annotations

import numpy as np

WAITS = ("step", "microbatch", "pipeline")


def ends(forward: np.ndarray, backward: np.ndarray, waits: str, stages: int = 1) -> np.ndarray:
    """When each replica has finished its micro-batches.

    Args:
        forward, backward: time of each micro-batch on all stages together, ``[M, dp]``.
        stages: of the pipeline, which each take an equal part of the time.

    Returns:
        ``[dp]``.
    """
    if waits == "pipeline":
        return _one_forward_one_backward(forward / stages, backward / stages, stages)
    whole = forward + backward
    if waits == "microbatch":
        return np.full(whole.shape[1], whole.max(1).sum())
    return whole.sum(0)


def _order(stage: int, stages: int, count: int) -> list[tuple[bool, int]]:
    """What a stage runs, in order: (whether it is a backward, micro-batch)."""
    warm_up = min(stages - stage - 1, count)
    order = [(False, number) for number in range(warm_up)]
    for number in range(count - warm_up):
        order += [(False, number + warm_up), (True, number)]
    return order + [(True, number) for number in range(count - warm_up, count)]


def _one_forward_one_backward(forward: np.ndarray, backward: np.ndarray, stages: int) -> np.ndarray:
    """Times of a stage's part of each micro-batch, ``[M, dp]``, to the ends ``[dp]``."""
    count, dp = forward.shape
    orders = [_order(stage, stages, count) for stage in range(stages)]
    done: dict[tuple[bool, int, int], np.ndarray] = {}
    free, at = [np.zeros(dp) for _ in range(stages)], [0] * stages
    left = sum(map(len, orders))
    while left:
        before = left
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                is_backward, number = orders[stage][at[stage]]
                if is_backward:
                    last = stage == stages - 1
                    needs = (False, number, stage) if last else (True, number, stage + 1)
                else:
                    needs = (False, number, stage - 1)
                if stage == 0 and not is_backward:
                    ready = np.zeros(dp)
                elif needs in done:
                    ready = done[needs]
                else:
                    break
                took = (backward if is_backward else forward)[number]
                free[stage] = np.maximum(free[stage], ready) + took
                done[is_backward, number, stage] = free[stage]
                at[stage] += 1
                left -= 1
        if left == before:
            raise RuntimeError("the schedule waits for itself")
    return np.max(free, 0)
