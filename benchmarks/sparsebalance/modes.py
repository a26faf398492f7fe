# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What simulation and measurement share: the balancer's modes, its expectations, and figures of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_mtraining.balance.latency import LatencyModel
from megatron_mtraining.balance.plan import Predict, StepPlan
from megatron_mtraining.balance.terms import AttentionShape
from megatron_mtraining.balance.tuning import TunedStep, TuningBounds, tune


class Mode(NamedTuple):
    """What is switched on."""

    batching: str
    tuning: bool


MODES = {
    "off": Mode("off", False),
    "length": Mode("length", False),
    "cost": Mode("cost", False),
    "tuning": Mode("off", True),
    "both": Mode("cost", True),
}


class Model(NamedTuple):
    """The attention whose time is predicted."""

    name: str
    layers: int
    shape: AttentionShape


QWEN = Model("qwen2.5-3b", 36, AttentionShape(16, 2, 128))
SMOL = Model("smollm2-135m", 30, AttentionShape(9, 3, 64))


def predictor(
    profile: LatencyModel,
    model: Model,
    seq_length: int,
    cp_size: int = 1,
    launch_bound: bool = False,
) -> Predict:
    """Milliseconds of a model's attention in forward and backward on one rank, by pairs and density."""

    def predict(pairs, density):
        found = profile.predict(
            seq_length, pairs, density, model.shape, cp_size=cp_size, launch_bound=launch_bound
        )
        return model.layers * np.asarray(found.total_ms)

    return predict


def tuned(
    plan: StepPlan,
    elasticity: float,
    bounds: TuningBounds,
    price: float,
    predict: Callable,
    waits: str = "step",
) -> TunedStep:
    """What tuning does to a step, at one sample a micro-batch."""
    pairs = plan.pairs.sum(-1)
    return tune(
        plan, elasticity, bounds, price, per_microbatch=waits == "microbatch",
        pipeline=waits == "pipeline", latency=lambda density: predict(pairs, density),
    )  # fmt: skip


def balance(times: np.ndarray) -> tuple[float, float]:
    """Of times of ranks that wait for each other: the largest over the mean, and the share that is idle."""
    over = float(times.max() / times.mean())
    return over, 1 - 1 / over
