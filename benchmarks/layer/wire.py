# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``--mtraining-bf16-gradients`` costs in exactness: errors of the gradients of keys and values,
sent from rank to rank in float32 and in bfloat16, against dense attention under the same mask in float64.

    torchrun --nproc-per-node 4 -m benchmarks.layer.wire [--seq N] [--inner 0 1 2]
    torchrun --nproc-per-node 4 -m benchmarks.layer.wire --device cpu --seq 1024

Operands are bf16 on GPUs (float32 on CPU), 16 query heads and 2 of keys, dim 128. An error is the norm of
the difference over the norm of what is right, the larger one of keys and values. Rows go to
``results/wire.jsonl``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_mtraining.cp_group import CPGroup, shut_down
from megatron_mtraining.layout import positions_at
from megatron_mtraining.pattern import build_index
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention

from ..lib import record
from ..lib.workloads import BLOCK

HEADS, KV_HEADS, DIM, BATCH = 16, 2, 128, 1
SCALE = DIM**-0.5
DISTANCES, COLUMNS = 0.3, 200  # share of all, and number, that heads keep


def draw(seq: int, device: str):
    """Operands and a pattern, the same on every rank."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(seq, BATCH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    operands = [torch.randn(shape).to(dtype) for shape in shapes]
    distances = torch.rand(BATCH, HEADS, seq // BLOCK) < DISTANCES
    columns = torch.stack([torch.randperm(seq)[:COLUMNS] for _ in range(BATCH * HEADS)])
    return operands, distances, columns.view(BATCH, HEADS, COLUMNS)


def dense_gradients(operands, index, device: str):
    """Of keys and values, float64 ``[s, b, hk, d]``; a head at a time."""
    query, key, value, grad_out = (tensor.to(device).double() for tensor in operands)
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        mask = index.token_mask(0, head)
        scores = (query[:, 0, head] @ key[:, 0, group].T * SCALE).masked_fill_(~mask, -math.inf)
        p = scores.softmax(-1)
        dv[:, 0, group] += p.T @ grad_out[:, 0, head]
        dp = grad_out[:, 0, head] @ value[:, 0, group].T
        p *= dp - (p * dp).sum(-1, keepdim=True)
        dk[:, 0, group] += p.T @ query[:, 0, head] * SCALE
    return dk, dv


def error_over(cp: CPGroup, operands, pattern, truth, bf16_gradients: bool, device: str) -> float:
    """The larger error of a ring's gradients of keys and of values, over all ranks."""
    seq = len(operands[0])
    index = build_index(*(t.to(device) for t in pattern), seq, BLOCK, cp.world, cp.inner)
    here = positions_at(torch.arange(seq // cp.world), cp.rank, cp.world, BLOCK, cp.inner)
    parts = [tensor[here].to(device) for tensor in operands]
    leaves = [part.requires_grad_() for part in parts[:3]]
    out, *_ = ring_attention(*leaves, index, Ring(cp), SCALE, bf16_gradients=bf16_gradients)
    out.backward(parts[3])
    sums = []
    for leaf, right in zip(leaves[1:], truth):
        right = right[here.to(device)]
        sums += [(leaf.grad.double() - right).square().sum(), right.square().sum()]
    sums = torch.stack(sums)
    cp.all_reduce(sums)
    return max((sums[0] / sums[1]).sqrt().item(), (sums[2] / sums[3]).sqrt().item())


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=16384, metavar="N")
    parser.add_argument("--inner", type=int, nargs="+", default=[0, 1], metavar="I")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "wire.jsonl")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if world < 2:
        parser.error(
            "start it with torchrun --nproc-per-node N -m benchmarks.layer.wire, N 2 or more"
        )
    if options.seq < BLOCK * world or options.seq % (BLOCK * world):
        parser.error(f"--seq {options.seq}: a multiple of {BLOCK} x {world} ranks")
    for inner in options.inner:
        if inner < 0 or (inner and world % inner):
            parser.error(f"--inner {inner}: 0, or a divisor of {world} ranks")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; try --device cpu --seq 1024")
    return options


def main() -> None:
    options = parse()
    device = options.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        operands, *pattern = draw(options.seq, device)
        whole = build_index(*(t.to(device) for t in pattern), options.seq, BLOCK, 1)
        truth = dense_gradients(operands, whole, device)
        rows = []
        for inner in dict.fromkeys(options.inner):
            cp = CPGroup(dist.group.WORLD, inner or None)
            float32, bf16 = (
                error_over(cp, operands, pattern, truth, choice, device) for choice in (False, True)
            )
            rows.append(
                dict(
                    world=cp.world, inner=cp.inner, seq=options.seq,
                    dtype=str(operands[0].dtype).removeprefix("torch."),
                    density=round(whole.density().mean().item(), 4),
                    error_float32=float(f"{float32:.4g}"), error_bf16=float(f"{bf16:.4g}"),
                )
            )  # fmt: skip
        if dist.get_rank() == 0:
            for row in rows:
                print(row)
            record.append(options.output, rows)
    finally:
        shut_down()


if __name__ == "__main__":
    sys.exit(main())
