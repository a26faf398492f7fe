# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Patterns and operands that the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_mtraining.pattern import build_index

BLOCK = 128
BAND = 4  # block distances that every pattern keeps


def share_for(density: float, seq: int) -> float:
    """The share of far distances with which slashes alone keep about ``density`` of the pairs."""
    band = min(1.0, 2 * BAND * BLOCK / seq)
    return max(0.0, (density - band) / max(1 - band, 1e-9))


def draw_pattern(seq: int, heads: int, share: float, columns: int) -> tuple[Tensor, Tensor]:
    """A local band, far distances at random, columns at random (denser at the start).

    Returns:
        distances, bool ``[1, heads, blocks]``, and column positions ``[1, heads, columns]``, on the CPU.
    """
    distances = torch.rand(1, heads, -(-seq // BLOCK)) < share
    distances[..., :BAND] = True
    weights = 1 / (1 + torch.arange(seq, dtype=torch.float32) / 1000)
    picks = [torch.multinomial(weights, columns) for _ in range(heads)] if columns else []
    picked = torch.stack(picks)[None] if columns else torch.zeros(1, heads, 0, dtype=torch.int64)
    return distances, picked


def draw_unequal(seq: int, heads: int, density: float, columns: int) -> tuple[Tensor, Tensor]:
    """:func:`draw_pattern` with heads that differ: their shares of far distances go evenly, in ratio, from
    a quarter of the mean's to several times it, and the mean density is about ``density``, the columns'
    own pairs counted in.
    """
    # A column at a random place is seen by half of the queries; those drawn are denser at the start.
    own = 0.85 * 2 * columns / seq
    mean = share_for(max(0.0, density - own), seq)
    spread = torch.logspace(-1, 1, heads, base=4.0)
    shares = mean * spread / spread.mean()
    if shares.max() > 1:  # what the densest heads cannot take goes to the others
        for _ in range(100):
            shares = (shares * (mean / shares.mean())).clamp(max=1)
    distances = torch.rand(1, heads, -(-seq // BLOCK)) < shares[None, :, None]
    distances[..., :BAND] = True
    return distances, draw_pattern(seq, heads, 0.0, columns)[1]


def draw_local(seq: int, heads: int, diagonals: int, columns: int) -> tuple[Tensor, Tensor]:
    """:func:`draw_pattern` with ``diagonals`` token diagonals right beyond a window of a block: what the
    best diagonals of a usual head are, its local ones. They cross few block distances."""
    distances, picked = draw_pattern(seq, heads, 0.0, columns)
    reach = 2 * BLOCK + diagonals - 1  # the last diagonal; the window takes distances 0 and 1
    distances[..., : -(-reach // BLOCK) + 1] = True
    return distances, picked


def draw_index(seq, heads, share, columns, device):
    """The index of a drawn pattern, on one rank."""
    distances, picked = draw_pattern(seq, heads, share, columns)
    return build_index(distances.to(device), picked.to(device), seq, BLOCK, 1)


def draw_operands(seq, heads, kv_heads, dim, dtype, device) -> tuple[Tensor, ...]:
    """query, key, value and a gradient of out, ``[s, 1, h, d]``, as Megatron gives them: the value is a
    view into the projection's result, query and key are new tensors (they had their rotary embedding).
    """
    group = heads // kv_heads
    mixed = torch.randn(seq, 1, kv_heads, (group + 2) * dim, device=device, dtype=dtype)
    query = mixed[..., : group * dim].reshape(seq, 1, heads, dim).contiguous()
    key = mixed[..., group * dim : (group + 1) * dim].contiguous()
    value = mixed[..., (group + 1) * dim :]
    return query, key, value, torch.randn_like(query)


def draw_structured(
    seq: int, positions: Tensor, heads: int, kv_heads: int, dim: int, columns: int, dtype
) -> tuple[Tensor, ...]:
    """query, key, value and a gradient of out for the tokens at ``positions``, whose attention looks like a
    usual head's, so that the pattern chosen from them does too.

    A score is the sum of three parts. One falls with the distance, as rotary embeddings make it: a sum of
    cosines from the length of two blocks to that of the sequence. So the best diagonals are those
    right beyond the window, next to each other, and cross few block distances. One is high at twice
    ``columns`` keys of each KV head, denser at the start of the sequence, by different amounts for different
    heads: each finds its columns among them. The rest is noise. With random operands in place of these, the
    best diagonals would lie scattered over the sequence, and 100 of them keep a large share of it.

    Every rank finds the same strong columns if torch's generator of the CPU has the same state on all; its
    noise is its device's generator's.
    """
    device = positions.device
    half, strong = dim // 4, 8
    noise = dim - 2 * half - strong
    # What all ranks draw alike comes before the noise.
    tastes = torch.rand(heads, strong) ** 4 + 0.01
    tastes = tastes / tastes.sum(-1, keepdim=True) * dim**0.5
    strength = torch.zeros(kv_heads, seq, strong)
    weights = 1 / (1 + torch.arange(seq, dtype=torch.float32) / 1000)
    count = min(seq, 2 * columns)
    for head in range(kv_heads if count else 0):
        strength[head, torch.multinomial(weights, count)] = 4 + torch.randn(count, strong).abs()

    slowest = max(2 * seq, 4 * BLOCK)
    rates = torch.logspace(0, 1, half, base=2 * BLOCK / slowest, dtype=torch.float64) / (2 * BLOCK)
    angles = positions.double()[:, None] * rates.to(device)
    size = (16 * dim**0.5 / half) ** 0.5  # a score of 16 at distance 0
    wave = size * torch.cat((angles.cos(), angles.sin()), -1)[:, None, None]

    def start_with(count):
        tensor = torch.empty(len(positions), 1, count, dim, device=device, dtype=dtype)
        tensor[..., : 2 * half] = wave
        for part in tensor.split(16384):  # the noise's float32 numbers, a stretch at a time
            part[..., -noise:] = 0.84 * torch.randn(*part.shape[:-1], noise, device=device)
        return tensor

    query, key = start_with(heads), start_with(kv_heads)
    query[..., 2 * half : -noise] = tastes.to(device)
    key[:, 0, :, 2 * half : -noise] = strength[:, positions.cpu()].transpose(0, 1).to(device)
    # A view into a wider tensor, as Megatron's value is.
    value = torch.randn(len(positions), 1, kv_heads, 2 * dim, device=device, dtype=dtype)[..., dim:]
    return query, key, value, torch.randn_like(query)


def heads_first(tensor: Tensor) -> Tensor:
    """``[s, b, h, d]`` as the contiguous ``[b, h, s, d]`` that dense attention takes."""
    return tensor.detach().permute(1, 2, 0, 3).contiguous()


def dense_with(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PyTorch's dense causal attention by one backend, of query, key and value ``[b, h, s, d]``."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return run


def dense_on(device: torch.device | str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """:func:`dense_with` cuDNN on a GPU, and PyTorch's reference on the CPU."""
    is_cuda = torch.device(device).type == "cuda"
    return dense_with(SDPBackend.CUDNN_ATTENTION if is_cuda else SDPBackend.MATH)


def tokens_first(tensor: Tensor) -> Tensor:
    """``[s, b, h, d]`` as the contiguous ``[b, s, h, d]`` that FlashAttention takes."""
    return tensor.detach().transpose(0, 1).contiguous()


def fa4(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlashAttention-4's dense causal attention (package ``flash-attn-4``), ``[b, s, h, d]``."""
    return import_module("flash_attn.cute").flash_attn_func(query, key, value, causal=True)[0]


def mask_rows(distances: Tensor, columns: Tensor, rows: Tensor, keys: int) -> Tensor:
    """Which of the first ``keys`` keys some query rows of one head attend to: bool ``[rows, keys]``.

    From the drawn pattern, not from the index, so that an error in the index would show.
    """
    position = torch.arange(keys, device=rows.device)
    block = torch.arange(-(-keys // BLOCK), device=rows.device)
    apart = (rows[:, None] // BLOCK - block[None, :]).clamp(min=0)
    mask = distances[apart].repeat_interleave(BLOCK, 1)[:, :keys]
    mask[:, columns[columns < keys]] = True
    return mask & (rows[:, None] >= position[None, :])


def read_operands(path: Path) -> tuple[Tensor, Tensor]:
    """query ``[s, 1, h, d]`` and key ``[s, 1, hk, d]`` of a safetensors file that holds ``query`` and
    ``key`` as ``[heads, s, d]``."""
    from safetensors.torch import load_file

    found = load_file(path)
    query, key = (found[name].transpose(0, 1)[:, None].contiguous() for name in ("query", "key"))
    return query, key
