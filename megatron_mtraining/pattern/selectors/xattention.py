# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policy xattention: the fewest blocks that hold ``threshold`` of the softmax of antidiagonal scores
(arXiv 2503.16428, section 3), summed to blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...config import XAttentionPolicy
from ...kernels.selection import antidiagonal_lse, top_blocks
from ..selector import selects_for
from .key_blocks import BlockCall, KeyBlockSelector, chunks


@selects_for(XAttentionPolicy)
class XAttentionSelector(KeyBlockSelector):
    """The fewest blocks that hold the threshold of antidiagonal scores' softmax. Keys of all ranks are
    gathered for one KV head at a time."""

    policy: XAttentionPolicy

    def choose(self, query: Tensor, key: Tensor, call: BlockCall) -> Tensor:
        cp, block_size, policy = call.cp, call.block_size, self.policy
        if block_size % policy.stride or block_size // policy.stride > 128:
            raise ValueError(
                f"stride is {policy.stride}: it must divide the block size, {block_size}"
            )
        nb, (_, batch, heads, _) = query.shape[0] // block_size, query.shape
        kv_heads, num_blocks = key.shape[2], nb * cp.world
        group = heads // kv_heads
        blocks = torch.empty(batch, heads, nb, num_blocks, dtype=torch.uint8, device=query.device)
        stride, wanted = policy.stride, math.ceil(policy.threshold * 2**30)
        squares = block_size // stride
        for kv in range(kv_heads):
            keys = cp.all_gather(key[:, :, kv : kv + 1])
            heads_of_kv = slice(kv * group, (kv + 1) * group)
            for first, count in chunks(nb, batch * group * squares * num_blocks):
                rows = query[first * block_size : (first + count) * block_size, :, heads_of_kv]
                parts, lse = antidiagonal_lse(
                    rows, keys, stride, block_size, first, cp.rank, cp.inner, call.softmax_scale
                )
                if call.hidden is not None:
                    own = call.hidden[:, :, first : first + count].repeat_interleave(squares, 2)
                    parts = parts.masked_fill(own, float("-inf"))
                    lse = torch.logsumexp(parts * math.log(2), -1) / math.log(2)
                mass = _fixed_point(parts, lse)
                mass[:, :, -(-call.length // stride) - first * squares :] = (
                    0  # past the end of the sequence
                )
                mass = mass.unflatten(2, (count, squares)).sum(3)
                blocks[:, heads_of_kv, first : first + count] = top_blocks(
                    mass.int(), True, wanted, first, *call.always, cp.rank, cp.world, cp.inner
                )
        return blocks


def _fixed_point(parts: Tensor, lse: Tensor) -> Tensor:
    """Each row's attention to the key blocks, with 2^23 for a probability of 1: the rows of a block, up to
    128, add up exactly and to less than 2^31. What is not a number has no mass. ``parts`` is used up."""
    share = parts.sub_(lse[..., None]).exp2_().mul_(2**23).round_()
    return share.nan_to_num_(0.0, 0.0, 0.0).to(torch.int32)
