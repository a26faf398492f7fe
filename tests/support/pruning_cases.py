# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the tests of the pruned backward share: operands, the definition written out, rings of real ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_mtraining.cp_group import cp_group_of
from megatron_mtraining.kernels import attention as kernels
from megatron_mtraining.layout import block_at, stripe
from megatron_mtraining.pattern import build_index
from megatron_mtraining.ring import Ring, Round
from megatron_mtraining.ring.attention import ring_attention
from megatron_mtraining.ring.pruning import BackwardPruning, least_share, packed_shape
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import block_lists_of, random_operands, written_out_mask

BLOCK, SCALE, THRESHOLD, HIGH_THRESHOLD = 64, 0.5, 1.5, 4.0
INNER = {1: [None], 2: [None, 1], 4: [None, 1, 2], 6: [2]}
"""Inner groups to test, by the number of ranks."""


@dataclass
class Expected:
    """What the pruned backward gives, from attention written out over the whole sequence."""

    kept: torch.Tensor  # bool [b, h, NB, NB]: blocks that stay
    close: torch.Tensor  # bool [b, h, NB, NB]: too near the threshold to compare
    dropped: torch.Tensor  # [b, h, N]
    density: torch.Tensor  # [b, h], without documents
    results: list[torch.Tensor]


def order_of(index, batch, q_block, head, heads):
    """What a query block of a head comes to, one after the other: key blocks, and -1 for the columns.

    Round ``o`` has the blocks at distances of ``o`` modulo the number of rounds, and the columns of some
    heads. In a round: the query block itself; the columns; with documents, blocks that need a mask of them;
    the first block with a visible token; all others. The nearest come first.
    """
    block, outer = index.block_size, index.outer
    first = unmasked = 0
    if index.visible is not None:
        starts = index.visible.start[batch, q_block * block : (q_block + 1) * block]
        first, unmasked = int(starts.min()) // block, -(-int(starts.max()) // block)
    order = []
    for round_ in range(outer):
        mine = range(q_block - round_, first - 1, -outer)
        own = [j for j in mine if j == q_block]
        columns = [-1] if head * outer // heads == round_ else []
        masked = [j for j in mine if j < unmasked and j != q_block]
        rest = [j for j in mine if j >= unmasked and j != q_block]
        order += own + columns + masked + [j for j in rest if j == first]
        order += [j for j in rest if j != first]
    return order


def shares_so_far(scores, index):
    """The share of each key block in a row's attention to what comes no later than the block: ``[b, h, N,
    NB]``, 0 for blocks that are not in the pattern.

    Args:
        scores: scaled, -inf where the pattern has nothing, ``[b, h, N, N]``.
    """
    batch, heads, length, _ = scores.shape
    block, blocks = index.block_size, index.member.shape[-1]
    number = torch.arange(length) // block
    shares = torch.zeros(batch, heads, length, blocks, dtype=scores.dtype)
    slashes = index.distances()
    for b, h, q_block in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks))).tolist():
        rows = scores[b, h, q_block * block : (q_block + 1) * block]
        rows = (rows - rows.amax(-1, keepdim=True)).exp()
        listed = slashes[b, h, (q_block - number).clamp(min=0)] & (number <= q_block)
        total = torch.zeros(len(rows), dtype=scores.dtype)
        for j in order_of(index, b, q_block, h, heads):
            if j < 0:
                total += (rows * ~listed).sum(-1)
            elif slashes[b, h, q_block - j]:
                mass = rows[:, number == j].sum(-1)
                total += mass
                shares[b, h, q_block * block : (q_block + 1) * block, j] = mass / total
    return shares


