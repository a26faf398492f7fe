# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policy moba: the ``top_k`` blocks by mean query times mean key, as in MoBA (arXiv 2502.13189, section 2.2),
which scores single queries; here the queries of a block share one list."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import MobaPolicy
from ...kernels.selection import top_blocks
from ...layout import block_at
from ..selector import selects_for
from .key_blocks import BlockCall, KeyBlockSelector, chunks


@selects_for(MobaPolicy)
class MobaSelector(KeyBlockSelector):
    """The ``top_k`` blocks by mean query times mean key.

    Means are in float64, rounded to integers whose products add up exactly: so the scores, rounded to
    float32, are the same bits in whatever order they are summed. The rounding of a block depends on that
    block alone: no later key changes how earlier ones compare.
    """

    policy: MobaPolicy

    def most_blocks(self, always: int) -> int:
        # What the block before keeps of its own window, too, unless a block selects for itself.
        return self.policy.top_k + always + 2 - self.policy.lookahead

    def choose(self, query: Tensor, key: Tensor, call: BlockCall) -> Tensor:
        cp, length, block_size, top_k = call.cp, call.length, call.block_size, self.policy.top_k
        nb, (_, batch, heads, dim) = query.shape[0] // block_size, query.shape
        num_blocks, world = nb * cp.world, cp.world
        own, layout = torch.arange(nb, device=query.device), (cp.rank, world, cp.inner)

        def means(tensor):
            tokens = tensor.unflatten(0, (nb, block_size))
            count = (length - own * block_size).clamp(max=block_size)
            return (tokens.sum(1, dtype=torch.float64) / count[:, None, None, None]).permute(
                1, 2, 0, 3
            )

        keys = torch.empty(
            batch, key.shape[2], num_blocks, dim, dtype=torch.float64, device=key.device
        )
        for rank, part in enumerate(cp.all_gather(means(key))):
            keys[:, :, block_at(own, rank, world, cp.inner)] = part
        bits = (52 - dim.bit_length()) // 2
        keys, unit = (each.transpose(-1, -2) for each in _to_integers(keys, bits))
        queries = _to_integers(means(query), bits)[0].unflatten(1, (key.shape[2], -1))
        blocks = torch.empty(batch, heads, nb, num_blocks, dtype=torch.uint8, device=query.device)
        for first, count in chunks(nb, 4 * batch * heads * num_blocks):
            rows = queries[:, :, :, first : first + count]
            scores = (rows.flatten(2, 3) @ keys * unit).unflatten(2, rows.shape[2:4]).flatten(1, 2)
            # Floats as integers of the same order: all but the last bit, and all positive.
            order = scores.float().view(torch.int32) >> 1
            order = torch.where(order < 0, -(order & 0x3FFFFFFF), order) + 2**30
            order = order.clamp(min=1)
            if call.hidden is not None:
                order = order.masked_fill(call.hidden[:, :, first : first + count], 0)
            blocks[:, :, first : first + count] = top_blocks(
                order, False, top_k, first, *call.always, *layout
            )
        return blocks


def _to_integers(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The tensor as whole numbers below ``2 ** bits``, float64, times a power of 2 for each last dimension,
    which depends on its largest entry alone. What is not finite is 0."""
    tensor = tensor.nan_to_num(0.0, 0.0, 0.0)
    _, exponent = torch.frexp(tensor.abs().amax(-1, keepdim=True))
    shift = (bits - exponent.clamp(min=-900)).double()
    return (tensor * shift.exp2()).round(), (-shift).exp2()
