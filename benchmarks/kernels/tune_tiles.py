# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Times each kernel with several tile sizes on one GPU, for the table in ``kernels/common/tiles.py``.

    python -m benchmarks.kernels.tune_tiles [OPERATION ...]

Prints the four fastest of each, and appends them to ``results/tiles.jsonl``: ``block_m`` and ``block_n`` are
the query and key rows of a tile; rates count the products the kernel itself does. Older rows have ``keep``
and ``walk``: the rows of the operand that a program holds, and of the one that it loops over.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

import torch
import triton

from megatron_mtraining.kernels import attention as kernels
from megatron_mtraining.kernels.common import tiles
from megatron_mtraining.ring import RingStep, Round

from ..lib import record
from ..lib.workloads import draw_index

SWEEP = {
    "forward": itertools.product((128,), (64, 128), (4, 8), (2, 3, 4)),
    "query": itertools.product((64, 128), (32, 64), (4, 8), (2, 3)),
    "key": itertools.product((32, 64, 128), (64, 128), (4, 8), (1, 2, 3)),
    "column": itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)),
}


def main():
    os.environ["MTRAINING_PORTABLE_KERNELS"] = "1"  # the table is theirs
    torch.manual_seed(0)
    round_, ring_step = Round(0, 0, 1, 1), RingStep(0, 0, 1, 1)
    sweep = {name: list(sizes) for name, sizes in SWEEP.items()}
    for dim, heads in ((128, 16), (64, 14)):
        q = torch.randn(65536, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(65536, 1, 2, dim, device="cuda", dtype=q.dtype) for _ in range(2))
        do = torch.randn_like(q)
        slashes = draw_index(65536, heads, 0.1, 0, "cuda")
        columns = draw_index(65536, heads, 0.0, 1000, "cuda")
        lse = torch.empty(1, heads, 65536, device="cuda")
        keys = kernels.RoundKeys(k[None], v[None], None, round_)
        forward = kernels.ForwardInputs(q, keys, slashes, dim**-0.5, lse)
        delta = kernels.delta(kernels.forward(forward), do)
        backward = kernels.BackwardInputs(q, do, lse, delta, slashes, dim**-0.5)
        of_columns = replace(backward, index=columns)
        column_kv = kernels.gather_columns(k, v, columns, 0)
        runs = {
            "forward": lambda: kernels.forward(forward),
            "query": lambda: kernels.backward_query(backward, keys),
            "key": lambda: kernels.backward_key(backward, kernels.StepKeys(k, v, ring_step)),
            "column": lambda: kernels.backward_columns(of_columns, column_kv, 0),
        }
        flops = slashes.work().sum().item() * dim * 2
        products = {"forward": 2, "query": 3, "key": 4}
        for name in sys.argv[1:] or runs:
            run = runs[name]
            before = tiles._HOPPER[name, dim]
            found = []
            for sizes in sweep[name]:
                tiles._HOPPER[name, dim] = tiles.Tile(*sizes)
                try:
                    found.append((triton.testing.do_bench(run, return_mode="median"), sizes))
                except (triton.runtime.errors.OutOfResources, triton.CompilationError) as error:
                    print(name, dim, sizes, type(error).__name__)
            tiles._HOPPER[name, dim] = before
            for ms, sizes in sorted(found)[:4]:
                rate = round(flops * products[name] / ms / 1e9) if name in products else None
                print(f"{name} d{dim} {sizes} {ms:.3f} ms {rate or ''}", flush=True)
                row = dict(zip(("block_m", "block_n", "warps", "stages"), sizes))
                row = dict(op=name, dim=dim, **row, ms=round(ms, 3), tflops=rate)
                record.append(record.RESULTS / "tiles.jsonl", [row])


if __name__ == "__main__":
    main()
