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
    add("--nodes", type=int, help="hosts (default: of up to 8 GPUs)")
    add("--link", type=float, default=LINK, metavar="GB/S",
        help="one way of each GPU to other hosts (%(default)g: 400 Gbit/s)")  # fmt: skip
    add("--density", type=float, default=DENSITY, help="share of the pairs (%(default)g)")


def check_gpu(options: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: a number that cannot be.
    """
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
