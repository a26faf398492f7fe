# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining profile``: measure attention on this machine's GPU, and keep it in a file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ...errors import ConfigError
from . import again, provenance
from .report import report

# What measures is imported as it runs: it imports torch, and --help does not need it.

DEFAULTS = ((16, 2, 128), (14, 2, 64))
"""Query heads, key and value heads and head dimension of what is measured."""
HEAD_DIMS = (64, 128)
MOST_HEADS = 512
EPILOG = """\
Give --num-attention-heads, --num-query-groups and --kv-channels of your model (of one tensor-parallel rank)
to measure only this shape. By default, two shapes are measured: 16 query and 2 KV heads of dimension 128, and
14 query and 2 KV heads of dimension 64.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--output", type=Path, required=True, help="file to write, JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--num-attention-heads", type=int, help="query heads of a tensor-parallel rank"
    )
    parser.add_argument("--num-query-groups", type=int, help="KV heads of a tensor-parallel rank")
    parser.add_argument("--kv-channels", type=int, help="head dimension: 64 or 128")
    parser.add_argument("--quick", action="store_true", help="sequences of up to 64K tokens only")
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="PROFILE",
        help="fit the model to the measurements in this profile, without a GPU",
    )
    parser.add_argument(
        "--log", type=Path, help="file to add each measurement to as it is made, JSON lines"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS
    )  # cpu: a few tiny shapes, to try the command


def when_ended(args) -> str:
    return f"{args.output} was not written" + (
        f", {args.log} has what was measured" if args.log else ""
    )


def run(args) -> int:
    if args.fit is not None:
        return again.fit_again(args)
    shapes = _shapes(args)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "mtraining profile measures a GPU, and torch finds none here: run it on a machine with a GPU"
        )
    from ...balance import AttentionShape, LatencyModel
    from ...balance.profile_file import as_text
    from ..common.atomic_output import atomic_file
    from . import cases, compiling, fit, measure

    device = torch.device(args.device)
    make = cases.tiny if args.device == "cpu" else lambda own: cases.cases(own, args.quick)
    planned = make([AttentionShape(*shape) for shape in shapes])
    started = time.perf_counter()
    with ExitStack() as stack:
        # Opened first: a place that cannot be written is found out before measuring.
        file = stack.enter_context(atomic_file(args.output, overwrite=args.overwrite))
        tell = stack.enter_context(_progress(len(planned), args.log))
        if device.type == "cuda":
            compiling.compile_ahead(planned, device, _tell_compiling)
        measured, left_out = measure.measure_all(planned, device, tell)
        processors = provenance.processors(device)
        entries = fit.fit(measured, processors)
        if not entries:
            raise ConfigError(
                f"no shape could be measured on this {args.device}; the first: {left_out[0]}"
            )
        model = LatencyModel(
            gpu=provenance.device_name(device), entries=entries, processors=processors
        )
        model = replace(
            model,
            errors=fit.errors(model, measured),
            versions=provenance.versions(),
            commit=provenance.commit(),
            command=provenance.command(),
            seconds=time.perf_counter() - started,
            points={
                "columns": list(measure.COLUMNS),
                "rows": [measure.row_of(each) for each in measured],
            },
            left_out=tuple(left_out),
        )
        file.write(as_text(vars(model)).encode())
    print(report(model, measured))
    print(f"{args.output} written in {model.seconds:.0f} s")
    return 0


def _tell_compiling(sets: int, processes: int) -> None:
    if sys.stderr is not None:
        print(
            f"compiling kernels for {sets} kinds of shapes in {processes} processes",
            file=sys.stderr,
            flush=True,
        )


def _shapes(args) -> list[tuple[int, int, int]]:
    """Query heads, key and value heads and head dimension of what is to be measured."""
    heads, groups, dim = args.num_attention_heads, args.num_query_groups, args.kv_channels
    if dim is not None and dim not in HEAD_DIMS:
        raise ConfigError(f"--kv-channels is {dim}: attention has head dimensions 64 and 128")
    for name, value in (("num-attention-heads", heads), ("num-query-groups", groups)):
        if value is not None and not 1 <= value <= MOST_HEADS:
            raise ConfigError(f"--{name} is {value}: use 1 to {MOST_HEADS}")
    shapes = [shape for shape in DEFAULTS if dim in (None, shape[2])]
    if heads is None and groups is None:
        return shapes
    if heads is None:
        raise ConfigError(
            f"--num-query-groups is {groups}, without --num-attention-heads: give both"
        )
    groups = heads if groups is None else groups  # Megatron's default
    if heads % groups:
        raise ConfigError(
            f"--num-attention-heads is {heads}, not a multiple of --num-query-groups ({groups}): give the "
            "numbers of your model"
        )
    return [(heads, groups, shape[2]) for shape in shapes]


@contextmanager
def _progress(total: int, log: Path | None) -> Iterator:
    """What to call after each case. A bar on a terminal, if tqdm is there; a line a case otherwise."""
    from .measure import COLUMNS, row_of

    bar = None
    if sys.stderr is not None and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            pass
        else:
            bar = tqdm(total=total, desc="profile", unit="shape", file=sys.stderr)
    started, done = time.perf_counter(), 0

    def tell(case, measured, reason: str) -> None:
        nonlocal done
        done += 1
        if measured is None:
            line = f"left out: {case}: {reason}"
            values = {"left_out": str(case), "reason": reason}
        else:
            parts = (measured.search, measured.forward, measured.backward)
            times = " + ".join(f"{part.gpu:.3f}" for part in parts)
            line = f"{case} (found {measured.density:.4f}): {times} ms"
            values = dict(zip(COLUMNS, row_of(measured)))
        if file is not None:
            file.write(json.dumps(values) + "\n")
            file.flush()
        if bar is not None:
            bar.update()
            if measured is None:
                bar.write(line, file=sys.stderr)
        elif sys.stderr is not None:
            seconds = time.perf_counter() - started
            print(f"[{done}/{total}, {seconds:.0f} s] {line}", file=sys.stderr, flush=True)

    file = None
    try:
        if log is not None:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                file = open(log, "a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"--log is {log}, which cannot be written: {error.strerror}; name another place"
                ) from None
        yield tell
    finally:
        if bar is not None:
            bar.close()
        if file is not None:
            file.close()
