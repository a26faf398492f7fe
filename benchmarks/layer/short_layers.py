# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Launches and host time of a short layer's attention on one GPU: pattern search, forward and backward.

For each length there are three rows, measured in turns: all launched kernel by kernel
(``search`` is "kernels"), with the search captured as a CUDA graph ("graph"; see
:mod:`megatron_mtraining.pattern.search_graph`), and PyTorch's dense attention, cuDNN's on a GPU ("dense").
Of the search alone, of the forward with its search, and of the backward, a row has

- ``_host_us``: microseconds until the host has launched all, beginning with an idle GPU: a median;
- ``_back_to_back_us``: microseconds of the host for each of several calls back-to-back, as in training: a
  median;
- ``_ms``: milliseconds of the GPU, launched ahead;
- ``_launches``: what the host launches: kernels, copies and graphs.

    python -m benchmarks.layer.short_layers [--seq 8192 16384 32768] [--policy price] [--output FILE]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.pattern import search_pattern

from ..lib import record
from ..lib.clock import Clock
from ..lib.workloads import dense_on, draw_structured, heads_first

SHAPE = dict(heads=16, kv_heads=2, dim=128)
COLUMNS = 1000
"""Twice as many keys stand out for each KV head."""
WARM_UP = 4
"""Calls until all is compiled and captured: the second search is."""
ROUNDS = 5
"""Turns of a median."""
RUNS = 12
"""Of a turn."""

CAPTURED = {"kernels": "0", "graph": "1", "dense": "0"}
"""``MTRAINING_SEARCH_GRAPH``, by what rows have as ``search``."""


def captured(what: str):
    """A context in which the search is captured as :data:`CAPTURED` says."""
    return mock.patch.dict(os.environ, MTRAINING_SEARCH_GRAPH=CAPTURED[what])


def operands(seq: int, shape: dict[str, int], device: torch.device) -> tuple[Tensor, ...]:
    """query, key, value and a gradient of out, whose attention looks like a usual head's."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    positions = torch.arange(seq, device=device)
    return draw_structured(seq, positions, *shape.values(), min(COLUMNS, seq // 16), dtype)


def parts(tensors: tuple[Tensor, ...], config: MTrainingConfig) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    query, key, *_ = tensors
    scale = query.shape[-1] ** -0.5
    search = partial(search_pattern, query, key, config, CPGroup(None), scale)
    return {"search": search, **_both(lambda *given: attend(*given, config=config).out, tensors)}


def dense_parts(tensors: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """:func:`parts` of PyTorch's dense attention."""
    return _both(dense_on(tensors[0].device), tuple(map(heads_first, tensors)))


def _both(
    attention: Callable[..., Tensor], tensors: tuple[Tensor, ...]
) -> dict[str, Callable[[], object]]:
    *inputs, grad = tensors
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attention(*leaves)
    return {
        "forward": partial(attention, *leaves),
        "backward": partial(torch.autograd.grad, out, leaves, grad, retain_graph=True),
    }


def host_microseconds(run: Callable[[], object], device: torch.device) -> list[float]:
    """Times until the host has launched all, with nothing left on the GPU at the start."""
    return [calls_microseconds(run, 1, device) for _ in range(RUNS)]


def calls_microseconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """The host's time for each of so many calls back-to-back, beginning with an idle GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return 1e6 * (time.perf_counter() - start) / calls


def launches(run: Callable[[], object]) -> int:
    """What the host launches."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    launched = {
        event.correlation_id()
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    }
    return len(launched)


def measured(tensors: tuple[Tensor, ...], policy: str) -> list[dict]:
    """The rows of one length."""
    query, key, *_ = tensors
    seq, _, heads, dim = query.shape
    device, clock = query.device, Clock(query.device)
    config = MTrainingConfig.for_sequence(seq, policy=policy)
    runs: dict[str, dict[str, Callable[[], object]]] = {}
    host: dict[tuple[str, str], list[float]] = {}
    back_to_back: dict[tuple[str, str], list[float]] = {}
    rows = []
    for what in CAPTURED:
        with captured(what):
            runs[what] = dense_parts(tensors) if what == "dense" else parts(tensors, config)
            for run in runs[what].values():
                for _ in range(WARM_UP):
                    run()
    for _ in range(ROUNDS):
        for what in CAPTURED:
            with captured(what):
                for part, run in runs[what].items():
                    host.setdefault((what, part), []).extend(host_microseconds(run, device))
                    each = calls_microseconds(run, RUNS, device)
                    back_to_back.setdefault((what, part), []).append(each)
    for what in CAPTURED:
        row = dict(
            op="short", impl="pytorch" if what == "dense" else "mtraining", seq=seq,
            heads=heads, kv_heads=key.shape[2], dim=dim,
            policy=None if what == "dense" else config.policy.name, search=what,
        )  # fmt: skip
        with captured(what):
            for part, run in runs[what].items():
                row[f"{part}_host_us"] = round(statistics.median(host[what, part]), 1)
                row[f"{part}_back_to_back_us"] = round(
                    statistics.median(back_to_back[what, part]), 1
                )
                row[f"{part}_ms"] = round(clock(run), 4)
                if device.type == "cuda":
                    row[f"{part}_launches"] = launches(run)
        rows.append(row)
        counts = "".join(
            f"; {part}: host {row[f'{part}_host_us']:.0f} us, "
            f"back-to-back {row[f'{part}_back_to_back_us']:.0f} us, "
            f"GPU {row[f'{part}_ms']:.3f} ms, {row.get(f'{part}_launches')} launches"
            for part in runs[what]
        )
        print(f"{seq:6d} tokens, {row['search']}{counts}", flush=True)
    return rows


def main(words: list[str] | None = None) -> None:
    parser = record.parser(__doc__, "short_layers.jsonl")
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--policy", default="price", choices=["price", "xattention"])
    options = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for seq in options.seq:
        record.append(options.output, measured(operands(seq, SHAPE, device), options.policy))


if __name__ == "__main__":
    main()
