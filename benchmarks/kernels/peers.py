# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sparse attention kernels of other packages beside this package's, on the same blocks, and dense attention,
in one run on one GPU. Appends rows to ``results/peers.jsonl``.

Peers: cuDNN's dense attention through torch; FlexAttention of torch; block-sparse and flex attention of the
cuDNN frontend; FlashAttention-4 with lists of blocks and dense; flash-msa. Install those that are wanted:
``nvidia-cudnn-frontend``, ``flash-attn-4``, ``flash-msa``. Where wheels are copied to a machine without
network, most need all parts of ``nvidia-cutlass-dsl`` too (``-libs-base``, ``-libs-core``, ``-libs-cu13``).
A peer that is not installed, or refuses a case, has a row that says so.

Patterns are block distances that each head draws by itself. A peer's rate counts the pairs that its own mask
lets through: pairs x 4 x dim forward, x 2.5 backward. ``share_of_cudnn`` divides it by the rate of cuDNN's
dense attention beside it, at up to 128K tokens. Peers run in turns of equal time; figures are
medians. Lists of blocks and plans are made ahead, except where a row's note says otherwise.

With ``--operands FILE`` queries, keys and values are a model's, which ``benchmarks.model.real_operands --keep
FILE`` has written, and the pattern is the block distances that policy price selects from them, no columns.

    python -m benchmarks.kernels.peers [--case TEXT ...] [--peer NAME ...] [--minutes MINUTES]
    python -m benchmarks.kernels.peers --operands FILE [--peer NAME ...]
    python -m benchmarks.kernels.peers --check   # outputs and gradients of short sequences, errors in full
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.pattern import build_index, search_pattern

from ..lib import record
from ..lib.jobs import Deadline
from ..lib.workloads import BLOCK, draw_index, share_for
from . import peer_check
from .attention import DENSE_SEQ, Case, take_turns
from .peer_calls import PEERS, Call, Peer, Problem, Refusal, draw

SHAPES = ((16, 2, 128), (28, 4, 128), (14, 2, 64))
DENSITIES = (5, 12, 25, 100)  # percent of the causal pairs
CHECKED = 1536  # tokens
PRICE = 0.31  # of a model's operands
BUDGET = 1.0  # seconds of a case's turns, for each op


def _cases() -> list[Case]:
    """100% up to 128K tokens, as dense attention of longer sequences takes seconds."""
    found = []
    for thousands in (64, 128, 256, 512):
        for heads, kv_heads, dim in SHAPES:
            for percent in DENSITIES[: 4 if thousands <= 128 else 3]:
                name = f"{thousands}K {heads}/{kv_heads} d{dim} {percent}%"
                seq = thousands * 1024
                share = 1.0 if percent == 100 else share_for(percent / 100, seq)
                found.append(Case(name, seq, heads, kv_heads, dim, share, 0))
    return found


CASES = _cases()


def said(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, Refusal):
        return str(error)
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text.strip()[:200]}"


def _synchronize(name: str) -> None:
    """Raises:
    SystemExit: a peer has left the GPU in an error state, in which nothing runs any more.
    """
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.exit(
            f"{said(error)}\nNothing runs any more after {name}: run again without this --peer"
        )


def prepare(
    name: str, peer: Peer, problem: Problem, full: bool = False
) -> tuple[Call | None, str, str]:
    """A peer's call, after one forward and backward, and why it has no forward or backward ("": it has).

    Args:
        full: print errors in full.
    """
    if peer.packages and peer.version() == "none":
        return None, (why := f"{' or '.join(peer.packages)}: not installed"), why
    op = "build"
    try:
        call = peer.build(problem)
        op = "forward"
        with torch.no_grad():
            call.forward()
        op = "backward"
        if call.backward is not None:
            call.backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # a peer may fail in any way
        if full and not isinstance(error, Refusal):
            traceback.print_exc()
        why = said(error)
        _synchronize(name)
        torch.cuda.empty_cache()  # it may have run out of memory
        if op == "backward":
            return call._replace(backward=None), "", why
        return None, why, why
    return call, "", ""


