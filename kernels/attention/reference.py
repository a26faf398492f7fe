# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch twins of the kernels: what CPU tensors use, and what the kernels are tested against.

They compute dense scores under the written-out mask of a round, so they take time of the order of local
queries x local keys, and but for the forward, which goes by parts of the queries, as much memory: for tests
and small runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import block_at, locate, positions_at

FORWARD_SCORES = 1 << 22
"""Scores that the forward has at once: so few that their memory is used again rather than asked for anew."""


def slash_mask(index, rank: int, sources, queries: range, key_length: int) -> Tensor:
    """Which keys of the ranks ``sources``, one after the other, queries of ``rank`` attend to in
    blocks: bool ``[b, h, len(queries), len(sources) * key_length]``."""
    device, block = index.member.device, index.block_size
    local = torch.arange(queries.start, queries.stop, device=device)
    theirs = torch.arange(key_length, device=device)
    rows, keys = (
        torch.cat([positions_at(those, rank, index.world, block, index.inner) for rank in ranks])
        for those, ranks in ((local, [rank]), (theirs, sources))
    )
    own = local // block
    blocks = slice(queries[0] // block, queries[-1] // block + 1)
    seen = index.block_mask(rank)[:, :, blocks][..., keys // block][:, :, own - blocks.start]
    seen = seen & (rows[:, None] >= keys[None, :])
    if index.documents is not None:
        seen &= (index.documents.starts[:, rows, None] <= keys)[:, None]
    return seen


def column_mask(index, rank: int, queries: range) -> Tensor:
    """Which columns queries of a rank attend to as columns: bool ``[b, h, len(queries), C]``."""
    rows = torch.arange(queries.start, queries.stop, device=index.columns.device)
    block = block_at(rows // index.block_size, rank, index.world, index.inner)
    apart = block[:, None] - index.columns[:, :, None].long() // index.block_size
    distances = index.distances()[:, :, None].expand(-1, -1, len(queries), -1)
    covered = distances.gather(-1, apart.clamp(min=0))
    seen = (apart > 0) & ~covered & (index.columns < index.seq_length)[:, :, None]
    if index.documents is not None:
        start = index.documents.on(rank, index.world, index.inner, index.block_size).start
        start = start[:, queries.start : queries.stop]
        seen &= start[:, None, :, None] <= index.columns[:, :, None]
    return seen


def _own_columns(index, rank: int, length: int) -> tuple[Tensor, Tensor]:
    """Of each entry of the list of columns, the row of this rank's part, ``length`` if it owns it not."""
    owner, row = locate(index.columns.long(), index.world, index.block_size, index.inner)
    owned = (owner == rank) & (index.columns < index.seq_length)
    return torch.where(owned, row, length), owned


def gather_columns(key, value, index, rank):
    """See :func:`kernels.gather_columns`."""
    length, heads = key.shape[0], index.columns.shape[1]
    row, owned = _own_columns(index, rank, length)
    row = row.clamp(max=length - 1)[..., None].expand(-1, -1, -1, key.shape[3])
    gathered = [
        t.permute(1, 2, 0, 3).repeat_interleave(heads // t.shape[2], 1).gather(2, row)
        for t in (key, value)
        if t is not None
    ]
    return torch.stack(gathered).masked_fill_(~owned[..., None], 0)


def _heads_first(tensor: Tensor, heads: int) -> Tensor:
    """``[s, b, h', d]`` -> ``[b, heads, s, d]`` in at least float32, KV heads repeated for their group."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    tensor = tensor.permute(1, 2, 0, 3).to(dtype)
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _scores(query, key, mask, softmax_scale) -> Tensor:
    """All operands ``[b, h, ., d]``."""
    scores = query @ key.transpose(-1, -2)
    return scores.mul_(softmax_scale).masked_fill_(~mask, float("-inf"))


def _keys(query, key, value, columns):
    """The round's keys and values, the columns after them if there are any, ``[b, h, ., d]``."""
    k, v = (_heads_first(t, query.shape[2]) for t in (key.flatten(0, 1), value.flatten(0, 1)))
    if columns is None:
        return k, v
    return [torch.cat((t, more.to(t.dtype)), 2) for t, more in zip((k, v), columns)]


def _masked_scores(q, k, columns, index, this, queries: range, key_length, softmax_scale) -> Tensor:
    """Those of a part of the queries, ``q`` and ``k`` as ``[b, h, ., d]``."""
    heads = q.shape[1]
    mask = slash_mask(index, this.rank, this.sources, queries, key_length)
    if columns is not None:
        turn = torch.arange(heads, device=q.device) * this.outer // heads == this.round_index
        more = column_mask(index, this.rank, queries) & turn[:, None, None]
        mask = torch.cat((mask, more), -1)
    return _scores(q, k, mask, softmax_scale)


def attention_forward(query, key, value, columns, index, this, softmax_scale, carry, lse):
    """See :func:`kernels.attention_forward`."""
    q = _heads_first(query, query.shape[2])
    k, v = _keys(query, key, value, columns)
    step = max(1, FORWARD_SCORES // k.shape[:3].numel())
    parts = []
    for begin in range(0, len(query), step):
        rows = range(begin, min(begin + step, len(query)))
        part = slice(rows.start, rows.stop)
        scores = _masked_scores(
            q[:, :, part], k, columns, index, this, rows, key.shape[1], softmax_scale
        )
        before = None if this.first else (carry[part], lse[:, :, part])
        out, new_lse = _rows_forward(scores, v, this.last, before)
        lse[:, :, part] = new_lse
        parts.append(out.permute(2, 0, 1, 3))
    return torch.cat(parts).contiguous()


def _rows_forward(scores, v, last: bool, before) -> tuple[Tensor, Tensor]:
    """Out ``[b, h, s, d]`` and log-sum-exp ``[b, h, s]`` of queries, ``before`` being those of the rounds
    before as the caller has them, or None."""
    new_lse = torch.logsumexp(scores, -1)
    if before is not None:
        carry, lse = before[0].permute(1, 2, 0, 3).to(scores.dtype), before[1].to(scores.dtype)
        new_lse = torch.logaddexp(lse, new_lse)
    # A score of +inf makes all of its row NaN, as in a softmax, also in the backward.
    new_lse = new_lse.masked_fill(new_lse == float("inf"), float("nan"))
    finite = new_lse
    if not last:
        # A row that has seen nothing but scores of -inf is 0 so far; it is NaN if this stays so.
        finite = new_lse.masked_fill(new_lse == float("-inf"), 0)
    # A float64 caller gets its log-sum-exp in float64 too: the buffer's dtype is the caller's.
    out = torch.exp(scores - finite[..., None]) @ v
    if before is not None:
        out = out + carry * torch.exp(lse - finite)[..., None]
    return out, new_lse


def attention_delta(out, grad_out):
    """See :func:`kernels.attention_delta`."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (out.to(dtype) * grad_out.to(dtype)).sum(-1).permute(1, 2, 0).contiguous()


def _score_gradients(scores, v, do, lse, delta):
    """Probabilities and the gradients of the scaled scores."""
    p = torch.exp(scores - lse[..., None].to(scores.dtype))
    return p, p * (do @ v.transpose(-1, -2) - delta[..., None].to(p.dtype))


def attention_backward_query(
    query, key, value, columns, grad_out, lse, delta, index, this, softmax_scale, carry, dq, heads
):
    """See :func:`kernels.attention_backward_query`; ``heads`` is a range of those of all batch entries."""
    q, do = (_heads_first(t, query.shape[2]) for t in (query, grad_out))
    k, v = _keys(query, key, value, columns)
    rows = range(len(query))
    scores = _masked_scores(q, k, columns, index, this, rows, key.shape[1], softmax_scale)
    _, ds = _score_gradients(scores, v, do, lse, delta)
    gradient = (ds @ k * softmax_scale).permute(2, 0, 1, 3)
    if carry is not None:
        gradient = gradient + carry.to(gradient.dtype)
    for line in heads:
        batch, head = divmod(line, query.shape[2])
        dq[:, batch, head] = gradient[:, batch, head].to(dq.dtype)


def attention_backward_columns(query, columns, grad_out, lse, delta, index, rank, softmax_scale):
    """See :func:`kernels.attention_backward_columns`."""
    heads = query.shape[2]
    q, do = _heads_first(query, heads), _heads_first(grad_out, heads)
    k, v = columns.to(q.dtype)
    scores = _scores(q, k, column_mask(index, rank, range(len(query))), softmax_scale)
    p, ds = _score_gradients(scores, v, do, lse, delta)
    return torch.stack((ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do))[:, :, :, None]


def attention_backward_key(
    query, key, value, grad_out, lse, delta, index, step, softmax_scale, carry, column_gradients
):
    """See :func:`kernels.attention_backward_key`."""
    heads, kv_heads, length = query.shape[2], key.shape[2], key.shape[0]
    q, k, v, do = (_heads_first(t, heads) for t in (query, key, value, grad_out))
    mask = slash_mask(index, step.rank, [step.source], range(length), length)
    scores = _scores(q, k, mask, softmax_scale)
    p, ds = _score_gradients(scores, v, do, lse, delta)
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
    if column_gradients is not None:
        row, _ = _own_columns(index, step.source, length)
        row = row[..., None].expand(-1, -1, -1, key.shape[3])
        dk, dv = (
            torch.nn.functional.pad(t, (0, 0, 0, 1)).scatter_add(2, row, more.sum(2).to(t.dtype))
            for t, more in zip((dk, dv), column_gradients)
        )

    def to_groups(grad):  # [b, h, s, d] -> [s, b, hk, d]
        grad = grad[:, :, :length].unflatten(1, (kv_heads, heads // kv_heads))
        return grad.sum(2).permute(2, 0, 1, 3)

    gradients = torch.stack((to_groups(dk) * softmax_scale, to_groups(dv)))
    return gradients if carry is None else gradients + carry
