# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The two ways of the backward side by side on one GPU, beside cuDNN's dense backward: one pass over the keys
(five matrix products), and two deterministic kernels (seven). Prints a table and appends rows to
``results/backward_paths.jsonl``.

Slashes at four densities, columns, packed documents, and heads of dimension 64. Rates are counted, and runs
take turns, as in ``attention.py``, whose rows these resemble: ``path`` is the way of the backward. cuDNN runs
at the length of the case, and at 128K tokens for longer ones (``dense_seq``), where a run takes seconds.
``difference`` is the norm of the difference of a way's gradients from the two kernels' over the norm of the
gradients.

One pass runs in chunks of 64 query blocks (``one_pass_64``), or as ``--chunks N ...`` says, 0 for all at once
(``one_pass``); with ``--one-launch`` also with the chunks in one launch (``one_pass_64_one_launch``). Up to
commit 180a6b5 rows of one pass had tiles of all heads' columns at work at one time, but for
``one_pass_by_head``, which had those of one head, as all have now.

    python -m benchmarks.kernels.backward_paths [--quick] [--case TEXT ...] [--chunks N ...] [--one-launch]
        [--budget SECONDS] [--output FILE]
"""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import torch

from megatron_mtraining.kernels.attention.hopper import backward_key

from ..lib import record
from ..lib.workloads import share_for
from .attention import DENSE_SEQ, SHOWN, Case, attention_runs, index_of, passes, rows_of, take_turns

DENSITIES = (0.05, 0.12, 0.25, 1.0)
SHAPES = ((65536, 16, 2), (65536, 28, 4), (131072, 16, 2), (131072, 28, 4))
LONG = ((524288, 16, 2, DENSITIES), (524288, 28, 4, DENSITIES[:3]))
QUICK = {(65536, 16): DENSITIES, (131072, 16): (0.12,), (65536, 28): (0.12,)}


def _cases() -> list[Case]:
    cases = []
    for seq, heads, kv_heads, densities in (*((*shape, DENSITIES) for shape in SHAPES), *LONG):
        for density in densities:
            quick = density in QUICK.get((seq, heads), ())
            name = f"{seq // 1024}K {heads}/{kv_heads} d128 {density:.0%}"
            share = share_for(density, seq)
            cases.append(Case(name, seq, heads, kv_heads, 128, share, 0, quick))
    for seq, columns in ((65536, 1000), (131072, 1000), (131072, 3500)):
        name = f"{seq // 1024}K 16/2 d128 5% + {columns} columns"
        cases.append(Case(name, seq, 16, 2, 128, share_for(0.05, seq), columns))
    name = "128K 16/2 d128 5% + 1000 columns in 16 documents"
    cases.append(Case(name, 131072, 16, 2, 128, 0.05, 1000, documents=16))
    for density in (0.05, 0.25, 1.0):
        share = share_for(density, 65536)
        cases.append(Case(f"64K 14/2 d64 {density:.0%}", 65536, 14, 2, 64, share, 0))
    for seq in (8192, 16384, 32768):  # from where on one pass pays with dense attention
        for heads, kv_heads, dim in ((16, 2, 128), (28, 4, 128), (14, 2, 64)):
            name = f"{seq // 1024}K {heads}/{kv_heads} d{dim} 100%"
            cases.append(Case(name, seq, heads, kv_heads, dim, 1.0, 0))
    return cases


CASES = _cases()


def paths(chunks: list[int], one_launch: bool) -> dict[str, tuple[str, int, bool]]:
    """The ways to time: ``MTRAINING_BACKWARD``, ``CHUNK`` and ``ONE_LAUNCH``, by name."""
    found = {"two_kernels": ("two_kernels", 0, False)}
    for chunk in chunks:
        name = f"one_pass_{chunk}" if chunk else "one_pass"
        found[name] = "one_pass", chunk, False
        if one_launch and chunk:
            found[f"{name}_one_launch"] = "one_pass", chunk, True
    return found


def along(path: str, chunk: int, one_launch: bool, backward):
    """A backward that takes one of the ways."""

    def run():
        with (
            patch.dict(os.environ, MTRAINING_BACKWARD=path),
            patch.object(backward_key, "CHUNK", chunk),
            patch.object(backward_key, "ONE_LAUNCH", one_launch),
        ):
            return backward()

    return run


def difference(gradients, others) -> float:
    """The norm of the difference of gradients over their norm."""
    apart = sum((a.double() - b.double()).square().sum() for a, b in zip(gradients, others))
    return float((apart / sum(b.double().square().sum() for b in others)).sqrt())


def run_case(
    case: Case,
    budget: float,
    device: str = "cuda",
    cudnn: bool = True,
    chunks=(64,),
    one_launch=False,
) -> list[dict]:
    """The rows of one case."""
    index = index_of(case, device)
    pairs = index.work().sum().item()
    slash = round(index.distances().sum(-1).float().mean().item())
    implementations = {"mtraining", "cudnn"} if cudnn else {"mtraining"}
    dense_seq = min(case.seq, DENSE_SEQ)
    runs = attention_runs(case, index, implementations, dense_seq, device)
    backward = passes(*runs["mtraining"])[1]
    ways = paths([*chunks], one_launch)
    timed = {name: along(*way, backward) for name, way in ways.items()}
    exact = timed["two_kernels"]()
    apart = {name: difference(run(), exact) for name, run in timed.items()}
    del exact  # gradients of some GB
    if cudnn:
        timed["cudnn"] = passes(*runs["cudnn"])[1]
    rows = rows_of(case, pairs, slash, dense_seq, {"backward": take_turns(timed, budget, device)})
    for row in rows:
        row["path"] = row["impl"] if row["impl"] in apart else None
        row["impl"] = "mtraining" if row["path"] else row["impl"]
        row["difference"] = apart.get(row["path"])
    return rows


def main():
    parser = record.parser(__doc__, "backward_paths.jsonl")
    parser.add_argument("--quick", action="store_true", help="six of the cases")
    record.add_case_options(parser)
    parser.add_argument("--chunks", nargs="+", type=int, default=[64], metavar="N")
    parser.add_argument("--one-launch", action="store_true")
    parser.add_argument("--budget", type=float, default=1.0, metavar="SECONDS", help="for a case")
    options = parser.parse_args()
    quick = [case for case in CASES if case.quick or not options.quick]
    cases = record.cases_of(parser, options, quick)
    if any(chunk < 0 for chunk in options.chunks):
        parser.error(f"--chunks {' '.join(map(str, options.chunks))}: use 0 or more")
    start = time.perf_counter()
    for case in cases:
        rows = run_case(case, options.budget, chunks=options.chunks, one_launch=options.one_launch)
        print(f"{case.name}  ({time.perf_counter() - start:.0f} s)")
        for row in rows:
            print(record.line(row, "path", *SHOWN, "difference"), flush=True)
        record.append(options.output, rows)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
