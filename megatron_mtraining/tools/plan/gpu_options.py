# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Options of the GPUs and links that a step runs on, and of how many pairs it selects."""

from __future__ import annotations

import argparse

from ...config import ConfigError
from .rates import GPUS

DENSITY = 0.15
"""About what a target recall of 0.95 selects on code at 32K to 512K tokens (``sequences.jsonl``)."""
LINK = 50.0


def add_gpu(parser: argparse.ArgumentParser, required: bool) -> None:
    add = parser.add_argument
    add("--gpu", required=required, help=", ".join(GPUS))
    add("--nodes", type=int, help="hosts (default: torchrun's, or of up to 8 GPUs)")
    add("--link", type=float, metavar="GB/S",
        help=f"one way of each GPU to other hosts ({LINK:g}: 400 Gbit/s)")  # fmt: skip
    add("--density", type=float,
        help=f"share of the pairs, whatever selects them ({DENSITY:g}; 1 where all are kept)")  # fmt: skip


def check_gpu(options: argparse.Namespace) -> None:
    """Fill in the defaults.

    Raises:
        ConfigError: a number that cannot be, or that is for nothing.
    """
    for name in ("nodes", "link", "density"):
        if options.gpu is None and getattr(options, name) is not None:
            raise ConfigError(f"--{name} is of a step's time: give --gpu, too")
    options.link = LINK if options.link is None else options.link
    options.density = DENSITY if options.density is None else options.density
    if options.nodes is not None and options.nodes < 1:
        raise ConfigError(f"--nodes is {options.nodes}: use 1 or more")
    if not 0 < options.density <= 1:
        raise ConfigError(f"--density is {options.density:g}: use a share above 0, up to 1")
    if not 0 < options.link < 1e6:
        raise ConfigError(f"--link is {options.link:g}: use GB/s above 0")


def gpus_of_a_host(gpus: int, nodes: int | None) -> int:
    """
    Raises:
        ConfigError: hosts would have different numbers of GPUs.
    """
    nodes = nodes or -(-gpus // 8)
    if gpus % nodes:
        raise ConfigError(f"{nodes} nodes do not share {gpus} GPUs evenly: give another --nodes")
    return gpus // nodes
