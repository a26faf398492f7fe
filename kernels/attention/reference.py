# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reference implementations of attention and its gradients in PyTorch.

CPU tensors take them, and tests compare the kernels with them. For query ``i`` and the keys ``k`` of a round
that its head attends to, with sums in at least float32,

    lse_i = log( exp(lse_i') + sum_k exp(scale q_i.k) )
    out_i = exp(lse_i' - lse_i) out_i' + sum_k exp(scale q_i.k - lse_i) v_k

where ``'`` marks the result of the rounds before (the accumulator). With ``p_ik = exp(scale q_i.k - lse_i)``
of the final lse and ``delta_i = sum(out_i * dout_i)``,

    ds_ik = p_ik (dout_i.v_k - delta_i)
    dq_i = scale sum_k ds_ik k        dk = scale sum_i ds_ik q_i        dv_k = sum_i p_ik dout_i

The scores of a round are written out under a dense mask. This takes time of the order of queries x keys of a
rank, and as much memory except in the forward, which computes some rows at a time: for tests and small runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import block_at, located, positions_at
from ..types import PatternOperand, Round, StripedColumns
from .marks import BlockMarks
from .operands import BackwardInputs, ForwardInputs, RoundKeys, StepKeys

FORWARD_SCORES = 1 << 22
"""Scores that the forward computes at a time: few enough that their memory is reused."""


def slash_mask(
    index: PatternOperand, rank: int, sources: Sequence[int], queries: range, key_length: int
) -> Tensor:
    """Mask of the blocks that queries attend to, without columns.

    Args:
        rank: rank of the queries.
        sources: ranks of the keys, one after the other.
        queries: which rows of the rank's part.
        key_length: keys on each rank.

    Returns:
        bool ``[b, h, len(queries), len(sources) * key_length]``.
    """
    device, block = index.member.device, index.block_size
    rows = torch.arange(queries.start, queries.stop, device=device)
    keys = torch.arange(key_length, device=device)
    q_position = positions_at(rows, rank, index.world, block, index.inner)
    k_position = torch.cat(
        [positions_at(keys, source, index.world, block, index.inner) for source in sources]
    )
    blocks = slice(queries[0] // block, queries[-1] // block + 1)
    mask = index.block_mask(rank)[:, :, blocks][..., k_position // block]
    mask = mask[:, :, rows // block - blocks.start]
    mask = mask & (q_position[:, None] >= k_position[None, :])
    if index.visible is not None:
        mask &= (index.visible.start[:, q_position, None] <= k_position)[:, None]
    return mask


def column_mask(index: PatternOperand, rank: int, queries: range) -> Tensor:
    """Mask of the columns that queries of a rank attend to as columns, not in a block: bool
    ``[b, h, len(queries), C]``."""
    rows = torch.arange(queries.start, queries.stop, device=index.columns.device)
    q_block = block_at(rows // index.block_size, rank, index.world, index.inner)
    distance = q_block[:, None] - index.columns[:, :, None].long() // index.block_size
    slashes = index.distances()[:, :, None].expand(-1, -1, len(queries), -1)
    in_slash = slashes.gather(-1, distance.clamp(min=0))
    mask = (distance > 0) & ~in_slash & (index.columns < index.seq_length)[:, :, None]
    if index.visible is not None:
        start = index.visible.on(rank, index.world, index.inner, index.block_size).start
        start = start[:, queries.start : queries.stop]
        mask &= start[:, None, :, None] <= index.columns[:, :, None]
    return mask


def forward(inputs: ForwardInputs, out: Tensor) -> None:
    """:func:`..attention.forward` into ``out``, which may be the accumulator."""
    query, keys, index, lse = inputs.query, inputs.keys, inputs.index, inputs.lse
    accumulator, marks = inputs.accumulator, inputs.marks
    q = _heads_first(query, query.shape[2])
    k, v = _keys_and_columns(query, keys)
    step = max(1, FORWARD_SCORES // k.shape[:3].numel())
    for begin in range(0, len(query), step):
        rows = range(begin, min(begin + step, len(query)))
        part = slice(rows.start, rows.stop)
        scores = _round_scores(q[:, :, part], k, keys, index, rows, inputs.softmax_scale)
        before = None
        if not keys.round.first and accumulator is not None:
            before = accumulator[part], lse[:, :, part]
        if marks is not None:
            key_length = keys.key.shape[1]
            _mark_blocks(scores, before and before[1], index, keys.round, rows, key_length, marks)
        out_rows, lse[:, :, part] = _forward_rows(scores, v, keys.round.last, before)
        out[part] = out_rows.permute(2, 0, 1, 3)


def delta(out: Tensor, grad_out: Tensor) -> Tensor:
    """Sums over ``d`` of ``out * grad_out``, both ``[s, b, h, d]``: float32 ``[b, h, s]``."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (out.to(dtype) * grad_out.to(dtype)).sum(-1).permute(1, 2, 0).contiguous()


def backward_query(
    inputs: BackwardInputs,
    keys: RoundKeys,
    grad_query: Tensor,
    accumulator: Tensor | None,
    head_range: range,
) -> None:
    """:func:`..attention.backward_query` into ``grad_query``, which may be the accumulator, for some of the
    ``b * h`` heads of all batch entries."""
    query, attended = inputs.query, inputs.attended
    q, grad = (_heads_first(t, query.shape[2]) for t in (query, inputs.grad_out))
    k, v = _keys_and_columns(query, keys)
    scores = _round_scores(q, k, keys, inputs.index, range(len(query)), inputs.softmax_scale)
    p, ds = _score_gradients(scores, v, grad, inputs)
    dq = (ds @ k * inputs.softmax_scale).permute(2, 0, 1, 3)
    if accumulator is not None:
        dq = dq + accumulator.to(dq.dtype)
    for batch_head in head_range:
        batch, head = divmod(batch_head, query.shape[2])
        grad_query[:, batch, head] = dq[:, batch, head].to(grad_query.dtype)
        if attended is not None:
            before = 0 if keys.round.first else attended[batch, head]
            attended[batch, head] = p[batch, head].sum(-1) + before


def backward_columns(inputs: BackwardInputs, column_kv: Tensor, rank: int) -> Tensor:
    """:func:`..attention.backward_columns`, in one split."""
    query, heads = inputs.query, inputs.query.shape[2]
    q, grad = _heads_first(query, heads), _heads_first(inputs.grad_out, heads)
    k, v = column_kv.to(q.dtype)
    mask = column_mask(inputs.index, rank, range(len(query)))
    p, ds = _score_gradients(_scores(q, k, mask, inputs.softmax_scale), v, grad, inputs)
    if inputs.query_sums is not None:
        inputs.query_sums.add_((ds @ k).permute(2, 0, 1, 3))
    return torch.stack((ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad))[:, :, :, None]


def backward_key(
    inputs: BackwardInputs,
    keys: StepKeys,
    grad_kv: Tensor,
    accumulator: Tensor | None,
    column_gradients: Tensor | None,
) -> None:
    """:func:`..attention.backward_key` into ``grad_kv``, which may be the accumulator."""
    index, ring_step = inputs.index, keys.ring_step
    heads, kv_heads, length = inputs.query.shape[2], keys.key.shape[2], keys.key.shape[0]
    q, k, v, grad = (
        _heads_first(t, heads) for t in (inputs.query, keys.key, keys.value, inputs.grad_out)
    )
    mask = slash_mask(index, ring_step.rank, [ring_step.source], range(length), length)
    p, ds = _score_gradients(_scores(q, k, mask, inputs.softmax_scale), v, grad, inputs)
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    if inputs.query_sums is not None:
        inputs.query_sums.add_((ds @ k).permute(2, 0, 1, 3))
    if column_gradients is not None:
        # Columns of other ranks go to one more row, which is dropped.
        row, _ = _own_columns(index, ring_step.source, length)
        row = row[..., None].expand(-1, -1, -1, keys.key.shape[3])
        dk, dv = (
            torch.nn.functional.pad(t, (0, 0, 0, 1)).scatter_add(2, row, columns.sum(2).to(t.dtype))
            for t, columns in zip((dk, dv), column_gradients)
        )

    def sum_groups(grad: Tensor) -> Tensor:  # [b, h, s, d] -> [s, b, hk, d]
        grad = grad[:, :, :length].unflatten(1, (kv_heads, heads // kv_heads))
        return grad.sum(2).permute(2, 0, 1, 3)

    gradients = torch.stack((sum_groups(dk) * inputs.softmax_scale, sum_groups(dv)))
    grad_kv.copy_(gradients if accumulator is None else gradients + accumulator)


def new_query_sums(query: Tensor) -> Tensor:
    """Memory for the queries' gradient of a one-pass backward: zeros, ``[s, b, h, d]``."""
    return torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))


def finish_query_sums(query_sums: Tensor, query: Tensor, softmax_scale: float) -> Tensor:
    """The queries' gradient, ``[s, b, h, d]`` in the query's dtype."""
    return (query_sums * softmax_scale).to(query.dtype)


def gather_columns(
    key: Tensor, value: Tensor | None, index: PatternOperand | StripedColumns, rank: int
) -> Tensor:
    """Keys and values of each head's columns that lie on one rank.

    Args:
        key, value: ``[s, b, hk, d]``, of ``rank``; value None for keys alone.
        index: an object with the layout and ``columns``, int32 ``[b, h, C]`` in any order.

    Returns:
        ``[2, b, h, C, d]`` (``[1, b, h, C, d]`` of keys alone) in the key's dtype, contiguous, in the order
        of ``index.columns``; 0 for columns of other ranks. The sum over ranks is exact and has all columns.
    """
    length, heads = key.shape[0], index.columns.shape[1]
    row, owned = _own_columns(index, rank, length)
    row = row.clamp(max=length - 1)[..., None].expand(-1, -1, -1, key.shape[3])
    gathered = [
        t.permute(1, 2, 0, 3).repeat_interleave(heads // t.shape[2], 1).gather(2, row)
        for t in (key, value)
        if t is not None
    ]
    return torch.stack(gathered).masked_fill_(~owned[..., None], 0)


def pack_kv(key: Tensor, value: Tensor, out: Tensor) -> None:
    """Copy keys and values, ``[s, b, hk, d]`` each, side by side into ``out``, ``[2, s, b, hk, d]`` and
    contiguous, as they travel between ranks."""
    out[0].copy_(key)
    out[1].copy_(value)


def _own_columns(
    index: PatternOperand | StripedColumns, rank: int, length: int
) -> tuple[Tensor, Tensor]:
    """The row of each column in this rank's part (``length`` for columns of other ranks), and whether the
    rank has it."""
    owner, row = located(index.columns.long(), index.world, index.block_size, index.inner)
    owned = (owner == rank) & (index.columns < index.seq_length)
    return torch.where(owned, row, length), owned


def _heads_first(tensor: Tensor, heads: int) -> Tensor:
    """``[s, b, h', d]`` -> ``[b, heads, s, d]`` in at least float32, KV heads repeated for their group."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    tensor = tensor.permute(1, 2, 0, 3).to(dtype)
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _keys_and_columns(query: Tensor, keys: RoundKeys) -> Sequence[Tensor]:
    """The round's keys and values, the columns after them if there are any: ``[b, h, keys, d]`` each."""
    k, v = (_heads_first(t.flatten(0, 1), query.shape[2]) for t in (keys.key, keys.value))
    if keys.column_kv is None:
        return k, v
    return [torch.cat((t, columns.to(t.dtype)), 2) for t, columns in zip((k, v), keys.column_kv)]


def _scores(query: Tensor, key: Tensor, mask: Tensor, softmax_scale: float) -> Tensor:
    """Scaled scores ``[b, h, queries, keys]``, -inf where the mask is False."""
    scores = query @ key.transpose(-1, -2)
    return scores.mul_(softmax_scale).masked_fill_(~mask, float("-inf"))


def _round_scores(
    query: Tensor,
    key: Tensor,
    keys: RoundKeys,
    index: PatternOperand,
    queries: range,
    softmax_scale: float,
) -> Tensor:
    """Scores of some queries with the keys and columns of a round (:func:`_keys_and_columns`)."""
    heads, round_ = query.shape[1], keys.round
    mask = slash_mask(index, round_.rank, round_.sources, queries, keys.key.shape[1])
    if keys.column_kv is not None:
        column_round = torch.arange(heads, device=query.device) * round_.outer // heads
        attends = (column_round == round_.round_index)[:, None, None]
        mask = torch.cat((mask, column_mask(index, round_.rank, queries) & attends), -1)
    return _scores(query, key, mask, softmax_scale)


def _forward_rows(
    scores: Tensor, v: Tensor, last: bool, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Out ``[b, h, rows, d]`` and lse ``[b, h, rows]`` of some queries; ``before``: their accumulator
    ``[rows, b, h, d]`` and lse of the rounds before."""
    new_lse = torch.logsumexp(scores, -1)
    if before is not None:
        accumulator, lse = (
            before[0].permute(1, 2, 0, 3).to(scores.dtype),
            before[1].to(scores.dtype),
        )
        new_lse = torch.logaddexp(lse, new_lse)
    # A score of +inf makes all of its row NaN, as in a softmax, also in the backward.
    new_lse = new_lse.masked_fill(new_lse == float("inf"), float("nan"))
    finite = new_lse
    if not last:
        # A row with no score above -inf so far is 0. If that stays so to the last round it is NaN.
        finite = new_lse.masked_fill(new_lse == float("-inf"), 0)
    out = torch.exp(scores - finite[..., None]) @ v
    if before is not None:
        out = out + accumulator * torch.exp(lse - finite)[..., None]
    return out, new_lse


def _mark_blocks(
    scores: Tensor,
    lse: Tensor | None,
    index: PatternOperand,
    round_: Round,
    rows: range,
    key_length: int,
    block_marks: BlockMarks,
) -> None:
    """Mark the blocks of a round, by their shares in the attention of some queries to what comes first.

    Args:
        scores: of the round's keys and columns (:func:`_round_scores`).
        lse: of the rounds before; None in the first.
    """
    block, device, sources = index.block_size, scores.device, round_.sources
    num_blocks, local = index.member.shape[-1], torch.arange(index.local_blocks, device=device)
    marks = block_marks.marks((*scores.shape[:2], index.local_blocks, num_blocks))
    of_keys = scores[..., : len(sources) * key_length].unflatten(-1, (len(sources), key_length))
    padding = index.local_blocks * block - key_length
    of_keys = torch.nn.functional.pad(of_keys, (0, padding), value=float("-inf"))
    # By key block, as k_block has their numbers.
    of_blocks = of_keys.unflatten(-1, (-1, block)).logsumexp(-1).flatten(-2)
    k_block = torch.cat([block_at(local, r, index.world, index.inner) for r in sources])
    # All that comes before the blocks but the query block itself, whose mark needs no share.
    earlier = scores[..., len(sources) * key_length :].logsumexp(-1, keepdim=True)
    if lse is not None:
        earlier = torch.logaddexp(earlier, lse[..., None].to(earlier.dtype))
    listed = index.block_mask(round_.rank)
    bounds = None
    if index.visible is not None:
        visible = index.visible.on(round_.rank, index.world, index.inner, block)
        bounds = visible.kv_block_bounds
    for local_block in range(rows.start // block, (rows.stop - 1) // block + 1):
        begin = max(local_block * block - rows.start, 0)
        part = slice(begin, (local_block + 1) * block - rows.start)
        q_block = block_at(local_block, round_.rank, index.world, index.inner)
        for batch in range(len(marks)):
            first_block = first_unmasked = 0
            if bounds is not None:
                first_block, first_unmasked = bounds[batch, :, local_block].tolist()
            order = block_order(k_block, q_block, first_block, first_unmasked)
            number, mass = k_block[order], of_blocks[batch, :, part][..., order]
            so_far = torch.logaddexp(mass.logcumsumexp(-1), earlier[batch, :, part])
            shares = torch.exp(mass - so_far)  # [h, rows, blocks]
            # A share that is not a number counts as large.
            mark = (~(shares < block_marks.least_share[batch])).any(1)
            mark[:, q_block - number <= 1] = True
            mark &= listed[batch, :, local_block, number] & (number >= first_block)
            marks[batch, :, local_block, number] |= mark.to(torch.uint8)


def block_order(k_block: Tensor, q_block: int, first_block: int, first_unmasked: int) -> Tensor:
    """The order in which the forward comes to the key blocks of a round, as indices.

    The query block itself; with visible ranges, blocks that need a mask, the nearest first; the first block
    that the query block may attend to; all others, the nearest first.

    Args:
        k_block: key blocks, numbers of the sequence.
        first_block, first_unmasked: ``LocalRanges.kv_block_bounds``; 0 without visible ranges.
    """
    distance = q_block - k_block
    group = torch.full_like(k_block, 3)
    group[k_block == first_block] = 2
    group[k_block < first_unmasked] = 1
    group[distance == 0] = 0
    return (group * (1 << 20) + distance).argsort()


def _score_gradients(
    scores: Tensor, v: Tensor, grad_out: Tensor, inputs: BackwardInputs
) -> tuple[Tensor, Tensor]:
    """Probabilities p, and the gradients ds of the scaled scores; ``grad_out`` ``[b, h, s, d]``."""
    p = torch.exp(scores - inputs.lse[..., None].to(scores.dtype))
    return p, p * (grad_out @ v.transpose(-1, -2) - inputs.delta[..., None].to(p.dtype))
