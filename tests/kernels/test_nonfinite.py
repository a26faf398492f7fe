# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""NaN and infinities in the inputs appear in the results where attention over the attended pairs has them.

The expected result takes, for each query, the softmax over the keys that it attends to and no others, in
float64, with autograd's gradients. The tests check two properties:

- Nothing is hidden: where the expected result is not finite, the result is not finite. A loss must show it.
- It does not spread: attention computed in tiles multiplies a masked pair's probability, 0, with what
  the tile holds, and 0 x NaN is NaN (as in cuDNN and FlashAttention within a tile). So the other tokens of a
  block pair that is computed may be touched. A head's columns share tiles, so a bad column may touch
  any query of the head, and a bad query's tile any column. Nothing else may be touched: no query block that
  attends to nothing bad, no other head, no dv of a bad value.

The reference implementations write out dense scores, where 0 x NaN reaches every query: they must satisfy the
first property, and keep KV heads apart.
"""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.pattern import build_index
from tests.support.attention_cases import (
    BACKWARD_PATHS,
    RESULTS,
    block_lists_of,
    has_backward_path,
    random_operands,
    relative_error,
    simulated_ring,
    written_out_mask,
)
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("fresh_inputs")

OPERANDS = ("query", "key", "value")
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 64, 0.1
# Token 0 is what a tile with fewer columns than it has room for may load in their stead.
TOKENS = {"first": 0, "inner": 70, "last": -1}
PLACES = {
    "query": ["inner"],
    "key": ["first", "inner", "column"],
    "value": ["first", "inner", "column", "last"],
}
PLACE = {"where": OPERANDS, "token": ["first", "inner", "column", "last"]}
BAD = [float("nan"), float("inf"), float("-inf")]
SMALL = [(192, 1, 64), (128, 2, 64)]  # seq_length, world, block
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def columns_of(seq_length, block):
    return [3, block - 1, block + 8, seq_length - block + 1]


def some_index(seq_length, block, world, device):
    """Few distances, so that most pairs of blocks are not computed, and few columns."""
    distances = torch.zeros(1, HEADS, seq_length // block, dtype=torch.bool)
    distances[:, 1:3, 1] = True  # the heads of a group differ
    columns = torch.tensor([*columns_of(seq_length, block), seq_length]).expand(1, HEADS, -1)
    return build_index(
        distances.to(device), columns.contiguous().to(device), seq_length, block, world
    )


def as_lists(index):
    """The same pattern as each rank's block lists."""
    at = torch.arange(index.member.shape[-1], device=index.member.device)
    blocks = index.distances()[:, :, (at[:, None] - at).clamp(min=0)]
    sets = blocks, index.distances(), index.columns, index.seq_length, index.block_size
    return block_lists_of(*sets, index.world, index.inner)


