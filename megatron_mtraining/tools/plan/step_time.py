# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Seconds of a training step, from its operations and bytes and from measured rates (:mod:`.rates`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import rates
from .memory import whole_layers
from .rates import MEASURED, Gpu
from .setting import Setting
from .weights import layer_parameters, stage_parameters

GB, TERA = 1e9, 1e12
PARTS = ("attention", "layers", "loss", "communication", "bubble")
"""Of :class:`StepTime`, that plans show."""


@dataclass(frozen=True)
class Hosts:
    """GPUs of a host, and GB/s one way that each GPU has to other hosts."""

    gpus: int
    link: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest pipeline stage, the last.

    Attributes:
        attention, layers, loss: of all microbatches; ``layers`` is all of a layer but attention.
        optimizer: its step.
        communication: what nothing hides: gradients and parameters, keys and their gradients, activations
            between tensor-parallel ranks.
        bubble: of the pipeline.
        host: in which the GPU waits.
    """

    attention: float
    layers: float
    loss: float
    optimizer: float
    communication: float
    bubble: float
    host: float = rates.HOST

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def plain_times(setting: Setting, time: StepTime) -> dict[str, float]:
    """Seconds of a step and of :data:`PARTS` as plans show them, and tokens a second and GPU."""
    args = setting.args
    tokens = args.seq_length * args.micro_batch_size * setting.microbatches * setting.dp
    return dict(
        step_s=round(time.total, 4), **{f"{part}_s": round(getattr(time, part), 4) for part in PARTS},
        tokens_per_s_gpu=round(tokens / time.total / setting.world, 1),
    )  # fmt: skip


def step_time(setting: Setting, gpu: Gpu, hosts: Hosts, density: float) -> StepTime:
    """
    Args:
        density: share of the visible pairs that is selected; of dense attention not read.
    """
    faster, wider = gpu.tflops / MEASURED.tflops, gpu.bandwidth / MEASURED.bandwidth
    args, n = setting.args, setting.tokens
    again = 1 - whole_layers(setting) / setting.layers  # share of the layers that run forward twice
    h = args.hidden_size / setting.tp**0.5
    rate = faster * TERA * min(rates.HIGHEST, rates.AT_INFINITY * h / (h + rates.HALF))
    products = (6 + 2 * again) * layer_parameters(setting) * n / rate
    width = 10 * args.hidden_size / setting.tp + (setting.gated + 1) * setting.ffn / setting.tp
    passes = 3 + again
    moved = passes * setting.element * width * n / (rates.ELEMENTWISE * wider * TERA)
    layers = setting.layers * (products + moved)
    attention = setting.layers * sum(_attention(setting, faster, density, again))
    logits = setting.vocab / setting.tp * args.hidden_size
    loss = 6 * logits * n / (rates.OF_LOSS * rate)
    m = setting.microbatches
    between = setting.layers * (
        _keys(setting, gpu, hosts, faster, density, again) + _tensor(setting, gpu, hosts, again)
    )
    one = layers + attention + loss + between
    parameters = stage_parameters(setting, setting.pp - 1)
    sharded = setting.dp * setting.cp if args.use_distributed_optimizer else 1
    optimizer = parameters / sharded * rates.OPTIMIZER_BYTES / (rates.OPTIMIZER * wider * TERA)
    return StepTime(
        attention=m * attention, layers=m * layers, loss=m * loss, optimizer=optimizer,
        communication=m * between + _gradients(setting, gpu, hosts, parameters),
        bubble=(setting.pp - 1) * (one - loss),
    )  # fmt: skip


def _share_a_host(hosts: Hosts, gpus: int) -> bool:
    """Whether each so many neighbouring GPUs are on one host: of 6 a host, not each 4."""
    return hosts.gpus % gpus == 0


def _link(gpu: Gpu, hosts: Hosts, apart: int, ranks: int) -> float:
    """GB/s of a collective of so many ranks, each ``apart`` GPUs long. Between hosts, those of one share the
    load."""
    if _share_a_host(hosts, apart * ranks):
        return gpu.link
    together = max(math.gcd(hosts.gpus, apart * ranks) // apart, 1)
    return min(together * hosts.link, gpu.link)


def _pairs(setting: Setting, density: float) -> float:
    """Operations of one layer's forward on a GPU, over its selected pairs."""
    args = setting.args
    pairs = density * args.seq_length**2 / 2 / setting.cp * args.micro_batch_size
    return 4 * setting.q_width / setting.tp * pairs


def _attention(
    setting: Setting, faster: float, density: float, again: float
) -> tuple[float, float]:
    """Seconds of one layer's forward and backward of a microbatch; what runs again is in the backward."""
    ours = setting.mtraining
    if ours is None or ours.keeps_all(setting.args.seq_length):
        density = 1.0
    table = rates.DENSE if ours is None else rates.OURS
    rate = table.get(setting.head_dim, min(table.values())) * TERA * faster
    twice = again if ours is None or ours.recompute_attention else 0.0
    one = _pairs(setting, density) / rate
    search = 0.0
    if ours is not None:
        search = rates.SEARCH * setting.tokens * setting.q_width / setting.tp / 2048 / faster
    return one + search, one * (2.5 + twice)


def _keys(setting: Setting, gpu: Gpu, hosts: Hosts, faster, density, again) -> float:
    """Seconds of a layer in which keys, values and their gradients move and nothing is computed."""
    if setting.cp == 1:
        return 0.0
    own = setting.tokens * 2 * setting.kv_heads * setting.head_dim * setting.element
    if (
        setting.mtraining is None
    ):  # Transformer Engine's ring: its rate has what its hops cost in a host
        inner, outer = 1, setting.cp
        gathered = 0.0
    else:
        inner, outer = setting.inner, setting.outer
        # There and, as float32, back; there again for the backward.
        link = _link(gpu, hosts, setting.tp, inner)
        gathered = rates.EXPOSED * 4 * own * (inner - 1) / (link * GB)
    if outer == 1 or _share_a_host(hosts, setting.tp * setting.cp):
        return gathered
    hop = inner * own / min(inner * hosts.link, gpu.link) / GB
    forward, backward = (each / outer for each in _attention(setting, faster, density, again))
    exposed = max(0.0, hop - forward) + max(0.0, 3 * hop - backward)
    return gathered + (outer - 1) * exposed


def _tensor(setting: Setting, gpu: Gpu, hosts: Hosts, again: float) -> float:
    """Seconds of a layer's collectives of tensor parallelism: two gathers and two sums a pass, and two
    gathers more for the weights' gradients."""
    bytes_ = setting.tokens * setting.args.hidden_size * setting.element
    link = _link(gpu, hosts, 1, setting.tp)
    return (10 + 4 * again) * bytes_ * (setting.tp - 1) / setting.tp / (link * GB)


def _gradients(setting: Setting, gpu: Gpu, hosts: Hosts, parameters: int) -> float:
    """Seconds in which gradients (float32) are summed and parameters gathered over data- and context-parallel
    ranks."""
    ranks = setting.dp * setting.cp
    together = _share_a_host(hosts, setting.tp * ranks)
    link = gpu.link if together else min(hosts.link, gpu.link)
    return parameters * (4 + setting.element) * (ranks - 1) / ranks / (link * GB)