def peers_of(case: Case, wanted: Sequence[str], measured: set) -> list[str]:
    """The peers that run a case. Dense ones but cuDNN run once for each shape, and are ``measured`` then."""
    found = []
    for name in wanted:
        once = (name, case.shape)
        if name == "cudnn" or not PEERS[name].dense or once not in measured:
            found.append(name)
            measured.add(once)
    return found


def rows_of(
    problem: Problem,
    calls: dict[str, tuple[Call | None, str, str]],
    times: dict[str, dict[str, float] | str],
) -> list[dict[str, Any]]:
    """The rows of a case: of each op and peer, with times in milliseconds or why there is none.

    Args:
        calls: each peer's call, and why it has no forward and no backward.
        times: by op, milliseconds of each peer, or why nobody has any.
    """
    case, dense_seq, rows = problem.case, len(problem.dense[0]), []
    for op, found in times.items():
        rates: dict[str, float] = {}
        for name, (call, *reasons) in calls.items():
            why = reasons[op == "backward"] or (found if isinstance(found, str) else "")
            seq = dense_seq if PEERS[name].dense else case.seq
            row = dict(
                op=op, peer=name, version=PEERS[name].version(), case=case.name, seq=seq, heads=case.heads,
                kv_heads=case.kv_heads, dim=case.dim, block=None, pairs=None, density=None,
                pattern_density=round(problem.pairs / (case.heads * case.seq * (case.seq + 1) / 2), 5),
                ms=None, tflops=None, share_of_cudnn=None, dense_seq=None, note="", why=why,
            )  # fmt: skip
            if call is not None:
                causal = case.heads * seq * (seq + 1) / 2
                row.update(pairs=call.pairs, density=round(call.pairs / causal, 5), note=call.note)
                row["block"] = call.block and f"{call.block[0]}x{call.block[1]}"
            if call is not None and name in found:
                flops = call.pairs * 4 * case.dim * (1 if op == "forward" else 2.5)
                rates[name] = flops / found[name] / 1e9
                row.update(ms=round(found[name], 4), tflops=round(rates[name], 1))
            rows.append(row)
        for row in rows[-len(calls) :]:
            if row["peer"] in rates and "cudnn" in rates:
                share = rates[row["peer"]] / rates["cudnn"]
                row.update(share_of_cudnn=round(share, 3), dense_seq=dense_seq)
    return rows


def drawn(case: Case, dense_seq: int, device: str = "cuda") -> Problem:
    """A case with random operands and a drawn pattern."""
    torch.manual_seed(0)  # the same pattern, whichever peers run
    index = draw_index(case.seq, case.heads, case.share, 0, device)
    return draw(case, index, dense_seq, device)


def of_file(file: Path) -> Iterator[Problem]:
    """A problem of each entry of a file: query, key, value and a gradient of out, by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, operands in torch.load(file, map_location="cpu").items():
        operands = tuple(each.to(device) for each in operands)
        query, key = operands[:2]
        (seq, _, heads, dim), kv_heads = query.shape, key.shape[2]
        config = MTrainingConfig.from_options(price=PRICE)
        selected = search_pattern(query, key, config, CPGroup(None), dim**-0.5)
        columns = torch.zeros(1, heads, 0, dtype=torch.int32, device=device)
        index = build_index(selected.distances(), columns, seq, BLOCK, 1)
        case = Case(
            f"{seq // 1024}K {heads}/{kv_heads} d{dim} {name}", seq, heads, kv_heads, dim, 0.0, 0
        )
        dense = tuple(each[:DENSE_SEQ] for each in operands)
        yield Problem(case, index, operands, dense, int(index.work().sum()))


def measure(problem: Problem, names: Sequence[str], budget: float) -> list[dict[str, Any]]:
    """Measure peers on a case. Peers but this package's and cuDNN's do not lengthen each other's turns."""
    calls = {name: prepare(name, PEERS[name], problem) for name in names}
    aside = [name for name in names if name not in ("mtraining", "cudnn")]
    runs = {name: call for name, (call, *_) in calls.items() if call is not None}
    times: dict[str, dict[str, float] | str] = {}
    device = problem.operands[0].device.type
    for op in ("forward", "backward"):
        found = {name: run for name, call in runs.items() if (run := getattr(call, op)) is not None}
        with torch.set_grad_enabled(op == "backward"):
            try:
                times[op] = take_turns(found, budget, device, aside) if found else {}
            except torch.OutOfMemoryError as error:
                times[op] = f"{said(error)} (of all peers together)"
    return rows_of(problem, calls, times)


