# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention kernels side by side on one GPU: ours, FlexAttention on the same blocks, cuDNN and flash
dense. Prints a table and appends rows to ``results/kernels.jsonl``.

Rates count the work of what is kept: pairs x 4 x dim forward, x 2.5 backward.

    python benchmarks/kernels.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import record
import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from workloads import BLOCK, draw_index

from megatron_mtraining.ring import Ring, ring_attention

# seq, heads, kv_heads, dim, share of far block distances kept, columns
CASES = [
    (65536, 16, 2, 128, 0.055, 0),
    (65536, 16, 2, 128, 0.25, 0),
    (65536, 14, 2, 64, 0.055, 0),
    (65536, 16, 2, 128, 1.0, 0),
    (131072, 16, 2, 128, 0.05, 0),
    (131072, 16, 2, 128, 0.01, 1000),
    (131072, 16, 2, 128, 0.01, 3500),
]


def flex_attention_for(index):
    """FlexAttention compiled for the same slash blocks."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    distances = index.distances()  # [b, h, NB]
    blocks = distances.shape[-1]
    i = torch.arange(blocks, device=distances.device)
    apart = i[:, None] - i[None, :]
    full = distances[..., apart.clamp(min=0)] & (apart > 0)
    count = full.sum(-1).int()
    order = torch.argsort(full.int(), dim=-1, descending=True, stable=True).int()
    diagonal = i.int()[:, None].expand(*full.shape[:3], 1)
    pad = torch.zeros(*full.shape[:3], blocks - 1, dtype=torch.int32, device=i.device)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(count),
        torch.cat((diagonal, pad), -1).contiguous(),
        count,
        order.contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q, k: q >= k,
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def dense_with(backend):
    def run(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def measure(run, leaves, grad_out):
    """Milliseconds of forward and of backward, medians."""
    out = run(*leaves)
    with torch.no_grad():
        forward = triton.testing.do_bench(lambda: run(*leaves), return_mode="median")
    backward = triton.testing.do_bench(
        lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
        return_mode="median",
    )
    return forward, backward


def run_case(seq, heads, kv_heads, dim, share, columns, implementations):
    device = "cuda"
    index = draw_index(seq, heads, share, columns, device)
    pairs = index.work().sum().item()
    causal = heads * seq * (seq + 1) / 2

    def draw(h):
        return torch.randn(1, h, seq, dim, device=device, dtype=torch.bfloat16)

    leaves = [draw(h).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    grad_out = draw(heads)
    ring = Ring(None)

    def ours(q, k, v):
        q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))
        return ring_attention(q, k, v, index, ring, dim**-0.5).permute(1, 2, 0, 3)

    candidates = {"mtraining": (ours, pairs)}
    if columns == 0 and seq <= 65536 and share < 1:
        candidates["flex"] = (flex_attention_for(index), pairs)
    if "cudnn" in implementations:
        candidates["cudnn"] = (dense_with(SDPBackend.CUDNN_ATTENTION), causal)
    if "flash" in implementations:
        candidates["flash"] = (dense_with(SDPBackend.FLASH_ATTENTION), causal)
    rows = []
    for name, (run, work) in candidates.items():
        for op, ms in zip(("forward", "backward"), measure(run, leaves, grad_out)):
            flops = work * 4 * dim * (1 if op == "forward" else 2.5)
            rows.append(
                dict(
                    op=op, impl=name, seq=seq, heads=heads, kv_heads=kv_heads, dim=dim,
                    density=round(work / causal, 5), vertical=columns if name == "mtraining" else 0,
                    slash=int(index.distances().sum(-1).float().mean()),
                    ms=round(ms, 4), tflops=round(flops / ms / 1e9, 1),
                )
            )  # fmt: skip
            print(
                f"{op:9s} {name:10s} {seq:8d} {heads:3d}/{kv_heads} d{dim:<4d} "
                f"density {rows[-1]['density']:<8} columns {rows[-1]['vertical']:<5} "
                f"{ms:9.3f} ms {rows[-1]['tflops']:7.1f} TFLOP/s",
                flush=True,
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first three cases only")
    parser.add_argument("--output", type=Path, default=record.RESULTS / "kernels.jsonl")
    options = parser.parse_args()
    torch.manual_seed(0)
    dense_done = set()
    for case in CASES[:3] if options.quick else CASES:
        shape = case[:4]
        dense = {"cudnn", "flash"} if shape not in dense_done else set()
        dense_done.add(shape)
        record.append(options.output, run_case(*case, dense))


if __name__ == "__main__":
    main()
