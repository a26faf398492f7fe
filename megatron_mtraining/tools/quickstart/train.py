# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each training process does: train dense and sparse, and check dense against Megatron."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from ... import register
from ...cp_group import shut_down
from ...models.environment import megatron_on_cpu
from .options import Options

LEARNING_RATE = 1e-3
CELLS = 256
"""Cells along a side of a pattern's picture, at most."""


class Mismatch(RuntimeError):
    """Dense attention over the ring does not give the loss of Megatron's own attention."""


@dataclass
class Run:
    """Results of one training run: a value for each step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    density: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    """Attention mass of the selected pairs, on held-out rows, mean over layers and heads."""
    held_out: float = math.nan
    """Mean loss of the held-out sequences, after training."""
    work: list[list[float]] = field(default_factory=list)
    """Query-key pairs in the last step, ``[rank][round]``, summed over heads and layers."""


def worker(rank: int, options: Options, folder: str) -> None:
    """Process ``rank`` of ``options.processes``.

    Reads ``train.npy`` and ``held_out.npy`` in ``folder``; rank 0 writes ``runs.json`` and
    ``patterns.npy`` there.
    """
    # Megatron warns that Transformer Engine and apex are absent: they are not used here.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    on_gpu = options.device == "cuda"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // options.processes))
    if on_gpu:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it with CP
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=(Path(folder).absolute() / "rendezvous").as_uri(),
        rank=rank,
        world_size=options.processes,
        timeout=timedelta(seconds=options.timeout),
    )
    try:
        with megatron_on_cpu(not on_gpu):
            compare_runs(rank, options, Path(folder))
    finally:
        shut_down()


def compare_runs(rank: int, options: Options, folder: Path) -> None:
    """Train dense and sparse; before and after dense training, compare it with Megatron's attention."""
    register()
    from .model import build, context_parallel, megatron_losses, total_loss

    files = (folder / name for name in ("train.npy", "held_out.npy"))
    sequences, held_out = (torch.from_numpy(np.load(file)).to(options.device) for file in files)
    runs, weights = {}, None
    with context_parallel(1, options):
        expected = megatron_losses(options, None, sequences[:1]) if rank == 0 else []
    with context_parallel(options.processes, options):
        for name in ("dense", "sparse"):
            model = build(options, options.processes, getattr(options, name))
            if name == "dense":
                check_agreement(
                    rank, options, "untrained", expected, [total_loss(model, sequences[0])]
                )
            runs[name] = run = train(rank, model, sequences, name)
            with recorded_patterns() as indices:
                losses = [total_loss(model, sequence) for sequence in held_out]
            run.held_out = sum(losses) / len(losses)
            if name == "dense":
                dense_losses, weights = losses, model.state_dict()
            elif rank == 0:
                np.save(folder / "patterns.npy", pictures_of(indices[-options.layers :]))
    with context_parallel(1, options):
        if rank == 0:
            expected = megatron_losses(options, weights, held_out)
            check_agreement(rank, options, "trained", expected, dense_losses)
    if rank == 0:
        results = {name: vars(run) for name, run in runs.items()}
        (folder / "runs.json").write_text(json.dumps(results))
    dist.barrier()


def train(rank: int, model, sequences: Tensor, name: str) -> Run:
    """Train ``model`` for one step on each sequence."""
    from .model import loss_of, sum_over_ranks

    run, optimizer = Run(), Optimizer(model, len(sequences))
    progress = tqdm(sequences, f"{name:6}", unit="step", disable=rank != 0, file=sys.stderr)
    for sequence in progress:
        started = time.perf_counter()
        with recorded_patterns() as indices:
            loss = loss_of(model, sequence)
        loss.backward()
        optimizer.step()
        run.losses.append(sum_over_ranks(loss))  # waits for the GPU, so the time is right
        run.seconds.append(time.perf_counter() - started)
        density = [index.density().float().mean() for index in indices]
        run.density.append(torch.stack(density).mean().item())
        recall = [1.0 if each.recall is None else each.recall.mean().item() for each in indices]
        run.recall.append(sum(recall) / len(recall))
        if not math.isfinite(run.losses[-1]):
            raise FloatingPointError(f"{name} loss is {run.losses[-1]} at step {progress.n}")
        progress.set_postfix(loss=f"{run.losses[-1]:.3f}", density=f"{run.density[-1]:.0%}")
    run.work = sum(index.work().flatten(0, -3).sum(0).cpu() for index in indices).tolist()
    return run


class Optimizer:
    """AdamW on float32 copies of the weights, with gradients summed over the context-parallel ranks."""

    def __init__(self, model, steps: int):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        matrices = [p for p in self.masters if p.dim() > 1]
        vectors = [p for p in self.masters if p.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
        )
        warmup = max(1, steps // 10)

        def factor(step: int) -> float:
            """Linear warmup, then a cosine to a tenth of the peak."""
            if step < warmup:
                return (step + 1) / warmup
            done = (step - warmup) / max(1, steps - warmup)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        self.schedule = LambdaLR(self.adamw, factor)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
            dist.all_reduce(master.grad)  # all processes are context-parallel ranks
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.schedule.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def check_agreement(
    rank: int, options: Options, which: str, expected: list[float], found: list[float]
) -> None:
    """Raise :class:`Mismatch` on rank 0 unless two lists of losses agree."""
    if rank:
        return
    tolerance = 1e-4 if options.device == "cpu" else 3e-2  # float32, and bfloat16 on GPUs
    worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if not worst <= tolerance:
        raise Mismatch(
            f"dense attention over {options.processes} ranks gives the {which} model a loss of "
            f"{found[0]:.6f}, Megatron's own attention in one process {expected[0]:.6f}: they "
            f"differ by {worst:.1e}, more than {tolerance:.0e}"
        )
    print(
        f"{which} model, dense: loss over {options.processes} ranks and by Megatron's own "
        f"attention in one process agree to {worst:.1e}",
        flush=True,
    )


@contextmanager
def recorded_patterns():
    """A list that receives the index of every attention call while the context lasts.

    The plug-in's layers do not keep it, so their calls of ``attend`` are recorded.
    """
    from ...megatron import core_attention

    attend, indices = core_attention.attend, []

    def recording(*args, **kwargs):
        attended = attend(*args, **kwargs)
        indices.append(attended.index)
        return attended

    with mock.patch.object(core_attention, "attend", recording):
        yield indices


def pictures_of(indices: list) -> np.ndarray:
    """The density of each cell of every head's pattern, ``[layers, h, cells, cells]``."""
    layers = []
    for index in indices:
        heads = range(index.columns.shape[1])
        masks = torch.stack([index.token_mask(0, head).cpu().float() for head in heads])
        layers.append(torch.nn.functional.avg_pool2d(masks, max(1, masks.shape[-1] // CELLS)))
    return torch.stack(layers).numpy()
