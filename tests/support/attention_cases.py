# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the attention tests share: a dense float64 reference, random patterns, a ring in one process."""

from __future__ import annotations

import math

import torch

from megatron_mtraining.kernels import attention as kernels
from megatron_mtraining.kernels.types import BackwardPath
from megatron_mtraining.layout import block_at, stripe, unstripe
from megatron_mtraining.pattern import build_block_index, build_index
from megatron_mtraining.ring import RingStep, Round

SEQUENCES = [
    (64, 1, 1), (37, 1, 1), (320, 1, 1), (300, 1, 1),
    (384, 2, 2), (512, 2, 1), (576, 3, 3), (512, 4, 2), (384, 6, 2), (768, 6, 3),
]  # fmt: skip
"""(seq_length, world, inner) of the references, in blocks of 64: odd block counts, a partial last block (one
rank only), sizes of no power of 2; all ranks in one round, one a round, and several of both; one block a
rank."""

INTERPRETED_SEQUENCES = [
    (192, 1, 1, 64), (150, 1, 1, 64), (200, 1, 1, 128), (256, 2, 1, 64), (256, 4, 2, 64),
    (256, 2, 2, 128),
]  # fmt: skip
"""(seq_length, world, inner, block) of the kernels in Triton's interpreter, which takes seconds for each."""

COMPILED_SEQUENCES = [
    (1152, 1, 1, (1, 1), 128),
    (1000, 1, 1, (7, 1), 128),
    (1000, 1, 1, (4, 2), 64),
    (1536, 2, 2, (8, 1), 128),
    (1152, 3, 1, (4, 2), 128),
    (2048, 4, 2, (4, 2), 128),
    (768, 4, 4, (2, 2), 64),
    (256, 2, 2, (2, 1), 128),  # one block a rank
]
"""(seq_length, world, inner, heads, block) of the compiled kernels. Heads go with the sequence: compiling the
kernels for their number takes most of the time."""

PORTABLE_DIMS = [96, 256]
"""Other head dimensions of the portable kernels: padded to a power of two, and with tiles of their own."""

PORTABLE_SEQUENCES = [(200, 1, 1, 128), (256, 2, 1, 64)]
"""(seq_length, world, inner, block) for these: the last block not full, and two ranks in two rounds."""

BACKWARD_PATHS = {
    "two_kernels": None,
    "one_pass": (0, False),
    "one_pass_chunks": (3, False),
    "one_pass_one_launch": (3, True),
}
"""Ways of the backward, for the fixture ``backward_path``; of one pass ``backward_key.CHUNK`` and
``ONE_LAUNCH``."""

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}
"""Relative errors of the compiled kernels: a gradient's operands are rounded to the 16 bits of the inputs."""


def has_backward_path(
    backward_path="two_kernels", block=128, dtype=torch.bfloat16, portable=False, dim=128, **_
):
    """Whether the kernels that take these operands on a Hopper GPU have this way of the backward. Of float32
    with tiles of 256 the compiler unrolls the products, for minutes: these are interpreted only."""
    if dim > 128 and dtype == torch.float32:
        return False
    on_hopper = block == 128 and dtype != torch.float32 and not portable and dim <= 128
    return on_hopper or backward_path == "two_kernels"


def random_operands(seq_length, batch, heads, kv_heads, dim, dtype, device):
    """query, key, value and a gradient of out; the value as Megatron gives it, a strided view."""

    def draw(h):
        return torch.randn(seq_length, batch, h, dim, device=device).to(dtype)

    query = draw(heads)
    both = torch.randn(seq_length, batch, kv_heads, 2 * dim, device=device).to(dtype)
    return query, draw(kv_heads), both[..., dim:], draw(heads)


