# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What it costs to choose a step's pattern: one rank of a simulated ring, on one GPU.

There is no process group: a stand-in for the ring of W ranks makes sums a no-op, and all-gather
gives zeros for the other ranks. So times have every kernel of the choice at the sizes of a rank (the
merge of W ranks' offers too) and no communication, and the chosen sets are of this rank's keys alone.
Prints a table and appends rows to ``results/selection.jsonl``: milliseconds of
GPU time (``ms``, replayed as a CUDA graph: what a queue that runs ahead of the GPU would show), the
same launched one by one (``launched_ms``) and the host's time to launch it all (``host_ms``), medians;
and what the index keeps. ``vertical`` is the cap with policy price; half of the rows are held out where a
stratum has several. Of policies that choose lists of blocks, and of heads of which
some do (``mixed``: every second by xattention, the others by price), there is no ``ms``: making lists waits
for the device.

    python -m benchmarks.kernels.selection [--quick] [--output FILE]
"""

from __future__ import annotations

import time

import torch
import triton

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import XAttentionPolicy
from megatron_mtraining.pattern import search_pattern

from ..lib import record

HEADS, KV_HEADS, DIM = 16, 2, 128
# seq, ranks
LAYOUTS = [(131072, 1), (131072, 4), (524288, 4)]
SETTINGS = [
    # Random scores are all worth about the same: a price that takes as many columns as real ones have. Every
    # one of the cap is a candidate at the usual price; of columns that stand out, only those are.
    dict(policy="price", price=1.0),
    dict(policy="price", price=1.0, standing_out=1000),
    dict(vertical=1000, sample_strata=64, sample_rows=1),
    dict(vertical=3500, sample_strata=64, sample_rows=1),
    dict(vertical=1000, sample_strata=64, sample_rows=4),
    dict(vertical=3500, sample_strata=64, sample_rows=4),
]
# On one rank.
BLOCK_SETTINGS = [
    dict(policy="xattention"),
    dict(policy="moba"),
    dict(policy="price", price=1.0, standing_out=1000, mixed=True),
]


class RankAlone:
    """The first rank of a ring of ``world``, with no other there; see the module's text."""

    def __init__(self, world: int):
        self.rank, self.world, self.inner = 0, world, world

    def all_reduce(self, tensor):
        return tensor

    def reduce_scatter(self, tensor):
        if self.world == 1:
            return tensor
        # The copy that the collective needs is made; its transfer is not.
        return tensor.unflatten(-1, (self.world, -1)).movedim(-2, 0).contiguous()[self.rank]

    def all_gather(self, tensor):
        if self.world == 1:
            return tensor[None]
        parts = tensor.new_zeros(self.world, *tensor.shape)
        parts[self.rank] = tensor
        return parts


def host_milliseconds(run) -> float:
    """Median time until the host has launched everything."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(times)[len(times) // 2] * 1e3


def graph_milliseconds(run) -> float:
    """Median time of a replay: the kernels without the gaps between launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    median = triton.testing.do_bench(graph.replay, warmup=50, rep=200, return_mode="median")
    del kept
    return median


def run_case(seq, world, settings):
    settings = dict(settings)
    standing_out, mixed = settings.pop("standing_out", 0), settings.pop("mixed", False)
    config = MTrainingConfig.from_options(**settings)
    heads = [config.policy, XAttentionPolicy()] * (HEADS // 2) if mixed else None
    length = seq // world
    query = torch.randn(length, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(length, 1, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    if standing_out:
        # So many keys take nine tenths of all attention between them.
        query[..., 0] += 9.2
        key[torch.randperm(length, device="cuda")[:standing_out], :, :, 0] += 9.2
    ring = RankAlone(world)

    def run():
        return search_pattern(query, key, config, ring, DIM**-0.5, head_policies=heads)

    nbytes = run().nbytes
    lists = mixed or config.policy.has_block_lists
    flat, rows = config.options(), config.sampling.num_rows
    ms = None if lists else graph_milliseconds(run)
    launched = triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median")
    row = dict(
        op="index", impl="mtraining", seq=seq, world=world, heads=HEADS, kv_heads=KV_HEADS, dim=DIM,
        policy="mixed" if mixed else config.policy.name, vertical=flat["vertical"] or flat["vertical_cap"],
        slash=flat["slash"], rows=rows, standing_out=standing_out,
        ms=ms and round(ms, 4), launched_ms=round(launched, 4), host_ms=round(host_milliseconds(run), 4),
        index_bytes=nbytes,
    )  # fmt: skip
    print(
        f"index {seq:7d} tokens / {world} ranks, {row['policy']}, {row['vertical'] or 0:4d} columns, "
        f"{rows:3d} rows{f', {standing_out} stand out' if standing_out else ''}: "
        f"{'' if lists else f'{ms:.3f} ms, '}launched {launched:.3f} ms, host {row['host_ms']:.3f} ms, "
        f"index {nbytes / 1e6:.2f} MB",
        flush=True,
    )
    return row


def run_cases(quick, output):
    torch.manual_seed(0)
    for layout in LAYOUTS:
        for settings in SETTINGS[:2] if quick else SETTINGS:
            record.append(output, [run_case(*layout, settings)])
    for settings in () if quick else BLOCK_SETTINGS:
        record.append(output, [run_case(*LAYOUTS[0], settings)])


def main():
    parser = record.parser(__doc__, "selection.jsonl")
    parser.add_argument("--quick", action="store_true", help="policy price only")
    options = parser.parse_args()
    run_cases(options.quick, options.output)


if __name__ == "__main__":
    main()
