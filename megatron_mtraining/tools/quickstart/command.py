# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining quickstart`` from start to end: text, training processes, results."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from ...requirements import require
from .options import HEAD_DIM, Options, add_arguments, options_from

__all__ = ["add_arguments", "run"]  # the interface of a subcommand of megatron_mtraining.tools.cli


def run(args) -> int:
    """Run the quickstart with parsed arguments; returns the exit status.

    Raises:
        ConfigError: a package is missing, an option cannot work, or there is not enough text.
    """
    require("megatron.core", "sentencepiece", "matplotlib", "tqdm", extra="quickstart")
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    from .results import write_results
    from .text import write_sequences

    options = options_from(args)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mtraining-quickstart-") as name:
        folder = Path(name)
        write_sequences(folder, options.steps, options.seq_length)
        try:
            train(options, folder)
        except (ProcessRaisedException, ProcessExitedException) as error:
            print(
                f"mtraining quickstart: process {error.error_index} failed:\n{error}",
                file=sys.stderr,
            )
            return 1
        write_results(options, folder)
    print(f"\nTook {time.perf_counter() - started:.0f} s. Pictures: {options.output.resolve()}")
    return 0


def train(options: Options, folder: Path) -> None:
    """Run the training processes on the text in ``folder``; when one fails the others are stopped."""
    import torch.multiprocessing as processes

    from .train import worker

    link = "GPUs, NCCL" if options.device == "cuda" else "CPU processes, gloo"
    print(
        f"Model: {options.layers} layers, hidden size {options.hidden}, {options.heads}/"
        f"{options.kv_heads} heads of dimension {HEAD_DIM}, sequence length {options.seq_length}, "
        f"context-parallel size {options.processes} ({link})",
        flush=True,
    )
    if options.device == "cpu":
        print(
            "No GPU is used: here the sparse run computes all pairs and masks, so it is not "
            "faster; the kernels that skip them need a GPU",
            flush=True,
        )
    # Daemons end with this process, whatever ends it.
    processes.spawn(worker, (options, str(folder)), options.processes, daemon=True)
