# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The self-test: attention and its gradients against dense attention in float64, on one rank and on two.

A rank is a process of its own (``python -m megatron_mtraining.tools.doctor.selftest``): Triton's interpreter
is chosen as kernels are imported, and what hangs is ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from ...requirements import last_line
from .machine import FAILS, OK, Line, gpu_count

TOLERANCES = {"cpu": 1e-5, "cuda": 1e-2}
"""Relative errors, of float32 and bfloat16."""
SECONDS = {"cpu": 60, "cuda": 240}
"""After which a test is ended. On a GPU the first one compiles the kernels."""


def examine(root: Path | None) -> Iterator[Line]:
    """A line for the kernels, and one for a ring of two."""
    gpus = gpu_count()
    kernels = "compiled" if gpus else "portable ones, in Triton's interpreter"
    yield _tested("kernels", 1, "cuda" if gpus else "cpu", kernels)
    ring = "NCCL" if gpus > 1 else "gloo, the PyTorch reference on CPU"
    yield _tested("a ring of two", 2, "cuda" if gpus > 1 else "cpu", ring)


def _tested(what: str, world: int, device: str, how: str) -> Line:
    what, started = f"self-test of {what} ({how})", time.monotonic()
    try:
        errors = run_ranks(world, device)
    except RuntimeError as error:
        return Line(FAILS, what, str(error))
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCES[device]}
    if wrong:
        shown = ", ".join(f"{name} by {error:.1e}" for name, error in wrong.items())
        said = f"differs from dense attention in float64: {shown}; do not train here, and report it"
        return Line(FAILS, what, said)
    worst, took = max(errors.values()), time.monotonic() - started
    said = f"output and gradients are those of dense attention, to {worst:.0e} ({took:.0f} s)"
    return Line(OK, what, said)


def run_ranks(world: int, device: str) -> dict[str, float]:
    """The relative errors that ``world`` processes find, by name.

    Raises:
        RuntimeError: one fails, or does not end in time; all are ended then.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # A ring has the reference, which is faster than the interpreter.
        environment["TRITON_INTERPRET"] = "1" if world == 1 else "0"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtraining-")))
        ranks: list[subprocess.Popen] = []
        seed = time.time_ns() % 2**32  # other inputs each time, the same on all ranks
        for rank in range(world):
            words = map(str, (rank, world, seed, device, folder))
            command = [sys.executable, "-m", __name__, *words]
            log = stack.enter_context(open(folder / f"log{rank}", "w"))
            process = subprocess.Popen(  # noqa: S603 - a list of words, no shell
                command, env=environment, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        end = time.monotonic() + SECONDS[device]
        while any(rank.poll() is None for rank in ranks) and not any(r.returncode for r in ranks):
            if time.monotonic() > end:
                raise RuntimeError(f"no answer in {SECONDS[device]} s")
            time.sleep(0.1)
        for number, rank in enumerate(ranks):
            if rank.returncode:
                said = last_line((folder / f"log{number}").read_text(errors="replace"))
                raise RuntimeError(f"rank {number} ends with status {rank.returncode}: {said}")
        return json.loads((folder / "errors").read_text())


def relative_errors(rank: int, world: int, device: str, seed: int) -> dict[str, float]:
    """Of a dense and of a sparse pattern, over the default process group if there is more than one rank."""
    import torch
    import torch.distributed as dist

    from ...attention import attend
    from ...config import MTrainingConfig
    from ...cp_group import RankGroup
    from ...layout import stripe, unstripe

    dtype, dim, block = (torch.bfloat16, 128, 128) if device == "cuda" else (torch.float32, 64, 64)
    group = dist.group.WORLD if world > 1 else None
    random = torch.Generator().manual_seed(seed)
    query, grad = torch.randn(2, 6 * block, 1, 2, dim, generator=random).to(dtype)
    key, value = torch.randn(2, 6 * block, 1, 1, dim, generator=random).to(dtype)
    sizes = dict(block_size=block, window=block, sample_strata=8)
    few = MTrainingConfig.from_options(policy="fixed", vertical=32, slash=1, **sizes)
    every = MTrainingConfig.from_options(price=0.0, **sizes)
    errors = {}
    # Dense keys come in rounds, one for each rank, and those of the sparse pattern in one.
    for name, config, inner in (("dense", every, 1), ("sparse", few, world)):

        def own(whole, inner=inner):
            return stripe(whole, rank, world, block, inner=inner).to(device, copy=True)

        leaves = [own(each).requires_grad_() for each in (query, key, value)]
        found = attend(*leaves, config=config, cp_group=group, cp_inner=inner)
        found.out.backward(own(grad))
        mask = torch.stack([found.index.token_mask(0, head).cpu() for head in range(2)])
        if bool((mask == torch.ones_like(mask).tril()).all()) != (name == "dense"):
            raise AssertionError(f"the {name} pattern is not {name}")
        truth = _dense(query, key, value, grad, mask)
        parts = (found.out.detach(), *(leaf.grad for leaf in leaves))
        for result, part, expected in zip(("output", "dQ", "dK", "dV"), parts, truth, strict=True):
            gathered = list(RankGroup(group).all_gather(part).cpu())
            difference = unstripe(gathered, block, inner=inner).double() - expected
            errors[f"{name} {result}"] = (difference.norm() / expected.norm()).item()
    return errors


def _dense(query, key, value, grad, mask):
    """Output and gradients in float64, of one batch entry with one key head, under a mask ``[h, N, N]``."""
    import torch

    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    q, k, v = (leaf[:, 0].transpose(0, 1) for leaf in leaves)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1)[:, None]
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def main(rank: int, world: int, seed: int, device: str, folder: Path) -> None:
    """One rank; the first writes the errors."""
    import torch
    import torch.distributed as dist

    from ...cp_group import shut_down

    if device == "cuda":
        torch.cuda.set_device(rank)
    if world > 1:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=SECONDS[device]),
        )
    errors = relative_errors(rank, world, device, seed)
    if rank == 0:
        (folder / "errors").write_text(json.dumps(errors))
    if world > 1:
        shut_down()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], Path(sys.argv[5]))
