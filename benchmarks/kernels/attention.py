# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention kernels side by side on one GPU: this package's, FlexAttention on the same blocks, cuDNN
dense; then the pattern search (``selection.py``, unless cases or implementations are named). Prints a
table and appends rows to ``results/kernels.jsonl`` and ``selection.jsonl``.

Rates count selected pairs (within documents, if they are packed): pairs x 4 x dim forward, x 2.5 backward. A
GPU's clock falls with the power it has drawn, so implementations run alternately for equal times, and figures
are medians over the repetitions. Each implementation gets the same numbers in its own layout.
FlexAttention runs up to 64K tokens: its mask lists every pair of blocks of each head (67 MB there, 4.3 GB at
512K). Dense attention runs at up to 128K tokens, as one document: ``dense_seq`` in a row says
where its cuDNN rate was measured.

    python -m benchmarks.kernels.attention [--quick] [--case TEXT ...] [--impl NAME ...] [--output FILE]
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.pattern import VerticalSlashIndex
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention
from megatron_mtraining.visibility import VisibleRanges

from ..lib import record
from ..lib.workloads import BLOCK, dense_with, draw_index, draw_operands, heads_first, share_for
from . import selection as index

SHOWN = ("op", "impl", "seq", "density", "vertical", "documents", "ms", "tflops", "share_of_cudnn")
"""Of a row, on the screen."""
IMPLEMENTATIONS = ("mtraining", "flex", "cudnn")
QUICK = ("mtraining", "cudnn")
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION}
FLEX_SEQ = 65536
DENSE_SEQ = 131072
"""The longest length that dense attention runs at: beyond it, a run takes seconds."""
TURN = 0.1  # seconds; a turn is at least one run


class Case(NamedTuple):
    name: str
    seq: int
    heads: int
    kv_heads: int
    dim: int
    share: float  # of far block distances that are kept
    columns: int
    quick: bool = False
    documents: int = 0  # packed, of unequal lengths; 0: one, that is not packed

    @property
    def shape(self):
        return self.seq, self.heads, self.kv_heads, self.dim


def _cases() -> list[Case]:
    def slashes(thousands, heads, dim, percent, quick=False):
        seq = thousands * 1024
        share = share_for(percent / 100, seq)
        name = f"{thousands}K d{dim} slash {percent}%"
        return Case(name, seq, heads, 2, dim, share, 0, quick)

    cases = [slashes(64, 16, 128, percent, True) for percent in (5, 25)]
    cases.append(Case("64K d128 all distances", 65536, 16, 2, 128, 1.0, 0, True))
    cases += [slashes(64, 14, 64, percent, True) for percent in (5, 25)]
    for dim in (256, 192, 96):
        cases.append(slashes(64, 16, dim, 12))
        cases.append(Case(f"64K d{dim} all distances", 65536, 16, 2, dim, 1.0, 0))
    cases.append(Case("64K d256 5% + 1000 columns", 65536, 16, 2, 256, 0.05, 1000))
    cases += [slashes(seq, 16, 128, percent) for seq in (128, 256) for percent in (5, 25)]
    for seq in (128, 512):
        for columns in (1000, 3500):
            for percent in (1, 5):
                name = f"{seq}K d128 {percent}% + {columns} columns"
                quick = (seq, columns, percent) == (128, 1000, 1)
                share = percent / 100
                cases.append(Case(name, seq * 1024, 16, 2, 128, share, columns, quick))
    for share, columns, kept in ((0.05, 1000, "5% + 1000 columns"), (1.0, 0, "all distances")):
        name = f"128K d128 {kept} in 16 documents"
        cases.append(Case(name, 131072, 16, 2, 128, share, columns, documents=16))
    return cases


CASES = _cases()


def _causal(batch, head, query, key):
    return query >= key


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_for(index):
    """FlexAttention compiled for the same slash blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    distances = index.distances()  # [b, h, NB]
    blocks = distances.shape[-1]
    i = torch.arange(blocks, device=distances.device)
    apart = i[:, None] - i[None, :]
    full = distances[..., apart.clamp(min=0)] & (apart > 0)
    count = full.sum(-1).int()
    order = torch.argsort(full.int(), dim=-1, descending=True, stable=True).int()
    diagonal = i.int()[:, None].expand(*full.shape[:3], 1)
    pad = torch.zeros(*full.shape[:3], blocks - 1, dtype=torch.int32, device=i.device)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(count),
        torch.cat((diagonal, pad), -1).contiguous(),
        count,
        order.contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal,
    )
    return lambda q, k, v: _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)


def seconds(run, count: int, device: str) -> float:
    """What one of ``count`` runs takes, one right after the other."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


def take_turns(runs: dict, budget: float, device: str, aside=()) -> dict[str, float]:
    """Milliseconds of each run: medians over at least three rounds, within about ``budget`` seconds. Runs
    that are ``aside`` do not lengthen the others' turns: they are slow, and nothing is set against them. The
    order is drawn anew in each round: after one that leaves the GPU cool a run can be 8% faster."""
    for run in runs.values():
        run()  # compiles
    once = {name: seconds(run, 1, device) for name, run in runs.items()}
    turn = max([TURN] + [s for name, s in once.items() if name not in aside])
    counts = {name: max(1, round(turn / s)) for name, s in once.items()}
    a_round = sum(counts[name] * once[name] for name in runs)
    rounds = min(9, max(3, int(budget / a_round)))
    times = {name: [] for name in runs}
    for number in range(rounds):
        for name in random.Random(number).sample([*runs], len(runs)):
            times[name].append(seconds(runs[name], counts[name], device))
    return {name: 1000 * statistics.median(found) for name, found in times.items()}


