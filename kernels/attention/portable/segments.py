# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Segments of the query blocks that attend to a key block, for the gradients of keys and values.

With block lists, nearly all query blocks of all heads of a group may list the same key block, such as that of
an attention sink, and a program that walked them all would end long after the others. So each program has
:data:`SEGMENT_BLOCKS` of them, and the programs of a key block take turns to add up their sums, in the order
of the segments: the result is deterministic, and the sums are where a single program would put them aside. A
program waits for earlier ones alone, which GPUs start first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...common.launch import launch, next_power_of_2
from ...types import PatternOperand, RingStep

SEGMENT_BLOCKS = 64
"""Query blocks of a segment, over all heads of a group, beside those at the key block's own place. No more
than fit a chain (``launch_args.CHAIN``)."""


class Segments(NamedTuple):
    """The programs of the gradients of one rank's keys and values."""

    programs: Tensor
    """int32 ``[programs, 4]``: of each the key block, the head, of ``b * hk``, the number of its segment, and
    how many of these the key block has: one if nothing attends to it. -1 stands for no program, as the host
    does not know their number. The first key blocks, which the most queries see, come first, and the segments
    of a key block in order."""
    num_turns: int
    """Key blocks of all heads."""
    blocks: int
    """Of a segment."""

    def new_turns(self, parts: int) -> Tensor:
        """Zeros: how many programs have added to the sums of each part of a key block."""
        shape = (self.num_turns, parts)
        return torch.zeros(shape, dtype=torch.int32, device=self.programs.device)


def find_segments(index: PatternOperand, kv_heads: int, ring_step: RingStep) -> Segments | None:
    """The segments of a step of the ring; None if no key block can have two, or without block lists."""
    batch, heads, _ = index.member.shape
    blocks, lines, group = index.local_blocks, batch * kv_heads, heads // kv_heads
    own = ring_step.source == ring_step.rank
    if not index.has_block_lists or group * (blocks - own) <= SEGMENT_BLOCKS:
        return None
    entries = min(len(index.rank_list), batch * heads * blocks * (blocks + 1) // 2)
    most = lines * blocks + entries // SEGMENT_BLOCKS
    programs = torch.full((most, 4), -1, dtype=torch.int32, device=index.rank_ptr.device)
    heads_at_once = next_power_of_2(group)
    launch(
        _segment_kernel,
        (1,),
        rank_ptr=index.rank_ptr,
        programs_ptr=programs,
        first_list=ring_step.source * batch * heads * blocks,
        local_blocks=blocks,
        lines=lines,
        GROUP=group,
        DIAGONAL=own,
        SEGMENT=SEGMENT_BLOCKS,
        HEADS_AT_ONCE=heads_at_once,
        BLOCK_N=max(64, 8192 // heads_at_once),
        num_warps=8,
    )
    return Segments(programs, lines * blocks, SEGMENT_BLOCKS)


@triton.jit(do_not_specialize=["first_list"])
def _segment_kernel(
    rank_ptr,  # [W * b * h * nb + 1]
    programs_ptr,  # [programs, 4]
    first_list,  # of the keys' rank, in rank_ptr
    local_blocks,
    lines,  # b * hk
    GROUP: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a list of a few thousand entries."""
    g = tl.arange(0, HEADS_AT_ONCE)[:, None]
    num_programs = 0
    for first in range(0, local_blocks * lines, BLOCK_N):
        entry = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        inside = entry < local_blocks * lines
        kv_block = entry // lines
        line = entry % lines
        at = rank_ptr + first_list + (line[None, :] * GROUP + g) * local_blocks + kv_block[None, :]
        mask = (g < GROUP) & inside[None, :]
        counts = tl.load(at + 1, mask=mask, other=0) - tl.load(at, mask=mask, other=0)
        blocks = tl.sum(counts, 0)
        if DIAGONAL:
            blocks -= GROUP  # each head's list begins with the query block at the same place
        count = tl.where(inside, tl.maximum(tl.cdiv(blocks, SEGMENT), 1), 0)
        start = num_programs + tl.cumsum(count, 0) - count
        for number in range(tl.max(count, 0)):
            row = programs_ptr + 4 * (start + number)
            tl.store(row, kv_block, mask=number < count)
            tl.store(row + 1, line, mask=number < count)
            tl.store(row + 2, number, mask=number < count)
            tl.store(row + 3, count, mask=number < count)
        num_programs += tl.sum(count, 0)


@triton.jit
def wait_for_turn(turn_ptr, turn):
    """Wait until so many programs have added to the same sums."""
    while tl.atomic_add(turn_ptr, 0, sem="acquire") < turn:
        pass


@triton.jit
def end_turn(turn_ptr):
    """Let the next program add."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(turn_ptr, 1, sem="release")
