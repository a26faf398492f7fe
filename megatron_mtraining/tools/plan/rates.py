# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How fast GPUs and links are, as training steps on H200 and H100 show (``pretrain.jsonl``).

Constants are fitted to the parts of profiled steps (rows with ``breakdown``) of Qwen2.5's 3B and 0.5B shapes.
"""

from __future__ import annotations

from typing import NamedTuple

from ...config import ConfigError


class Gpu(NamedTuple):
    """
    Attributes:
        memory_gib: what CUDA offers.
        tflops: dense bf16, of its data sheet.
        bandwidth: of its memory, TB/s, of its data sheet.
        link: GB/s one way between the GPUs of a host, as a step's collectives reach it.
        measured: whether steps were measured on it. Rates of others are scaled by the data sheets.
    """

    memory_gib: float
    tflops: float
    bandwidth: float
    link: float
    measured: bool


MEASURED = Gpu(139.8, 989, 4.8, 150, True)
GPUS = {
    "h200": MEASURED,
    "h100-80g": Gpu(79.1, 989, 3.35, 150, True),
    "a100-80g": Gpu(79.1, 312, 2.04, 100, False),
    "a100-40g": Gpu(39.4, 312, 1.56, 100, False),
}

HIGHEST, HALF = 790.0, 563
"""Products of a layer reach ``887 * h / (h + HALF)`` TFLOP/s at hidden size ``h``, at most the first."""
AT_INFINITY = 887.0
OF_LOSS = 0.76
"""Rate of the output layer's products, with the loss between them, over that of a layer's."""
OURS = {64: 420.0, 128: 513.0}
"""TFLOP/s of selected pairs, forward and backward, with the ring, by head dimension; of others the lowest."""
DENSE = {64: 470.0, 128: 545.0}
"""Of Transformer Engine's attention, with its ring."""
SEARCH = 95e-9
"""Seconds of a token and layer whatever is selected, at queries of 2048 columns: search, gathering."""
ELEMENTWISE = 3.5
"""TB/s of what is no product, as bytes are counted in :func:`.step_time.step_time`."""
OPTIMIZER_BYTES, OPTIMIZER = 30, 1.65
"""A parameter's, of the distributed optimizer's step; TB/s."""
EXPOSED = 0.25
"""Share of the gathered keys' way that nothing hides."""
HOST = 0.025
"""Seconds of a step in which the GPU waits for the host."""


def gpu_of(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu is {name}: known are {', '.join(GPUS)}")
    return GPUS[name.lower()]