def check(
    case: Case, names: Sequence[str], device: str = "cuda"
) -> list[tuple[str, dict[str, float]]]:
    """Each peer's relative errors on a short sequence; errors that it raises are printed in full."""
    torch.manual_seed(0)
    short = case._replace(name=f"{case.name}, {CHECKED} tokens", seq=CHECKED, share=0.3)
    index = draw_index(short.seq, short.heads, short.share, 0, device)
    problem = draw(short, index, short.seq, device)
    found = []
    for name in names:
        start = time.perf_counter()
        call, *reasons = prepare(name, PEERS[name], problem, full=True)
        errors = peer_check.errors(problem, call) if call is not None else {}
        found.append((name, errors))
        texts = [f"{tensor} {error:.1e}" for tensor, error in errors.items()]
        texts += dict.fromkeys(f"refused: {why}" for why in reasons if why)
        if peer_check.too_far(errors):
            texts.append("WRONG")
        seconds = time.perf_counter() - start
        print(f"  {name:12s} {seconds:5.1f} s  {PEERS[name].version():32s} {'; '.join(texts)}")
        sys.stdout.flush()
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = record.parser(__doc__, "peers.jsonl")
    record.add_case_options(parser)
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--check", action="store_true", help="errors of short sequences, once for each shape; no rows"
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="begin no case that would end later")
    parser.add_argument("--operands", type=Path, metavar="FILE", help="in place of the cases")
    options = parser.parse_args(words)
    options.cases = record.cases_of(parser, options, CASES)
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes}: use more than 0")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; --list names the cases")
    return options


def main() -> None:
    options = parse()
    if options.check:
        shapes = {case.shape[1:]: case for case in reversed(options.cases)}
        wrong = []
        for case in reversed(shapes.values()):
            print(f"{case.heads}/{case.kv_heads} heads of {case.dim}", flush=True)
            found = check(case, options.peer)
            wrong += [name for name, errors in found if peer_check.too_far(errors)]
        sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)
    if options.operands is not None:
        for problem in of_file(options.operands):
            record_case(problem, options.peer, options.output)
        return
    measured: set = set()
    shape = None
    deadline = Deadline(options.minutes, expected=20.0)
    for number, case in enumerate(options.cases):
        if not deadline.fits():
            left = [left.name for left in options.cases[number:]]
            print(f"time is short: {len(left)} cases are left for another call: {', '.join(left)}")
            break
        began = time.monotonic()
        if case.shape != shape:
            torch.compiler.reset()  # FlexAttention is compiled for one shape, and only so often
            shape = case.shape
        dense_seq = min(case.seq, DENSE_SEQ)
        names = peers_of(case._replace(seq=dense_seq), options.peer, measured)
        record_case(drawn(case, dense_seq), names, options.output)
        deadline.took(time.monotonic() - began)


def record_case(problem: Problem, names: Sequence[str], output: Path) -> None:
    """Measure peers on a case; rows into ``output``, and shown."""
    began = time.monotonic()
    rows = measure(problem, names, BUDGET)
    record.append(output, rows)
    print(f"{problem.case.name}  ({time.monotonic() - began:.0f} s)")
    shown = ("op", "peer", "seq", "density", "block", "ms", "tflops", "share_of_cudnn", "why")
    print("\n".join(record.line(row, *shown) for row in rows), flush=True)
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
