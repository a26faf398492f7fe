# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The quickstart's options, checked before any process starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ...config import ConfigError, MTrainingConfig

HEAD_DIM = 64


@dataclass(frozen=True)
class Options:
    """One run of the quickstart; sizes in tokens, ``batch`` in sequences a step."""

    device: str
    processes: int
    seq_length: int
    batch: int
    steps: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    held_out: int
    lr: float
    seed: int
    output: Path
    sparse: MTrainingConfig

    @property
    def hidden(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def ffn(self) -> int:
        """SwiGLU's inner width, about 8/3 of the hidden size as Qwen2.5 has it or more."""
        return -(-self.hidden * 8 // 3 // 64) * 64

    @property
    def dense(self) -> MTrainingConfig:
        """The same backend with a budget that keeps every pair: dense causal attention."""
        return replace(self.sparse, slash=self.seq_length)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the quickstart's options to ``parser``."""
    add = parser.add_argument
    add("--steps", type=int, default=60, help="training steps of each run (%(default)s)")
    add("--seq-length", type=int, help="tokens in a sequence (2048; on GPUs 8192)")
    add("--batch", type=int, default=1, help="sequences in a step (%(default)s)")
    add("--processes", type=int, help="context-parallel processes (2; every GPU where there are)")
    add("--device", choices=["cpu", "cuda"], help="cuda where there is a GPU, else cpu")
    add("--output", type=Path, default=Path("quickstart-out"), help="folder for what it writes")
    add("--seed", type=int, default=1234, help="of the weights (%(default)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate of AdamW (%(default)s)")
    add("--layers", type=int, default=2, help="transformer layers (%(default)s)")
    add("--heads", type=int, default=4, help="query heads, of dimension 64 (%(default)s)")
    add("--kv-heads", type=int, default=2, help="key/value heads (%(default)s)")
    add("--vocab-size", type=int, default=2048, help="of the tokenizer (%(default)s)")
    add("--held-out", type=int, default=4, help="held-out sequences to judge by (%(default)s)")
    add("--vertical", type=int, default=48, help="key columns a head keeps (%(default)s)")
    add("--slash", type=int, default=8, help="token diagonals a head keeps (%(default)s)")
    add("--window", type=int, default=64, help="local window, always kept (%(default)s)")
    add("--block-size", type=int, default=64, help="64 or 128 (%(default)s)")


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value that cannot work; names the option, its value and what to do.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = values.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ConfigError("--device is cuda, but torch finds no GPU here: use --device cpu")
    processes = values.processes
    if processes is None:
        processes = min(gpus, 8) if device == "cuda" else 2
    if device == "cuda" and processes > gpus:
        raise ConfigError(
            f"--processes is {processes}, but there are {gpus} GPUs: use at most {gpus}"
        )
    lowest = dict(steps=2, batch=1, layers=1, heads=1, kv_heads=1, vocab_size=512, held_out=1)
    for name, low in lowest.items():
        if getattr(values, name) < low:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(values, name)}: use {low} or more"
            )
    if processes < 1:
        raise ConfigError(f"--processes is {processes}: use 1 or more")
    seq_length = values.seq_length
    if seq_length is None:
        # Rounded up to what any number of processes can share: 3 or 6 GPUs too.
        multiple = max(1, values.block_size) * processes
        seq_length = -(-(8192 if device == "cuda" else 2048) // multiple) * multiple
    if values.heads % values.kv_heads:
        raise ConfigError(
            f"--heads is {values.heads}, not a multiple of --kv-heads ({values.kv_heads})"
        )
    if not 0 < values.lr < 1:
        raise ConfigError(
            f"--lr is {values.lr}: use a learning rate between 0 and 1, such as 0.001"
        )
    try:
        values.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # now, not after all the training
        raise ConfigError(
            f"--output is {values.output}, which cannot be made a folder "
            f"({error.strerror or error}): name another"
        ) from None
    try:
        sparse = MTrainingConfig(
            vertical=values.vertical,
            slash=values.slash,
            window=values.window,
            block_size=values.block_size,
        )
        sparse.check_sequence(seq_length, processes)
    except ConfigError as error:
        # The plug-in's options carry a prefix that those of this program do not.
        text = str(error).replace("--mtraining-", "--")
        text = text.replace("--context-parallel-size", "--processes")
        raise ConfigError(text) from None
    return Options(
        device=device,
        processes=processes,
        seq_length=seq_length,
        batch=values.batch,
        steps=values.steps,
        layers=values.layers,
        heads=values.heads,
        kv_heads=values.kv_heads,
        vocab_size=values.vocab_size,
        held_out=values.held_out,
        lr=values.lr,
        seed=values.seed,
        output=values.output,
        sparse=sparse,
    )


def threads_a_process(options: Options) -> int:
    """CPU threads for each process, so that together they use the cores of the machine once."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, cores // options.processes)
