# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One layer's attention on one GPU: search, forward and backward at a policy's setting, and cuDNN's."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch

from megatron_mtraining.attention import AttentionResult, attend
from megatron_mtraining.config import XAttentionPolicy
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.pattern import search_pattern

from ..lib import record
from ..lib.clock import Clock
from ..lib.policies_at_density import Found, Setting, at_density, config_of
from ..lib.workloads import dense_on, draw_structured, fa4, heads_first, tokens_first

HEADS, KV_HEADS, DIM = 16, 2, 128
"""Of a layer of Qwen2.5-3B."""
COLUMNS = 1000
"""Twice so many keys stand out in each group of heads."""


class Shape(NamedTuple):
    """Of a layer."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM


class Layer:
    """Operands of one layer, and how long attention takes.

    Args:
        seq: tokens.
        shape: of the layer.
        device: a GPU, or the CPU to try it.
        operands: query, key, value and gradient of out, ``[s, 1, h, d]``, of a model; None for random ones,
            whose attention looks like a usual head's.
    """

    def __init__(
        self,
        seq: int,
        shape: Shape,
        device: torch.device,
        block: int = 128,
        operands: tuple[torch.Tensor, ...] | None = None,
    ):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        positions = torch.arange(seq, device=device)
        columns = min(COLUMNS, seq // 16)
        self.operands = operands or draw_structured(seq, positions, *shape, columns, dtype)
        self.seq, self.shape, self.block, self.device = seq, shape, block, device
        self.clock = Clock(device)

    def search(self, setting: Setting):
        """The pattern at a setting."""
        query, key = self.operands[:2]
        scale = self.shape.dim**-0.5
        return search_pattern(query, key, config_of(setting, self.block), CPGroup(None), scale)

    def density(self, setting: Setting) -> float:
        """The share of the pairs that a setting attends to."""
        return self.search(setting).density().double().mean().item()

    def times(self, setting: Setting) -> dict[str, float]:
        """Milliseconds of the GPU.

        Raises:
            RuntimeError, ValueError: the kernels or the memory cannot do it.
        """
        config = config_of(setting, self.block)
        index, search = self.search(setting), partial(self.search, setting)  # compiles
        waits = isinstance(config.policy, XAttentionPolicy)
        searched = self.clock(search, waits=waits)
        density = index.density().double().mean().item()
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def observe(*both: torch.Tensor) -> None:  # of a pruned backward; of the last draw
            kept[:] = [both]

        run = partial(attend, config=config, pattern=index, observe_backward=observe)
        forward, backward = self._both(lambda *given: run(*given).out, self.operands)
        found = dict(search_ms=searched, forward_ms=forward)
        found |= dict(
            backward_ms=backward, density=density, backward_density=density, dropped_mass=0.0
        )
        for backward_density, dropped in kept:
            found |= dict(
                backward_density=backward_density.double().mean().item(),
                dropped_mass=dropped.double().mean().item(),
            )
        return {name: round(value, 5) for name, value in found.items()}

    def dense_times(self) -> dict[str, float]:
        """Milliseconds of dense attention: cuDNN's on a GPU, PyTorch's reference on the CPU."""
        given = [heads_first(each) for each in self.operands]
        forward, backward = self._both(dense_on(self.device), given)
        return dict(dense_forward_ms=round(forward, 5), dense_backward_ms=round(backward, 5))

    def fa4_times(self) -> dict[str, float | None]:
        """Milliseconds of FlashAttention-4's dense attention; None where it is not installed."""
        times: tuple[float | None, float | None] = (None, None)
        if self.device.type == "cuda" and record.installed("flash-attn-4") != "none":
            forward, backward = self._both(fa4, [tokens_first(each) for each in self.operands])
            times = round(forward, 5), round(backward, 5)
        return dict(zip(("fa4_forward_ms", "fa4_backward_ms"), times))

    def replay_times(self, setting: Setting) -> dict[str, float]:
        """Milliseconds of a layer's attention under recomputation of activations: with the first pass's
        result kept, with its pattern kept, and with all of it computed again."""
        config = config_of(setting, self.block)
        *inputs, grad = self.operands
        leaves = [each.detach().requires_grad_() for each in inputs]

        def step(keeps: str):
            with torch.no_grad():
                first: AttentionResult = attend(*inputs, config=config)
            kept = {
                "result": dict(saved=first),
                "pattern": dict(pattern=first.index),
                "nothing": {},
            }
            out = attend(*leaves, config=config, **kept[keeps]).out
            torch.autograd.grad(out, leaves, grad)

        found = {}
        waits = isinstance(config.policy, XAttentionPolicy)
        for keeps in ("result", "pattern", "nothing"):
            step(keeps)
            found[keeps] = round(self.clock(partial(step, keeps), waits=waits), 5)
        return found

    def _both(self, attention, tensors) -> tuple[float, float]:
        """Milliseconds of forward and backward."""
        *inputs, grad = tensors
        with torch.no_grad():
            attention(*inputs)
            forward = self.clock(lambda: attention(*inputs))
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = attention(*leaves)
        backward = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
        backward()
        return forward, self.clock(backward)


class Layers:
    """A layer of ``--shape`` at several lengths, with times of dense attention, and policies at densities;
    each is made and found once.

    Attributes:
        device, gpu: a GPU's name in rows, or "none".
    """

    def __init__(self, options):
        self.options, self.device = options, torch.device(options.device)
        self.gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        self._tried: dict[tuple[str, int], dict[float, Found]] = {}
        self.at = cache(self._at)
        self.dense = cache(lambda seq: self.at(seq).dense_times())

    def _at(self, seq: int) -> Layer:
        return Layer(seq, self.options.shape, self.device, self.options.block_size)

    def found(self, policy: str, wanted: float, seq: int) -> Found:
        """The setting of a policy at a density."""
        known = self._tried.setdefault((policy, seq), {})
        density = self.at(seq).density
        return at_density(policy, wanted, seq, self.options.block_size, density, known)
