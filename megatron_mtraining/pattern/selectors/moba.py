# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Policy moba: the ``top_k`` blocks by mean query times mean key, as in MoBA (arXiv 2502.13189, section 2.2),
which scores single queries; here the queries of a block share one list."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import MobaPolicy
from ...kernels.selection import top_blocks
from ...layout import owner_of
from ..constants import made_once
from ..selector import selects_for
from .key_blocks import BlockCall, KeyBlockSelector, chunks, joined


@selects_for(MobaPolicy)
class MobaSelector(KeyBlockSelector):
    """The ``top_k`` blocks by mean query times mean key.

    Means are in float64, rounded to integers whose products add up exactly: so the scores, rounded to
    float32, are the same bits in whatever order they are summed. The rounding of a block depends on that
    block alone: no later key changes how earlier ones compare.

    Not captured in a graph: cuBLAS would keep the memory that it works in after the graph is gone.
    """

    policy: MobaPolicy

    def most_blocks(self, always: int) -> int:
        # What the block before keeps of its own window, too, unless a block selects for itself.
        return self.policy.top_k + always + 2 - self.policy.lookahead

    def choose(self, query: Tensor, key: Tensor, call: BlockCall) -> Tensor:
        cp, length, block_size, top_k = call.cp, call.length, call.block_size, self.policy.top_k
        nb, (_, batch, heads, dim) = query.shape[0] // block_size, query.shape
        num_blocks, layout = nb * cp.world, (cp.rank, cp.world, cp.inner)
        tokens = _tokens(length, block_size, query.device)

        def means(tensor):
            sums = tensor.unflatten(0, (nb, block_size)).sum(1, dtype=torch.float64)
            return (sums / tokens).permute(1, 2, 0, 3)

        keys = cp.all_gather(means(key)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        if cp.world > 1:
            keys = keys.index_select(2, _in_sequence(nb, cp.world, cp.inner, key.device))
        bits = (52 - dim.bit_length()) // 2
        keys, shift = (each.transpose(-1, -2) for each in _to_integers(keys, bits))
        unit = (-shift).exp2()
        queries = _to_integers(means(query), bits)[0].unflatten(1, (key.shape[2], -1))
        chosen = []
        for first, count in chunks(nb, 4 * batch * heads * num_blocks):
            rows = queries[:, :, :, first : first + count]
            scores = (rows.flatten(2, 3) @ keys * unit).unflatten(2, rows.shape[2:4]).flatten(1, 2)
            # Floats as integers of the same order: all but the last bit, and all positive.
            order = scores.float().view(torch.int32) >> 1
            order = torch.where(order < 0, -(order & 0x3FFFFFFF), order) + 2**30
            order = order.clamp(min=1)
            if call.hidden is not None:
                order = order.masked_fill(call.hidden[:, :, first : first + count], 0)
            chosen.append(top_blocks(order, False, top_k, first, *call.always, *layout))
        return joined(chosen, 2)


@made_once
def _tokens(length: int, block_size: int, device) -> Tensor:
    """How many tokens each block of a rank has: float64 ``[nb, 1, 1, 1]``."""
    first = torch.arange(0, length, block_size, dtype=torch.float64, device=device)
    return (length - first).clamp(max=block_size)[:, None, None, None]


@made_once
def _in_sequence(nb: int, world: int, inner: int, device) -> Tensor:
    """Where the blocks of the sequence are among all ranks' blocks, rank by rank: int64 ``[NB]``."""
    owner, local = owner_of(torch.arange(nb * world, device=device), world, inner)
    return owner * nb + local


def _to_integers(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The tensor as whole numbers below ``2 ** bits``, float64, times a power of 2 for each last dimension,
    which depends on its largest entry alone; and the exponents of these powers. What is not finite is 0."""
    tensor = tensor.nan_to_num(0.0, 0.0, 0.0)
    _, exponent = torch.frexp(tensor.abs().amax(-1, keepdim=True))
    shift = (bits - exponent.clamp(min=-900)).double()
    return (tensor * shift.exp2()).round(), shift
