# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch twins of the kernels: what CPU tensors use, and what the kernels are tested against.

They compute dense scores under the written-out mask of a ring step, so they take memory of the order
of local queries x local keys: for tests and small runs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step_mask(index, step, query_length: int, key_length: int) -> Tensor:
    """Which keys of a ring step each query attends to: bool ``[b, h, query_length, key_length]``."""
    device, block = index.slash_member.device, index.block_size
    rows = torch.arange(query_length, device=device)
    keys = torch.arange(key_length, device=device)
    e = rows[:, None] // block - keys[None, :] // block - step.wrap
    kept = index.slash_member[:, :, step.distance].bool()[:, :, e.clamp(min=0)]
    kept = kept | _is_column(index, step.source, key_length)[:, :, None, :]
    kept = kept & (e >= 0)
    if step.distance == 0:
        kept = kept & (rows[:, None] >= keys[None, :])
    return kept


def _is_column(index, source: int, key_length: int) -> Tensor:
    """Which local keys of rank ``source`` are columns: bool ``[b, h, key_length]``."""
    nb = index.local_blocks
    low = index.column_ptr[..., source * nb, None]
    high = index.column_ptr[..., (source + 1) * nb, None]
    entry = torch.arange(index.columns.shape[-1], device=index.columns.device)
    slot = torch.where((entry >= low) & (entry < high), index.columns.long(), key_length)
    flags = torch.zeros(*slot.shape[:-1], key_length + 1, dtype=torch.bool, device=slot.device)
    return flags.scatter_(-1, slot, True)[..., :key_length]


def _heads_first(tensor: Tensor, heads: int) -> Tensor:
    """``[s, b, h', d]`` -> ``[b, heads, s, d]`` in at least float32, KV heads repeated for their group."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    tensor = tensor.permute(1, 2, 0, 3).to(dtype)
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _probabilities(query, key, index, step, softmax_scale, lse):
    heads = query.shape[2]
    q, k = _heads_first(query, heads), _heads_first(key, heads)
    scores = q @ k.transpose(-1, -2) * softmax_scale
    mask = step_mask(index, step, query.shape[0], key.shape[0])
    scores = scores.masked_fill(~mask, float("-inf"))
    return q, k, scores if lse is None else torch.exp(scores - lse[..., None].to(scores.dtype))


def attention_forward(query, key, value, index, step, softmax_scale, carry, lse):
    """See :func:`kernels.attention_forward`."""
    q, k, scores = _probabilities(query, key, index, step, softmax_scale, None)
    v = _heads_first(value, query.shape[2])
    step_lse = torch.logsumexp(scores, -1)
    new_lse = step_lse if step.first else torch.logaddexp(lse.to(scores.dtype), step_lse)
    # A score of +inf makes all of its row NaN, as in a softmax, also in the backward.
    new_lse = new_lse.masked_fill(new_lse == float("inf"), float("nan"))
    finite = new_lse
    if not step.last:
        # A row that has seen nothing but scores of -inf is 0 so far; it is NaN if this stays so.
        finite = new_lse.masked_fill(new_lse == float("-inf"), 0)
    # A float64 caller gets its log-sum-exp in float64 too: the buffer's dtype is the caller's.
    out = torch.exp(scores - finite[..., None]) @ v
    if not step.first:
        weight = torch.exp(lse.to(scores.dtype) - finite)[..., None]
        out = out + carry.permute(1, 2, 0, 3).to(scores.dtype) * weight
    lse.copy_(new_lse)
    return out.permute(2, 0, 1, 3)


def attention_delta(out, grad_out):
    """See :func:`kernels.attention_delta`."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (out.to(dtype) * grad_out.to(dtype)).sum(-1).permute(1, 2, 0).contiguous()


def attention_backward(
    query, key, value, grad_out, lse, delta, index, step, softmax_scale, grad_query
):
    """One ring step's gradients, all in the precision of the computation.

    Returns:
        grad_query ``[s, b, h, d]`` (the carried one added); the gradients of key and value, stacked
        ``[2, s, b, hk, d]`` (this step's share alone).
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    q, k, p = _probabilities(query, key, index, step, softmax_scale, lse)
    v, do = _heads_first(value, heads), _heads_first(grad_out, heads)
    ds = p * (do @ v.transpose(-1, -2) - delta[..., None].to(p.dtype))
    dq = (ds @ k * softmax_scale).permute(2, 0, 1, 3)
    if not step.first:
        dq = dq + grad_query.to(dq.dtype)

    def to_groups(grad):  # [b, h, s, d] -> [s, b, hk, d]
        return grad.unflatten(1, (kv_heads, heads // kv_heads)).sum(2).permute(2, 0, 1, 3)

    dk = to_groups(ds.transpose(-1, -2) @ q) * softmax_scale
    return dq, torch.stack((dk, to_groups(p.transpose(-1, -2) @ do)))
