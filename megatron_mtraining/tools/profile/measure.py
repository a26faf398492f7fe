# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Measures the pattern search, forward and backward of a layer's attention on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention import Pattern, attend
from ...balance.latency import AttentionShape, visible_pairs
from ...config import MobaPolicy, MTrainingConfig
from ...cp_group import CPGroup
from ...documents import Documents
from ...pattern import VerticalSlashIndex, build_index, search_pattern
from ...requirements import first_line

K = 1024
SLEEP = 100_000_000
"""Cycles that a GPU sleeps while the host launches what is timed, so that no kernel waits for the host."""
ROUNDS, RUNS = 3, 4


@dataclass(frozen=True)
class Case:
    """A layer's attention to measure.

    Attributes:
        kind: one of ``balance.latency.KINDS``.
        tokens: of the sequence.
        density: wanted share of the visible pairs; what a drawn pattern has is measured.
        columns: the share of that density that columns bring, the others slashes; of kind vertical_slash.
        documents: packed, of equal lengths; 1 for a sequence that is not packed.
    """

    kind: str
    tokens: int
    density: float
    columns: float = 0.0
    documents: int = 1

    def __str__(self) -> str:
        packed = f" in {self.documents} documents" if self.documents > 1 else ""
        return f"{self.kind} {self.tokens} tokens{packed}, density {self.density:g}"


CASES = (
    *(Case("vertical_slash", *each) for each in (
        (4 * K, 0.5, 0.3), (4 * K, 1.0, 0.0), (8 * K, 0.05, 0.5), (8 * K, 0.6, 0.3), (16 * K, 0.03, 0.5),
        (16 * K, 0.3, 0.5), (64 * K, 0.015, 0.5), (64 * K, 0.15, 0.3), (64 * K, 0.4, 0.0),
        (128 * K, 0.02, 0.4), (128 * K, 0.25, 0.1), (256 * K, 0.01, 0.5), (256 * K, 0.1, 0.1),
        (8 * K, 0.3, 0.3, 4), (32 * K, 0.15, 0.5, 8), (32 * K, 0.5, 0.0, 64), (64 * K, 1.0, 0.0, 16),
        (128 * K, 0.1, 0.5, 32),
    )),
    *(Case("dense", tokens, 1.0, 0.0, count) for tokens, count in (
        (4 * K, 1), (16 * K, 1), (32 * K, 8), (64 * K, 1), (128 * K, 1),
    )),
    *(Case("block_lists", tokens, density, 0.0, count) for tokens, density, count in (
        (4 * K, 0.4, 1), (16 * K, 0.5, 1), (32 * K, 0.1, 1), (32 * K, 0.3, 8), (64 * K, 0.2, 1),
        (128 * K, 0.05, 1),
    )),
)  # fmt: skip
TINY = (
    *(Case("vertical_slash", tokens, 0.7, 0.2) for tokens in (256, 512)),
    Case("vertical_slash", 512, 0.9, 0.2, 2), Case("dense", 256, 1.0), Case("block_lists", 512, 0.7),
)  # fmt: skip
"""What the reference kernels of a CPU take seconds for."""


class Measurement(NamedTuple):
    """What a case took: visible pairs of a head, the share of them that is attended, and milliseconds."""

    case: Case
    shape: AttentionShape
    pairs: float
    density: float
    search: float
    forward: float
    backward: float


def measure_all(
    cases: Sequence[Case], shape: AttentionShape, device: torch.device, tell: Callable[[str], None]
) -> list[Measurement]:
    """Measure cases one after the other; what fails, for example because memory is short, is left out.

    Args:
        tell: called after each case with a line for the user.
    """
    found = []
    for case in cases:
        torch.manual_seed(0)  # the same pattern, whichever cases are measured
        try:
            found.append(measure(case, shape, device))
        except Exception as error:  # also a compiler's
            tell(f"left out: {case}: {first_line(error)}")
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        search, forward, backward = found[-1][4:]
        tell(f"{case}: {search:.3f} + {forward:.3f} + {backward:.3f} ms")
    return found


def measure(case: Case, shape: AttentionShape, device: torch.device) -> Measurement:
    """Measure one case."""
    config, documents = _config_of(case), None
    lengths = [case.tokens // case.documents] * case.documents
    if case.documents > 1:
        documents = Documents.from_lengths(lengths, case.tokens, device)
    query, key, value, grad_out = _operands(case.tokens, shape, device)
    search = partial(
        search_pattern, query, key, config, CPGroup(None), shape.head_dim**-0.5, documents=documents
    )
    index: Pattern = search()
    search_ms = milliseconds(search, device)
    if case.kind == "vertical_slash":
        index = _vertical_slash_index(case, shape.num_heads, config, documents, device)
    run = partial(attend, config=config, documents=documents, first_pass=index)
    with torch.no_grad():
        forward = milliseconds(lambda: run(query, key, value), device)
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    out = run(*leaves).out
    backward = milliseconds(
        partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True), device
    )
    density = float(index.density().double().mean())
    return Measurement(case, shape, visible_pairs(lengths), density, search_ms, forward, backward)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The time of ``run`` on the device, the median of a few rounds; it runs once before."""
    run()
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        start.record()
        for _ in range(RUNS):
            run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / RUNS)
    return max(1e-4, statistics.median(found))


def _config_of(case: Case) -> MTrainingConfig:
    """The settings whose pattern search is measured: policy price and default sampling, moba, or dense."""
    config = MTrainingConfig()
    if case.kind == "dense":
        return config.dense()
    if case.kind == "vertical_slash":
        return config
    # A query block sees, in the mean over all, half of the blocks of its document.
    blocks = case.tokens / config.block_size / case.documents
    return replace(config, policy=MobaPolicy(top_k=max(1, round(case.density * blocks / 2))))


def _operands(
    tokens: int, shape: AttentionShape, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and a gradient of the output, ``[s, 1, h, d]``. Some keys stand out: columns that the
    pattern search finds."""
    heads, kv_heads, dim = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(tokens, 1, count, dim, device=device, dtype=dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    at = torch.randperm(tokens, device=device)[: min(1000, tokens // 64)]
    query[..., 0] += 0.8 * dim**0.5
    key[at, :, :, 0] += 0.8 * dim**0.5
    return query, key, value, torch.randn_like(query)


def _vertical_slash_index(
    case: Case,
    heads: int,
    config: MTrainingConfig,
    documents: Documents | None,
    device: torch.device,
) -> VerticalSlashIndex:
    """A local window, far distances at random and columns at random. As in the default pattern search, the
    index has room for as many columns as the policy's cap."""
    tokens = case.tokens
    blocks = -(-tokens // config.block_size)
    window = min(blocks, -(-config.window // config.block_size) + 1)
    length = tokens // case.documents
    room = min(tokens, config.policy.vertical_cap)  # type: ignore[union-attr]
    far = case.density * (1 - case.columns) - window * config.block_size * 2 / length
    share = 1.0 if case.density == 1 else min(1.0, max(0.0, far))
    distances = torch.rand(1, heads, blocks) < share
    distances[..., :window] = True
    columns = torch.full((1, heads, room), tokens, dtype=torch.int64, device=device)
    count = min(room, round(case.columns * case.density * tokens))
    if count:
        columns[0, :, :count] = torch.rand(heads, tokens, device=device).topk(count, -1).indices
    index = build_index(distances.to(device), columns, tokens, config.block_size, 1)
    return replace(index, documents=documents)