def random_index(seq_length, batch, heads, block_size, world, budget, device, inner=None):
    """A random pattern: ``budget`` is "none" (distance 0 alone), "columns", "few" or "all"."""
    num_blocks = math.ceil(seq_length / block_size)
    distances = torch.zeros(batch, heads, num_blocks, dtype=torch.bool)
    count = 0
    if budget == "all":
        distances[:] = True
    elif budget == "few":
        distances = torch.rand(batch, heads, num_blocks) < 0.3
    if budget in ("few", "columns"):
        count = max(1, seq_length // 7)
    columns = torch.stack([torch.randperm(seq_length)[:count] for _ in range(batch * heads)])
    columns = columns.view(batch, heads, count)
    if count > 2:
        columns[..., -2:] = seq_length  # heads may have fewer columns than the budget
    return build_index(
        distances.to(device), columns.to(device), seq_length, block_size, world, inner
    )


def block_lists_of(
    blocks, distances, columns, seq_length, block_size, world, inner=None, **options
):
    """Each rank's block-list index, of bool blocks ``[b, h, NB, NB]`` in the order of the sequence."""
    nb = blocks.shape[-1] // world
    indices = []
    for rank in range(world):
        own = block_at(torch.arange(nb), rank, world, inner).to(blocks.device)
        sets = blocks[:, :, own], distances, columns, seq_length, block_size
        indices.append(build_block_index(*sets, world, inner, rank, **options))
    return indices


def written_out_mask(index, batch, heads):
    """bool ``[b, h, N, N]``."""
    rows = [torch.stack([index.token_mask(b, h) for h in range(heads)]) for b in range(batch)]
    return torch.stack(rows)


def dense_attention(query, key, value, grad_out, mask, scale, offset=None):
    """out and the gradients of query, key, value, and softmax offset ``[h]`` if there is one, in float64,
    under a bool mask ``[b, h, N, N]``."""
    given = (query, key, value) if offset is None else (query, key, value, offset)
    leaves = [t.detach().double().requires_grad_() for t in given]
    group = query.shape[2] // key.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3) for t in leaves[:3])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    if offset is not None:
        column = leaves[3][:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    out = (scores.softmax(-1)[..., : k.shape[2]] @ v).permute(2, 0, 1, 3)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())


def gathered(keys, values, this):
    """Keys and values of a round's ranks, ``[I, s, b, hk, d]``, as a ring hands them to the kernels."""
    if this.world == 1:
        return keys[0][None], values[0][None]
    both = [torch.stack((keys[rank], values[rank])) for rank in this.sources]
    return torch.stack(both).unbind(1)


def simulated_ring(query, key, value, grad_out, index, scale, parts_of_heads=1, attended=None):
    """Forward and backward of all ranks of a ring, one after the other, in this process.

    ``index`` is that of all ranks, or a list with each rank's own. ``attended``: a list, to which each rank's
    share of attention that the gradient of queries has seen is added.

    Returns out and the gradients over the whole sequence, as a ring over processes would give them.
    """
    indices = index if isinstance(index, list) else [index] * index.world
    index = indices[0]
    world, block = index.world, index.block_size
    parts = []
    for tensor in (query, key, value, grad_out):
        if world == 1:
            parts.append([tensor])
        else:
            parts.append([stripe(tensor, r, world, block, inner=index.inner) for r in range(world)])
    q, k, v, do = parts
    columns = column_gradients = None
    if index.columns.shape[-1]:
        columns = sum(kernels.gather_columns(k[r], v[r], index, r) for r in range(world))
        column_gradients = []
    outs, dqs, dkvs, inputs = [], [], [None] * world, []
    for rank, index in enumerate(indices):
        length, batch, heads, _ = q[rank].shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        lse = torch.full((batch, heads, length), float("nan"), dtype=dtype, device=query.device)
        out = dq = None
        rounds = [Round(rank, o, index.inner, index.outer) for o in range(index.outer)]
        for this in rounds:
            keys = kernels.RoundKeys(*gathered(k, v, this), columns, this)
            out = kernels.forward(kernels.ForwardInputs(q[rank], keys, index, scale, lse, out))
        delta = kernels.delta(out, do[rank])
        seen = None
        if attended is not None:
            seen = torch.full_like(lse, float("nan"), dtype=torch.float32)
            attended.append(seen)
        sums = None
        own = index, q[rank], k[rank], v[rank], do[rank]
        path = kernels.choose_backward(*own, attended=seen)
        if path is BackwardPath.ONE_PASS:
            sums = kernels.new_query_sums(q[rank], k[rank], v[rank], index)
        given = kernels.BackwardInputs(q[rank], do[rank], lse, delta, index, scale, seen, sums)
        for this in [] if sums is not None else rounds:
            carry, dq = dq, None
            keys = kernels.RoundKeys(*gathered(k, v, this), columns, this)
            for part in range(parts_of_heads):
                dq = kernels.backward_query(
                    given, keys, accumulator=carry, grad_query=dq, head_part=(part, parts_of_heads)
                )
        for source in range(world):
            if source != rank:
                step = RingStep(rank, source, index.inner, index.outer)
                keys = kernels.StepKeys(k[source], v[source], step)
                dkvs[source] = kernels.backward_key(given, keys, accumulator=dkvs[source])
        if columns is not None:
            column_gradients.append(kernels.backward_columns(given, columns, rank))
        outs.append(out)
        dqs.append(dq)
        inputs.append(given)
    if columns is not None:
        parts = sum(column_gradients)
        column_gradients = parts.sum(3, keepdim=True) if world > 1 else parts
    for rank, given in enumerate(inputs):
        step = RingStep(rank, rank, index.inner, index.outer)
        dkvs[rank] = kernels.backward_key(
            given,
            kernels.StepKeys(k[rank], v[rank], step),
            accumulator=dkvs[rank],
            column_gradients=column_gradients,
            dtype=key.dtype,
        )
        if given.query_sums is not None:
            dqs[rank] = kernels.finish_query_sums(given, k[rank], v[rank])
    if world == 1:
        return outs[0], dqs[0], dkvs[0][0], dkvs[0][1]
    dk, dv = ([d[i] for d in dkvs] for i in range(2))
    return tuple(unstripe(t, block, inner=index.inner) for t in (outs, dqs, dk, dv))


def relative_error(actual, expected):
    """Norm of the difference over the norm expected; NaN anywhere never passes a comparison."""
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


RESULTS = ("out", "grad_query", "grad_key", "grad_value")


def assert_results(actual, expected, tolerance):
    """Out and gradients have the shapes of the expected ones, and relative errors below the tolerance."""
    for name, a, e in zip(RESULTS, actual, expected):
        assert a.shape == e.shape
        error = relative_error(a, e)
        assert error < tolerance, f"{name}: relative error {error:.2e}"
