# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining quickstart`` from start to end: text, training processes, results."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from ...requirements import require
from ..common.atomic_output import atomic_files
from .options import HEAD_DIM, Options, add_arguments, options_from

# The interface of a subcommand, see tools.cli
__all__ = ["add_arguments", "run", "when_ended"]


def run(args) -> int:
    """Run the quickstart with parsed arguments; returns the exit status.

    Raises:
        ConfigError: a package is missing, an option cannot work, or there is not enough text.
    """
    require("megatron.core", "sentencepiece", "matplotlib", "tqdm", extra="quickstart")
    from .ranks import RankFailed
    from .results import FILES, write_results
    from .text import write_sequences

    options = options_from(args)
    started = time.perf_counter()
    try:
        with (
            # First: whether results can be written there is known before training.
            atomic_files(options.output, overwrite=options.overwrite, names=FILES) as output,
            tempfile.TemporaryDirectory(prefix="mtraining-quickstart-") as name,
        ):
            folder = Path(name)
            write_sequences(folder, options.steps, options.seq_length)
            train(options, folder)
            text = write_results(options, folder, output)
    except RankFailed as error:
        print(f"{error.details}mtraining quickstart: {error}", file=sys.stderr)
        return 1
    print(
        f"\n{text}\n\nTook {time.perf_counter() - started:.0f} s. Pictures: {options.output.resolve()}"
    )
    return 0


def train(options: Options, folder: Path) -> None:
    """Run the training processes on the text in ``folder``; when one fails the others are stopped."""
    from .ranks import run_ranks

    link = "GPUs, NCCL" if options.device == "cuda" else "CPU processes, gloo"
    print(
        f"Model: {options.layers} layers, hidden size {options.hidden}, {options.heads}/"
        f"{options.kv_heads} heads of dimension {HEAD_DIM}, sequence length {options.seq_length}, "
        f"context-parallel size {options.processes} ({link})",
        flush=True,
    )
    if options.device == "cpu":
        print(
            "No GPU is used: on a CPU the sparse run computes all pairs and masks them, so it is not faster. "
            "The kernels that skip pairs need a GPU",
            flush=True,
        )
    run_ranks(options, folder)


def when_ended(args) -> str:
    """What a run leaves that is interrupted."""
    return f"no results were written to {args.output}"