def expected_results(query, key, value, grad_out, mask):
    """out and the gradients, float64: each query has its own copy of the keys and values, zeros where it
    does not attend, and masked pairs are cut out on both sides of the softmax: what they hold reaches
    nothing, forward or backward."""
    leaves = [t.detach().double().requires_grad_() for t in (query, key, value)]
    outs, gradients = [], [torch.zeros_like(t) for t in leaves]
    for head in range(HEADS):
        q, k, v = leaves[0][:, 0, head], *(t[:, 0, head * KV_HEADS // HEADS] for t in leaves[1:])
        kept = mask[0, head]
        keys, values = (torch.where(kept[..., None], t, 0.0) for t in (k, v))
        scores = (q[:, None] * keys).sum(-1) * SCALE
        p = scores.masked_fill(~kept, float("-inf")).softmax(-1).masked_fill(~kept, 0.0)
        out = (p[..., None] * values).sum(1)
        # Head by head: a head's copies of the keys take gigabytes.
        for total, part in zip(
            gradients, torch.autograd.grad(out, leaves, grad_out[:, 0, head].double())
        ):
            total += part
        outs.append(out.detach())
    return torch.stack(outs, 1)[:, None], *gradients


def reach(where, token, mask, block):
    """Where tiles may carry what is bad at head 0: for each result a bool ``[s, heads or KV heads]``."""
    length, group = mask.shape[-1], HEADS // KV_HEADS
    sees = mask[0].unflatten(1, (-1, block)).any(2)  # [h, query block, key]
    rows, keys = torch.zeros(2, length, HEADS, dtype=torch.bool).unbind()
    for head in range(1 if where == "query" else group):
        if where == "query":
            rows[token, head] = True
        else:
            rows[:, head] = sees[head, :, token].repeat_interleave(block)
            rows[:, head] |= token in columns_of(length, block)
        touched = rows[:, head].unflatten(0, (-1, block)).any(1)
        keys[:, head] = (sees[head] & touched[:, None]).any(0)
        keys[columns_of(length, block), head] = True
    keys = keys.unflatten(1, (KV_HEADS, group)).any(2)
    return rows, rows, keys, keys & (where != "value")


def reach_of_reference(mask):
    """The whole of the first KV head's group."""
    rows, keys = (torch.zeros(mask.shape[-1], h, dtype=torch.bool) for h in (HEADS, KV_HEADS))
    rows[:, : HEADS // KV_HEADS] = True
    keys[:, 0] = True
    return rows, rows, keys, keys


def is_place(where, token, **_):
    return token in PLACES[where]


def check(
    seq_length, world, block, where, token, bad, dtype=torch.float32, device="cpu", tiles=True, lists=False,
):  # fmt: skip
    token = columns_of(seq_length, block)[2] if token == "column" else TOKENS[token] % seq_length
    operands = random_operands(seq_length, 1, HEADS, KV_HEADS, DIM, dtype, device)
    operands[OPERANDS.index(where)][token, 0, 0, 5] = bad
    index = some_index(seq_length, block, world, device)
    mask = written_out_mask(index, 1, HEADS)
    expected = [t.cpu() for t in expected_results(*operands, mask)]
    index = as_lists(index) if lists else index
    actual = [t.cpu() for t in simulated_ring(*operands, index, SCALE)]
    allowed = reach(where, token, mask.cpu(), block) if tiles else reach_of_reference(mask)
    for name, a, e, may in zip(RESULTS, actual, expected, allowed):
        assert not (~e[:, 0].isfinite().all(-1) & ~may).any(), f"the test's own reach, {name}"
        hidden = a.isfinite() & ~e.isfinite()
        assert not hidden.any(), (
            f"{name} hides what is not finite at {hidden.nonzero()[:4].tolist()}"
        )
        clean = a[:, 0].isfinite().all(-1)
        spread = ~clean & ~may
        assert not spread.any(), f"{name} is not finite at {spread.nonzero()[:4].tolist()}"
        error = relative_error(a[:, 0][clean], e[:, 0][clean])
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e} where it is finite"


@pairwise({"seq_length, world, block": SMALL, **PLACE, "bad": BAD}, is_place)
def test_reference(seq_length, world, block, where, token, bad):
    check(seq_length, world, block, where, token, bad, tiles=False)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter
@pairwise(
    {
        "seq_length, world, block, lists": [(192, 1, 64, True), (128, 2, 64, False)],
        **PLACE,
        "bad": BAD[:2],  # -inf makes scores of either sign, as inf does
    },
    is_place,
)
def test_kernels_interpreted(interpreter, seq_length, world, block, lists, where, token, bad):
    check(seq_length, world, block, where, token, bad, lists=lists)


@pytest.mark.gpu
@pytest.mark.usefixtures("backward_path")
@pairwise(
    {
        "seq_length, world, block": [(320, 1, 64), (512, 1, 128), (512, 2, 64), (512, 2, 128)],
        **PLACE,
        "bad": BAD,
        "lists": [False, True],
        "dtype": TOLERANCE,
        "backward_path": BACKWARD_PATHS,
    },
    lambda **case: is_place(**case) and has_backward_path(**case),
    indirect=["backward_path"],
)
def test_kernels_compiled(seq_length, world, block, where, token, bad, lists, dtype):
    check(seq_length, world, block, where, token, bad, dtype, "cuda", lists=lists)


def check_late_maximum(seq_length, world, block, dtype, device):
    """A row's first tile has scores of -inf only, and a later tile, or rank, finite ones."""
    query, key, value, grad_out = random_operands(
        seq_length, 1, HEADS, KV_HEADS, DIM, dtype, device
    )
    index = some_index(seq_length, block, world, device)
    mask = written_out_mask(index, 1, HEADS)
    token = seq_length // block // 2 * block  # the first of a block sees itself alone there
    query[..., 0] = query[..., 0].abs() + 0.1
    key[token, :, :, 0] = float("-inf")
    out = simulated_ring(query, key, value, grad_out, index, SCALE)[0]
    expected = expected_results(query, key, value, grad_out, mask)[0]
    assert mask[0, 0, token].sum() > 1 and expected.isfinite().all()
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("seq_length, world, block", SMALL)
def test_reference_late_maximum(seq_length, world, block):
    check_late_maximum(seq_length, world, block, torch.float32, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("seq_length, world, block", SMALL)
def test_kernels_interpreted_late_maximum(interpreter, seq_length, world, block):
    check_late_maximum(seq_length, world, block, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "seq_length, world, block", [(320, 1, 64), (512, 1, 128), (512, 2, 128), (768, 3, 128)]
)
def test_kernels_compiled_late_maximum(seq_length, world, block, dtype):
    check_late_maximum(seq_length, world, block, dtype, "cuda")