def expected(operands, index, threshold, margin=1e-4):
    """The definition: probabilities of the whole pattern, and gradients of the kept ones alone. ``close``:
    shares that differ from the threshold by no more than ``margin`` of it."""
    block = index.block_size
    query, key, value, grad_out = (t.detach().double() for t in operands)
    length, batch, heads, _ = query.shape
    group = heads // key.shape[2]
    mask = written_out_mask(index, batch, heads)
    q, k, v, do = (t.permute(1, 2, 0, 3) for t in (query, key, value, grad_out))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * SCALE).masked_fill(~mask, float("-inf"))
    p = scores.softmax(-1)
    out = p @ v
    blocks = -(-length // block)
    number = torch.arange(length) // block
    one_hot = (number[:, None] == torch.arange(blocks)).double()
    # A column is attended to in its block only where a slash covers that block.
    distances = index.distances()[:, :, (number[:, None] - number).clamp(min=0)] & mask
    shares = shares_so_far(scores, index)
    least = least_share(index, threshold).double()[:, None, None, None]
    most = torch.stack([shares[:, :, number == i].amax(2) for i in range(blocks)], 2)
    apart = torch.arange(blocks)[:, None] - torch.arange(blocks)
    listed = torch.stack([distances[:, :, number == i].any(2) for i in range(blocks)], 2).double()
    listed = (listed @ one_hot) > 0  # [b, h, NB, NB]
    kept = ((most >= least) | (apart <= 1)) & listed
    of_tokens = kept[:, :, number][..., number]
    dropped = (p * (distances & ~of_tokens)).sum(-1)
    pruned = p * (~distances | of_tokens)
    ds = pruned * (do @ v.mT - (out * do).sum(-1, keepdim=True)) * SCALE

    def of_groups(grad):
        return grad.unflatten(1, (-1, group)).sum(2).permute(2, 0, 1, 3)

    results = [out.permute(2, 0, 1, 3), (ds @ k).permute(2, 0, 1, 3)]
    results += [of_groups(ds.mT @ q), of_groups(pruned.mT @ do)]
    causal = length * (length + 1) / 2
    density = ((pruned > 0).sum((-1, -2)) / causal).float()
    close = (most - least).abs() < margin * least
    return Expected(kept, close & (apart > 1), dropped, density, results)


def peaked(seq_length, batch, heads, dim, dtype, device="cpu", block=BLOCK):
    """Operands whose attention is uneven: every second block of keys holds little."""
    query, key, *rest = random_operands(seq_length, batch, *heads, dim, dtype, device)
    faint = torch.arange(seq_length, device=device) // block % 2 == 1
    return (query, torch.where(faint[:, None, None, None], 0.1 * key, key), *rest)


def mark_all_rounds(operands, index, threshold, indices=None, device="cpu"):
    """What the forward and the packing give over all ranks: marks, uint8, in the order of the sequence.
    ``indices``: each rank's own, of the same layout; ``index`` for all if None."""
    query, key, value, _ = (t.to(device) for t in operands)
    length, batch, heads, _ = query.shape
    world, blocks = index.world, index.member.shape[-1]

    def parts(tensor):
        if world == 1:
            return [tensor]
        block = index.block_size
        return [stripe(tensor, r, world, block, inner=index.inner) for r in range(world)]

    queries, keys, values = parts(query), parts(key), parts(value)
    columns = None
    if index.columns.shape[-1]:
        columns = sum(kernels.gather_columns(keys[r], values[r], index, r) for r in range(world))
    found = torch.zeros(batch, heads, blocks, blocks, dtype=torch.uint8)
    for rank in range(world):
        lse = torch.empty(batch, heads, length // world, dtype=torch.float64, device=device)
        lse = lse.to(torch.promote_types(query.dtype, torch.float32))
        index = index if indices is None else indices[rank]
        shape = batch, heads, index.local_blocks, blocks
        marks = kernels.new_marks(shape, least_share(index, threshold))
        out = None
        for number in range(index.outer):
            round_ = Round(rank, number, index.inner, index.outer)
            gathered = [torch.stack([each[r] for r in round_.sources]) for each in (keys, values)]
            of_round = kernels.RoundKeys(*gathered, columns, round_)
            out = kernels.forward(
                kernels.ForwardInputs(queries[rank], of_round, index, SCALE, lse, out, marks)
            )
        packed = kernels.pack_marks(marks.marks(shape))
        assert packed.shape == packed_shape(index)
        local = torch.arange(index.local_blocks)
        found[:, :, block_at(local, rank, world, index.inner)] = kernels.unpack_marks(
            packed, blocks
        ).cpu()
    return found


def moved(index):
    """The index on the GPU, built again."""
    found = build_index(
        index.distances().cuda(), index.columns.cuda(), index.seq_length, index.block_size,
        index.world, index.inner,
    )  # fmt: skip
    return with_documents(found, "cuda") if index.visible is not None else found


def on_device(index, device):
    """The index with all that it holds on a device."""
    tensors = {n: v.to(device) for n, v in vars(index).items() if isinstance(v, torch.Tensor)}
    found = replace(index, **tensors)
    return with_documents(found, device) if index.visible is not None else found


def over_ranks(index, world, inner):
    """The index for another number of ranks, which decides about rounds, and so about the order of keys."""
    pattern = index.distances(), index.columns, index.seq_length, index.block_size
    found = build_index(*pattern, world, inner)
    return with_documents(found) if index.visible is not None else found


def with_documents(index, device="cpu"):
    """The index for packed documents of a third and two thirds of the sequence, in a window of half of it."""
    batch = index.member.shape[0]
    starts = torch.zeros(batch, index.seq_length, dtype=torch.int32, device=device)
    cut = index.seq_length // 3
    starts[:, cut:] = cut
    return replace(index, visible=VisibleRanges(starts).windowed(index.seq_length // 2))


@dataclass
class PruningCase:
    """A pruned backward over ranks: the pattern by its distances and columns."""

    operands: tuple
    distances: torch.Tensor
    columns: torch.Tensor
    inner: int | None
    lists: bool
    threshold: float
    packed: bool = False


def run_pruned(rank, world, cases):
    """This rank's out and gradients, and what was reported, of each case."""
    results = []
    for case in cases:
        cp = cp_group_of(dist.group.WORLD if world > 1 else None, case.inner)
        seq_length = case.operands[0].shape[0]
        index = build_index(case.distances, case.columns, seq_length, BLOCK, world, cp.inner)
        if case.lists:
            index = as_lists(index)[rank]
        if case.packed:
            index = with_documents(index)
        parts = list(case.operands)
        if world > 1:
            parts = [stripe(t, rank, world, BLOCK, inner=cp.inner) for t in case.operands]
        leaves = [t.clone().requires_grad_() for t in parts[:3]]
        told: list = []
        pruning = BackwardPruning(case.threshold, lambda *both, told=told: told.append(both))
        out, *_ = ring_attention(*leaves, index, Ring(cp), SCALE, pruning=pruning)
        assert not told
        out.backward(parts[3])
        ((density, dropped),) = told
        results.append(([out.detach(), *(leaf.grad for leaf in leaves)], density, dropped))
    return results


def as_lists(index):
    """The same pattern as block lists, which have the distances as blocks."""
    blocks = torch.cat([index.block_mask(rank) for rank in range(index.world)], 2)
    order = torch.cat(
        [
            block_at(torch.arange(index.local_blocks), rank, index.world, index.inner)
            for rank in range(index.world)
        ]
    )
    blocks = blocks[:, :, order.argsort()]
    none = torch.zeros_like(index.distances())
    columns = index.columns[..., :0]
    return block_lists_of(
        blocks, none, columns, index.seq_length, index.block_size, index.world, index.inner
    )
