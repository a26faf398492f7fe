# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining profile``: measure attention on this machine's GPU, and keep what it costs in a file."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from ...errors import ConfigError

HEAD_DIMS = (64, 128)
MOST_HEADS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, help="file to write, JSON")
    add("--overwrite", action="store_true", help="replace an existing file")
    add(
        "--num-attention-heads",
        type=int,
        required=True,
        help="query heads of a tensor-parallel rank",
    )
    add("--num-query-groups", type=int, required=True, help="KV heads of a tensor-parallel rank")
    add("--kv-channels", type=int, required=True, help="head dimension: 64 or 128")
    # cpu: a few tiny shapes, to try the command
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)


def when_ended(args) -> str:
    return f"{args.output} was not written"


def run(args) -> int:
    heads, groups, dim = args.num_attention_heads, args.num_query_groups, args.kv_channels
    if dim not in HEAD_DIMS:
        raise ConfigError(f"--kv-channels is {dim}: attention has head dimensions 64 and 128")
    if not 1 <= groups <= heads <= MOST_HEADS or heads % groups:
        raise ConfigError(
            f"--num-attention-heads is {heads}, with --num-query-groups {groups}: use 1 to {MOST_HEADS} "
            "heads, a multiple of the groups"
        )
    # Imported here: it imports torch, and --help does not need it.
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "mtraining profile measures a GPU, and torch finds none here: run it on a machine with a GPU"
        )
    from ...balance.latency import AttentionShape, LatencyModel
    from ..common.atomic_output import atomic_file
    from . import fit, measure

    device = torch.device(args.device)
    gpu, processors, cases = "CPU", 1, measure.TINY
    if device.type == "cuda":
        gpu, cases = torch.cuda.get_device_name(), measure.CASES
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    # Opened first: a place that cannot be written is found out before measuring.
    with atomic_file(args.output, overwrite=args.overwrite) as file:
        shape = AttentionShape(heads, groups, dim)
        measured = measure.measure_all(cases, shape, device, _tell)
        model = LatencyModel(gpu, fit.fit(measured, processors), processors)
        if not model.entries:
            raise ConfigError(f"no shape could be measured on this {args.device}")
        file.write(model.as_text().encode())
    errors = fit.relative_errors(model, measured)
    print(
        f"{args.output} written: {len(measured)} of {len(cases)} shapes measured; the profile is "
        f"{statistics.median(errors):.1%} from them in the median, {max(errors):.1%} at worst"
    )
    return 0


def _tell(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
