# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What each training process does: check dense against Megatron, then train dense and sparse."""

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

from ...models.environment import megatron_on_cpu
from ...ring import shut_down
from .options import Options, threads_a_process

RUNS = ("dense", "sparse")


class Mismatch(RuntimeError):
    """Dense attention over the ring does not give the loss that Megatron's own attention gives."""


@dataclass
class Run:
    """What one training run leaves: losses a step, and what its attention kept."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    density: list[float] = field(default_factory=list)
    held_out: float = math.nan
    work: list[list[float]] = field(default_factory=list)
    """Kept query-key pairs, ``[rank][round]``, of the last step, over heads and layers."""


def worker(rank: int, options: Options, folder: str) -> None:
    """Process ``rank`` of ``options.processes``; rank 0 leaves its results in ``folder``.

    Reads ``train.npy`` and ``held_out.npy`` there; writes ``runs.json`` and ``patterns.npz``.
    """
    # Megatron tells each process that Transformer Engine and apex are absent: not used here.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    torch.set_num_threads(threads_a_process(options))
    on_gpu = options.device == "cuda"
    if on_gpu:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron wants it with CP
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=(Path(folder).absolute() / "rendezvous").as_uri(),
        rank=rank,
        world_size=options.processes,
        timeout=timedelta(minutes=5),
    )
    try:
        with megatron_on_cpu(not on_gpu):
            _work(rank, options, Path(folder))
    finally:
        shut_down()


def _work(rank: int, options: Options, folder: Path) -> None:
    from ... import register

    register()
    from .model import batch_of, build, context_parallel, loss_of, megatron_loss

    train = torch.from_numpy(np.load(folder / "train.npy")).to(options.device)
    held_out = torch.from_numpy(np.load(folder / "held_out.npy")).to(options.device)
    size = options.processes
    block_size = options.sparse.block_size

    def total(share: Tensor) -> float:
        share = share.detach().clone()
        dist.all_reduce(share)
        return share.item()

    @torch.no_grad()
    def judge(model, sequences: Tensor) -> list[float]:
        batches = [batch_of(one[None], rank, size, block_size) for one in sequences]
        return [total(loss_of(model, batch)) for batch in batches]

    with context_parallel(1, options.seed):
        expected = megatron_loss(options, None, train[:1]) if rank == 0 else [math.nan]

    runs, weights = {}, None
    with context_parallel(size, options.seed):
        for name in RUNS:
            model = build(options, size, options.dense if name == "dense" else options.sparse)
            if name == "dense":
                _compare(rank, options, "untrained", expected, judge(model, train[:1]))
            runs[name] = run = Run()
            optimizer = _Optimizer(model, options)
            with _Progress(rank, name, options.steps) as progress:
                for step in range(options.steps):
                    started = time.perf_counter()
                    sequences = train[step * options.batch : (step + 1) * options.batch]
                    with _recorded() as indices:
                        loss = loss_of(model, batch_of(sequences, rank, size, block_size))
                    loss.backward()
                    optimizer.step(step)
                    run.losses.append(total(loss))  # waits for the GPU, so the time is right
                    run.seconds.append(time.perf_counter() - started)
                    run.density.append(_mean([index.density() for index in indices]))
                    if not math.isfinite(run.losses[-1]):
                        raise FloatingPointError(f"{name} loss is {run.losses[-1]} at step {step}")
                    progress.show(run)
            run.work = sum(index.work().flatten(0, -3).sum(0).cpu() for index in indices).tolist()
            with _recorded() as indices:
                losses = judge(model, held_out)
            run.held_out = sum(losses) / len(losses)
            if name == "dense":
                dense_losses, weights = losses, model.state_dict()
            elif rank == 0:
                patterns = _patterns(indices[-options.layers :], options)
                np.savez_compressed(folder / "patterns.npz", **patterns)

    with context_parallel(1, options.seed):
        if rank == 0:
            expected = megatron_loss(options, weights, held_out)
            _compare(rank, options, "trained", expected, dense_losses)
    if rank == 0:
        results = {name: vars(run) for name, run in runs.items()}
        (folder / "runs.json").write_text(json.dumps(results))
    dist.barrier()


class _Optimizer:
    """AdamW on float32 weights, gradients summed over the context-parallel ranks.

    Each rank sees its own tokens only, so its gradient is a part of the whole one. The rate rises
    over the first tenth of the steps and falls to a tenth along a cosine.
    """

    def __init__(self, model, options: Options):
        self.options = options
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        matrices = [p for p in self.masters if p.dim() > 1]
        vectors = [p for p in self.masters if p.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(0.9, 0.95),
        )

    def step(self, step: int) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        flat = torch.cat([master.grad.view(-1) for master in self.masters])
        dist.all_reduce(flat)  # the context-parallel group is the whole world here
        sizes = [master.numel() for master in self.masters]
        for master, gradient in zip(self.masters, flat.split(sizes), strict=True):
            master.grad.copy_(gradient.view_as(master))
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = self.options.lr * self._share(step)
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def _share(self, step: int) -> float:
        warmup = max(1, self.options.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, self.options.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class _Progress:
    """A bar on rank 0's standard error; nothing on the other ranks."""

    def __init__(self, rank: int, name: str, steps: int):
        from tqdm import tqdm

        self.bar = tqdm(
            total=steps, desc=f"{name:6}", unit="step", disable=rank != 0, file=sys.stderr
        )

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.bar.close()

    def show(self, run: Run) -> None:
        self.bar.set_postfix(loss=f"{run.losses[-1]:.3f}", density=f"{run.density[-1]:.0%}")
        self.bar.update()


def _compare(rank: int, options: Options, which: str, expected: list, found: list) -> None:
    """Raise :class:`Mismatch` on rank 0 unless the two lists of losses agree."""
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
def _recorded():
    """A list that gets the pattern of every attention call, in order, while the context lasts.

    The plug-in's layers keep no pattern once a step is over, so the calls are listened to here.
    """
    from ...megatron import core_attention

    original = core_attention.attend
    indices: list = []

    def listen(*args, **kwargs):
        attended = original(*args, **kwargs)
        indices.append(attended.index)
        return attended

    with mock.patch.object(core_attention, "attend", listen):
        yield indices


def _mean(tensors: list[Tensor]) -> float:
    return torch.stack([tensor.float().mean() for tensor in tensors]).mean().item()


def _patterns(indices: list, options: Options) -> dict[str, np.ndarray]:
    """Shares of kept pairs in small squares of every head's pattern: ``layerL_headH``.

    Args:
        indices: of one forward pass, first layer first.
    """
    cell = max(1, options.seq_length // 256)
    patterns = {}
    for layer, index in enumerate(indices):
        for head in range(options.heads):
            mask = index.token_mask(0, head).cpu().float()
            shares = torch.nn.functional.avg_pool2d(mask[None, None], cell)[0, 0]
            patterns[f"layer{layer}_head{head}"] = shares.numpy()
    return patterns
