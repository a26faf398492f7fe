# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which blocks of a round the backward keeps: those that hold a share of some query's attention, and a random
sample of the others if there is a seed.

Each program takes one query block of one head and computes, for each key block of its list, the shares
``sum_k exp(scale q_i.k - lse_i)`` of its rows: one product of the seven of attention. Any GPU takes this
kernel, Hopper GPUs too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import launch
from ...common.tiles import LOG2E, block_at, list_start, load_rows, tile_for
from ...types import PatternIndex, Round
from .kv_tiles import kv_arguments, slash_range, slash_tile
from .sampling import kept_code

_SHARED = (
    "k_ptr", "stride_kr", "stride_kn", "stride_kb", "stride_kh", "key_len", "slash_ptr", "slash_list",
    "document_starts", "kv_block_bounds", "ptr_len", "list_len", "local_blocks", "round_start", "wrap",
    "rank", "world", "round_index", "outer", "INNER", "HEADS", "GROUP", "BLOCK", "D", "FIRST", "LISTS",
    "PACKED", "EVEN", "PREC",
)  # fmt: skip
"""Arguments that the kernel shares with the forward (``kv_tiles.kv_arguments``)."""


@triton.jit(do_not_specialize=["round_start", "wrap", "rank", "round_index"])
def _prune_kernel(
    # Operands and results
    q_ptr,  # [s, b, h, d]
    k_ptr,  # [I, s, b, hk, d]
    lse_ptr,  # [b, h, s]
    least_share_ptr,  # [b]
    seed_ptr,  # [1], or None to draw none
    kept_ptr,  # [b, h, nb, NB]
    dropped_ptr,  # [b, h, s]
    # The pattern (types.PatternIndex), and packed documents or None
    slash_ptr,
    slash_list,
    document_starts,
    kv_block_bounds,
    # Strides (r: rank, m: query row, n: key row, b: batch entry, h: head)
    stride_qm,
    stride_qb,
    stride_qh,
    stride_kr,
    stride_kn,
    stride_kb,
    stride_kh,
    # Sizes
    ptr_len,  # NB + 1
    list_len,
    query_len,  # s
    key_len,  # s
    local_blocks,  # nb
    softmax_scale,
    # The layout and the round (types.Round)
    round_start,
    wrap,
    rank,
    world,
    round_index,
    outer,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    LISTS: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,
    PREC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAMPLING: tl.constexpr,
):
    tiles: tl.constexpr = BLOCK // BLOCK_N
    q_block = local_blocks - 1 - tl.program_id(0)  # the last blocks have the most keys
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // HEADS
    head = bh % HEADS
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // GROUP * stride_kh
    slash_ptr += list_start(bh, q_block, ptr_len, local_blocks, round_start, LISTS)
    slash_list += bh * list_len
    kept_ptr += (bh * local_blocks + q_block) * (ptr_len - 1)
    least_share = tl.load(least_share_ptr + batch)
    seed = 0
    if SAMPLING:
        seed = tl.load(seed_ptr)
    scale = softmax_scale * LOG2E

    offs_m = tl.arange(0, BLOCK)
    offs_n = tl.arange(0, BLOCK_N)
    start = q_block * BLOCK
    inside = start + offs_m < query_len
    q = load_rows(q_ptr, start, stride_qm, offs_m, query_len, D, EVEN)  # [BLOCK, D]
    # A row past the end gets lse = inf, hence p = 0.
    line = bh * query_len + start + offs_m
    lse = tl.load(lse_ptr + line, mask=inside, other=float("inf")) * LOG2E  # [BLOCK]
    dropped = tl.zeros([BLOCK], tl.float32)
    if not FIRST:
        dropped = tl.load(dropped_ptr + line, mask=inside, other=0.0)

    low, unmasked_end, high, last_block, starts, first_block, of_round = slash_range(
        slash_ptr, slash_list, document_starts, kv_block_bounds, q_block, start, offs_m, inside, batch,
        query_len, local_blocks, rank, wrap, round_index, outer, INNER, LISTS, PACKED,
    )  # fmt: skip
    block = block_at(q_block, rank, world, INNER)
    group = rank // INNER - round_index + wrap * outer
    if FIRST:
        # Block distance 0 is the first of the list.
        tl.store(kept_ptr + block, 1)
        low += 1
    for MASKED in tl.static_range(2 if PACKED else 1):
        begin = tl.maximum(low, unmasked_end) if MASKED else low
        end = high if MASKED else unmasked_end
        for j in range(begin, end):
            share = tl.zeros([BLOCK], tl.float32)
            for part in tl.static_range(tiles):
                k, v, mask = slash_tile(
                    j * tiles + part, offs_n, slash_list, last_block, group, starts, k_ptr, k_ptr,
                    stride_kr, stride_kn, stride_kr, stride_kn, key_len, outer,
                    INNER, BLOCK, BLOCK_N, D, MASKED,
                )  # fmt: skip
                scores = tl.dot(q, tl.trans(k), input_precision=PREC)  # [BLOCK, BLOCK_N]
                if MASKED:
                    scores = tl.where(mask, scores, float("-inf"))
                share += tl.sum(tl.math.exp2(scores * scale - lse[:, None]), 1)
            k_block = (last_block - tl.load(slash_list + j).to(tl.int32)) * outer + group
            code = kept_code(share, least_share, seed, bh, block, k_block, SAMPLING)
            tl.store(kept_ptr + k_block, code)
            dropped += tl.where(code > 0, 0.0, share)
    tl.store(dropped_ptr + line, dropped, mask=inside)


def prune_blocks(
    query: Tensor,
    key: Tensor,
    *,
    lse: Tensor,
    index: PatternIndex,
    round_: Round,
    softmax_scale: float,
    least_share: Tensor,
    seed: Tensor | None,
    kept: Tensor,
    dropped: Tensor,
) -> None:
    """See :func:`..reference.prune_blocks`."""
    tile = tile_for("prune", query.shape[3], index.block_size, query)
    arguments = kv_arguments(query, key, key, None, index, round_)
    launch(
        _prune_kernel,
        (index.local_blocks, query.shape[1] * query.shape[2]),
        q_ptr=query,
        lse_ptr=lse,
        least_share_ptr=least_share,
        seed_ptr=seed,
        kept_ptr=kept,
        dropped_ptr=dropped,
        stride_qm=query.stride(0),
        stride_qb=query.stride(1),
        stride_qh=query.stride(2),
        query_len=query.shape[0],
        softmax_scale=softmax_scale,
        **{name: arguments[name] for name in _SHARED},
        BLOCK_N=tile.block_n,
        SAMPLING=seed is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
