# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining doctor``: what is there, what will work, and what will not and why; then a self-test."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..patching import read_release
from . import machine, megatron, selftest
from .machine import FAILS

# The interface of a subcommand, see tools.cli
__all__ = ["add_arguments", "run"]


def add_arguments(parser) -> None:
    """The arguments of ``mtraining doctor``."""
    parser.add_argument(
        "--megatron", type=Path, metavar="DIR", help="a Megatron-LM checkout to look at, too"
    )
    parser.epilog = (
        "exit status: 0, all that is needed works; 1, something that is needed will not work; "
        "2, DIR is no Megatron-LM checkout"
    )


def run(args) -> int:
    """Print a line for each part, and for each self-test. Returns the exit status.

    Raises:
        ConfigError: ``--megatron`` names no Megatron-LM checkout.
    """
    if args.megatron is not None:
        read_release(args.megatron)
    failed = []
    for examine in (machine.examine, megatron.examine, selftest.examine):
        for line in examine(args.megatron):
            print(line, flush=True)
            if line.state == FAILS and line.needed:
                failed.append(line.what)
    if failed:
        print(f"\nWill not work until this is mended: {', '.join(failed)}")
        return 1
    script = "pretrain_gpt.py" if args.megatron is None else args.megatron / "pretrain_gpt.py"
    script = shlex.quote(str(script))
    on_cpu = "" if machine.gpu_count() else "--cpu "
    print(
        "\nAll that is needed works. Train with: torchrun ... -m megatron_mtraining.launch "
        f"{on_cpu}{script} ... --attention-backend mtraining"
    )
    return 0
