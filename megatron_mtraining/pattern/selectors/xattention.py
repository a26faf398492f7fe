# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policy xattention: the fewest blocks that hold ``threshold`` of the softmax of antidiagonal scores
(arXiv 2503.16428, section 3), summed to blocks."""

from __future__ import annotations

import math

from torch import Tensor

from ...config import XAttentionPolicy
from ...kernels.selection import antidiagonal_lse, block_masses, top_blocks
from ..selector import selects_for
from .key_blocks import BlockCall, KeyBlockSelector, chunks, joined


@selects_for(XAttentionPolicy)
class XAttentionSelector(KeyBlockSelector):
    """The fewest blocks that hold the threshold of antidiagonal scores' softmax. Of several ranks, keys are
    gathered for one KV head at a time."""

    policy: XAttentionPolicy

    @classmethod
    def is_captured(cls, world: int) -> bool:
        # Of several ranks the query block before is another's; a user's subclass may choose by what a graph
        # would not see.
        return world == 1 and cls is XAttentionSelector

    def choose(self, query: Tensor, key: Tensor, call: BlockCall) -> Tensor:
        cp, block_size, policy = call.cp, call.block_size, self.policy
        if block_size % policy.stride or block_size // policy.stride > 128:
            raise ValueError(
                f"stride is {policy.stride}: it must divide the block size, {block_size}"
            )
        nb, (_, batch, heads, _) = query.shape[0] // block_size, query.shape
        kv_heads, num_blocks = key.shape[2], nb * cp.world
        group = heads // kv_heads
        of_heads = []
        stride, wanted = policy.stride, math.ceil(policy.threshold * 2**30)
        squares = block_size // stride
        together = kv_heads if cp.world == 1 else 1
        for kv in range(0, kv_heads, together):
            keys = cp.all_gather(key[:, :, kv : kv + together])
            heads_of_kv = slice(kv * group, (kv + together) * group)
            chosen = []
            for first, count in chunks(nb, batch * together * group * squares * num_blocks):
                rows = query[first * block_size : (first + count) * block_size, :, heads_of_kv]
                parts, lse = antidiagonal_lse(
                    rows, keys, stride, block_size, first, cp.rank, cp.inner, call.softmax_scale,
                    call.seen_from,
                )  # fmt: skip
                num_rows = -(-call.length // stride) - first * squares
                mass = block_masses(parts, lse, squares, num_rows)
                chosen.append(
                    top_blocks(mass, True, wanted, first, *call.always, cp.rank, cp.world, cp.inner)
                )
            of_heads.append(joined(chosen, 2))
        return joined(of_heads, 1)
