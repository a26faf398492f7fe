# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan memory``: what a training command needs on each GPU, and how long a step takes; and
``mtraining plan layouts``."""

from __future__ import annotations

import argparse
import json
import shlex
import warnings
from pathlib import Path

from ...errors import ConfigError, short
from ...files import read_text
from ..common.streams import Parser
from .assumptions import GIB, OVERHEAD_GIB, SLACK
from .gpu_options import add_gpu, check_gpu
from .rates import gpu_of

# What plans is imported as it runs: it imports torch and Megatron, and --help needs neither.

FIND = ("seq-length", "context-parallel-size")
LARGEST = dict(world_size=10**9, gpu_memory_gib=1e9, overhead_gib=1e9, slack=1e3)
"""Of the plan's own numbers: larger ones are mistakes, and overflow."""
MAY_BE_0 = ("overhead_gib", "slack")
EPILOG = """\
FLAGS are Megatron's flags, as pretrain_gpt.py takes them, or a whole training command:

  mtraining plan memory --gpu h200 --find seq-length -- torchrun ... pretrain_gpt.py ...

Put the options above before --, or among the flags.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", choices=["memory", "layouts"], help="what to plan")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="its options: mtraining plan layouts --help, mtraining plan memory --help",
    )


def options_of_plan() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mtraining plan memory",
        usage="%(prog)s [options] [--] FLAGS",
        description="Compute the memory that a training setting needs on each GPU, and with --gpu the "
        "seconds of a step, without running it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--flags-file", type=Path, help="file with flags or a whole command (besides FLAGS)"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="GPUs (default: from the torchrun arguments, or the fewest that the flags need)",
    )
    parser.add_argument(
        "--gpu-memory-gib",
        type=float,
        help="memory of a GPU in GiB: report whether the setting fits (default: that of --gpu)",
    )
    add_gpu(parser, required=False)
    parser.add_argument(
        "--find",
        choices=FIND,
        help="with --gpu or --gpu-memory-gib: find the longest sequence, or the smallest context-parallel "
        "size, that fits",
    )
    parser.add_argument(
        "--overhead-gib",
        type=float,
        default=OVERHEAD_GIB,
        help="memory outside PyTorch: CUDA context, NCCL (default: %(default)s, assumed)",
    )
    parser.add_argument(
        "--slack",
        type=float,
        default=SLACK,
        help="fraction of memory that PyTorch's allocator reserves in addition (default: %(default)s, "
        "assumed)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args) -> int:
    if args.subject == "layouts":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from .layouts_command import run as run_layouts

        return run_layouts(args.words)
    options, words = options_of_plan().parse_known_args(args.words)
    words = [word for word in words if word != "--"]
    if options.gpu and options.gpu_memory_gib is None:
        options.gpu_memory_gib = gpu_of(options.gpu).memory_gib
    _check(options)
    if options.flags_file:
        words = _words_of(options.flags_file) + words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, of optional parts that are not installed
        from .memory import find_context_parallel_size, find_seq_length, needed, plan
        from .options import read
        from .report import as_text, report_of
        from .setting import setting_of

    flags, passed_over = read(words)

    def fits(setting) -> bool:
        memory = needed(plan(setting), options.overhead_gib, options.slack)
        return memory <= options.gpu_memory_gib * GIB

    if options.find == "seq-length":
        setting = find_seq_length(flags, fits, options.world_size)
    elif options.find:
        setting = find_context_parallel_size(flags, fits)
    else:
        setting = setting_of(flags, options.world_size)
    if setting is None:
        raise ConfigError(
            f"no {options.find} fits {options.gpu_memory_gib:g} GiB: use more pipeline or tensor "
            "parallelism, full recomputation, or the distributed optimizer"
        )
    report = report_of(setting, options, passed_over)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0 if report["fits"] in (None, True) else 1


def _check(options) -> None:
    check_gpu(options)
    if options.find and options.gpu_memory_gib is None:
        raise ConfigError("--find needs --gpu or --gpu-memory-gib")
    if options.find == "context-parallel-size" and options.world_size is not None:
        raise ConfigError(
            "--find context-parallel-size finds the world size: leave --world-size out"
        )
    for name, most in LARGEST.items():
        value = getattr(options, name)
        if value is None or 0 < value <= most or (value == 0 and name in MAY_BE_0):
            continue
        limit = "must not be negative" if name in MAY_BE_0 else "must be positive"
        if value > most:
            limit = f"must be at most {most:g}"
        raise ConfigError(f"--{name.replace('_', '-')} is {short(value)}: it {limit}")


def _words_of(path: Path) -> list[str]:
    name = f"--flags-file {path}"
    text = read_text(path, name)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    if not words:
        raise ConfigError(f"{name} has no flags: the command that wrote it may have failed")
    return words
