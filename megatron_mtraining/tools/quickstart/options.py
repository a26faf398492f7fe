# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The quickstart's options, checked before any process starts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ...config import ConfigError, MTrainingConfig

HEAD_DIM = 64
WINDOW, BLOCK_SIZE = 64, 64
MOST_SECONDS = 86400
AT_LEAST = dict(steps=2, processes=1, layers=1, heads=1)
SHORTEST, FEWEST_COLUMNS = 4 * BLOCK_SIZE, 4
"""Tokens that the sampled rows, and columns that the attention sink, do not come up to."""


@dataclass(frozen=True)
class Options:
    """One run of the quickstart; each step is one sequence of ``seq_length`` tokens."""

    device: str
    processes: int
    seq_length: int
    steps: int
    layers: int
    heads: int
    seed: int
    timeout: float
    """Seconds that a process waits for the others."""
    output: Path
    overwrite: bool
    sparse: MTrainingConfig

    @property
    def kv_heads(self) -> int:
        """Half as many as query heads, if that divides them."""
        return self.heads if self.heads % 2 else self.heads // 2

    @property
    def hidden(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def dense(self) -> MTrainingConfig:
        """The same backend with a policy that keeps every pair: dense causal attention."""
        return self.sparse.dense()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the quickstart's options to ``parser``."""
    add = parser.add_argument
    add("--steps", type=int, default=60, help="training steps of each run (%(default)s)")
    add("--seq-length", type=int, help="tokens per sequence (2048; 8192 on GPUs)")
    add("--processes", type=int, help="context-parallel processes (2; one per GPU, up to 8)")
    add("--device", choices=["cpu", "cuda"], help="device (cuda if there is a GPU)")
    add("--layers", type=int, default=2, help="transformer layers (%(default)s)")
    add("--heads", type=int, default=4, help=f"query heads of dimension {HEAD_DIM} (%(default)s)")
    add("--vertical", type=int, default=48, help="key columns per head (%(default)s)")
    add("--slash", type=int, default=8, help="token diagonals per head (%(default)s)")
    add("--seed", type=int, default=1234, help="seed of the weights (%(default)s)")
    what = "seconds that a process waits for the others before the run ends with an error (%(default)s)"
    add("--timeout", type=float, default=300, help=what)
    add("--output", default="quickstart-out", help="output folder (%(default)s)")
    add("--overwrite", action="store_true", help="replace the results in the output folder")


def _rounded_up(seq_length: int, multiple: int) -> int:
    """To a length that all processes can share."""
    return -(-seq_length // multiple) * multiple


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value that cannot work; names the option, its value and what to do.
    """
    import torch  # here: --help needs none of it

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = values.device or ("cuda" if gpus else "cpu")
    on_gpu = device == "cuda"
    if on_gpu and not gpus:
        raise ConfigError("--device is cuda, but torch finds no GPU here: use --device cpu")
    if values.processes is None:
        values.processes = min(gpus, 8) if on_gpu else 2
    if on_gpu and values.processes > gpus:
        raise ConfigError(
            f"--processes is {values.processes}, but there are {gpus} GPUs: use at most {gpus}"
        )
    for name, least in AT_LEAST.items():
        if getattr(values, name) < least:
            raise ConfigError(f"--{name} is {getattr(values, name)}: use {least} or more")
    if 0 < values.vertical < FEWEST_COLUMNS:
        raise ConfigError(f"--vertical is {values.vertical}: use {FEWEST_COLUMNS} or more")
    if not 1 <= values.timeout <= MOST_SECONDS:  # nor "nan"
        raise ConfigError(f"--timeout is {values.timeout}: use 1 to {MOST_SECONDS} seconds")
    if not values.output.strip():
        raise ConfigError(f"--output is {values.output!r}: name a folder")
    seq_length, multiple = values.seq_length, BLOCK_SIZE * values.processes
    if seq_length is None:
        seq_length = _rounded_up(8192 if on_gpu else 2048, multiple)
    elif seq_length < SHORTEST or seq_length % multiple:
        raise ConfigError(
            f"--seq-length is {seq_length}: with --processes {values.processes} use a multiple of "
            f"{multiple}, {_rounded_up(max(seq_length, SHORTEST), multiple)} for example"
        )
    try:
        sparse = MTrainingConfig.from_options(
            vertical=values.vertical, slash=values.slash, window=WINDOW, block_size=BLOCK_SIZE
        )
        sparse.check_sequence(seq_length, values.processes)
    except ConfigError as error:
        # The backend's options have a prefix that this command's do not have.
        raise ConfigError(str(error).replace("--mtraining-", "--")) from None
    same = {name: getattr(values, name) for name in (*AT_LEAST, "seed", "timeout", "overwrite")}
    output = Path(values.output)
    return Options(device=device, seq_length=seq_length, sparse=sparse, output=output, **same)