def attention_runs(case: Case, index, implementations, dense_seq: int, device: str) -> dict:
    """For each implementation, a function and its operands: query, key, value, gradient of out."""
    operands = draw_operands(*case.shape, torch.bfloat16, device)
    dense = operands if dense_seq == case.seq else draw_operands(
        dense_seq, *case.shape[1:], torch.bfloat16, device
    )  # fmt: skip
    dense = tuple(heads_first(t) for t in dense)
    ring, scale = Ring(CPGroup(None)), case.dim**-0.5
    found = {}
    if "mtraining" in implementations:

        def ours(*tensors):
            return ring_attention(*tensors, index, ring, scale)[0]

        found["mtraining"] = (ours, operands)
    plain = not case.columns and not case.documents and case.share < 1
    fits = plain and case.seq <= min(FLEX_SEQ, dense_seq)
    if "flex" in implementations and fits:
        found["flex"] = (flex_for(index), dense)
    for name in DENSE:
        if name in implementations:
            found[name] = (dense_with(DENSE[name]), dense)
    return found


def passes(run, operands):
    """The forward of a function and its backward, each as a function without arguments."""
    *inputs, grad_out = operands
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = run(*leaves)
    backward = functools.partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)
    return functools.partial(run, *leaves), backward


def measure(runs: dict, budget: float, device: str) -> dict[str, dict[str, float]]:
    """Milliseconds by op and implementation."""
    forward, backward = {}, {}
    for name, (run, operands) in runs.items():
        forward[name], backward[name] = passes(run, operands)
    with torch.no_grad():
        times = {"forward": take_turns(forward, budget, device)}
    times["backward"] = take_turns(backward, budget, device)
    return times


def rows_of(case: Case, pairs: float, slash: int, dense_seq: int, times: dict) -> list[dict]:
    """The rows of one case; ``pairs`` and ``slash`` (mean distances a head) are the pattern's."""
    rows = []
    for op, found in times.items():
        rates = {}
        for name, ms in found.items():
            dense = name in DENSE
            seq = dense_seq if dense else case.seq
            causal = case.heads * seq * (seq + 1) / 2
            work = causal if dense else pairs
            flops = work * 4 * case.dim * (1 if op == "forward" else 2.5)
            rates[name] = flops / ms / 1e9
            rows.append(
                dict(
                    op=op, impl=name, case=case.name, seq=seq, heads=case.heads,
                    kv_heads=case.kv_heads, dim=case.dim, density=round(work / causal, 5),
                    vertical=0 if dense else case.columns, slash=seq // BLOCK if dense else slash,
                    documents=case.documents,
                    ms=round(ms, 4), tflops=round(rates[name], 1),
                )
            )  # fmt: skip
        for row in rows[-len(found) :]:
            share = rates[row["impl"]] / rates["cudnn"] if "cudnn" in rates else None
            row["share_of_cudnn"] = share and round(share, 3)
            row["dense_seq"] = dense_seq if share else None
    return rows


def draw_lengths(seq: int, documents: int) -> list[int]:
    """Of documents that make up a sequence: the longest about 16 times the shortest, in random order."""
    share = torch.logspace(0, 4, documents, base=2)[torch.randperm(documents)]
    ends = (share.cumsum(0) / share.sum() * seq).long()
    ends[-1] = seq
    return ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()


def index_of(case: Case, device: str = "cuda") -> VerticalSlashIndex:
    """A case's pattern: the same, whichever cases run."""
    torch.manual_seed(0)
    index = draw_index(case.seq, case.heads, case.share, case.columns, device)
    if case.documents:
        lengths = draw_lengths(case.seq, case.documents)
        index = replace(index, visible=VisibleRanges.from_lengths(lengths, case.seq, device))
    return index


def run_case(
    case: Case, implementations, dense_seq: int, budget: float, device: str = "cuda"
) -> list[dict]:
    index = index_of(case, device)
    pairs = index.work().sum().item()
    slash = round(index.distances().sum(-1).float().mean().item())
    runs = attention_runs(case, index, implementations, dense_seq, device)
    return rows_of(case, pairs, slash, dense_seq, measure(runs, budget, device))


def main():
    parser = record.parser(__doc__, "kernels.jsonl")
    parser.add_argument(
        "--quick", action="store_true", help="six cases, ours and cuDNN, fewer rounds"
    )
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS)
    record.add_case_options(parser)
    options = parser.parse_args()
    quick = [case for case in CASES if case.quick or options.case or not options.quick]
    cases = record.cases_of(parser, options, quick)
    implementations = set(options.impl or (QUICK if options.quick else IMPLEMENTATIONS))
    start = time.perf_counter()
    for case in cases:
        dense_seq = min(case.seq, DENSE_SEQ)
        rows = run_case(case, implementations, dense_seq, 0.5 if options.quick else 1.0)
        print(f"{case.name}  ({time.perf_counter() - start:.0f} s)")
        print("\n".join(record.line(row, *SHOWN) for row in rows), flush=True)
        record.append(options.output, rows)
        torch.cuda.empty_cache()
    if not (options.case or options.impl):
        index.run_cases(options.quick, options.output.with_name("selection.jsonl"))


if __name__ == "__main__":
    main()
