# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How each peer of :mod:`.peers` is called: the same numbers and the same blocks, in the peer's own form.

A peer that cannot run a case raises: :class:`Refusal` where the reason is known before the call, otherwise
the peer's own error. Imports are inside the functions, as most peers are not installed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from megatron_mtraining import __version__
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.ring import Ring
from megatron_mtraining.ring.attention import ring_attention

from ..lib import record
from ..lib.workloads import BLOCK, dense_with, draw_operands, fa4, heads_first, tokens_first
from .attention import DENSE, Case, flex_for, passes
from .peer_blocks import key_blocks, key_intervals, query_blocks

BLOCKS = (BLOCK, BLOCK)
MSA_BLOCKS = 32  # key blocks of a query, the most that flash-msa takes
ATOMIC = "backward with deterministic=False, the default"


class Refusal(Exception):
    """Why a peer does not run a case."""


class Problem(NamedTuple):
    """A case with its numbers."""

    case: Case
    index: Any
    operands: tuple[Tensor, ...]  # query, key, value, gradient of out, [s, 1, h, d]
    dense: tuple[Tensor, ...]  # the same at the length of dense attention
    pairs: int  # query-key pairs of all heads under pattern and causal mask

    @property
    def distances(self) -> Tensor:
        """bool ``[h, NB]``."""
        return self.index.distances()[0]

    @property
    def dense_pairs(self) -> int:
        seq = len(self.dense[0])
        return self.case.heads * seq * (seq + 1) // 2


class Call(NamedTuple):
    """A peer's forward, which gives out, and its backward, which gives gradients of query, key and value."""

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None
    pairs: int  # that its mask lets through, of all heads
    layout: str = "bshd"  # of out and gradients
    block: tuple[int, int] | None = BLOCKS  # query and key tokens of a block; None: dense
    note: str = ""


def draw(case: Case, index: Any, dense_seq: int, device: str) -> Problem:
    """A case's operands, for its own length and for that of dense attention."""
    operands = draw_operands(*case.shape, torch.bfloat16, device)
    dense = operands
    if dense_seq != case.seq:
        dense = draw_operands(dense_seq, *case.shape[1:], torch.bfloat16, device)
    return Problem(case, index, operands, dense, int(index.work().sum()))


def _tokens_first(operands) -> list[Tensor]:
    return [tokens_first(t) for t in operands]


def _heads_first(operands) -> list[Tensor]:
    return [heads_first(t) for t in operands]


def mtraining(problem: Problem, path: str = "two_kernels") -> Call:
    ring, scale = Ring(CPGroup(None)), problem.case.dim**-0.5

    def run(*tensors):
        return ring_attention(*tensors, problem.index, ring, scale)[0]

    forward, backward = passes(run, problem.operands)

    def backward_along_path():
        with mock.patch.dict(os.environ, MTRAINING_BACKWARD=path):
            return backward()

    return Call(forward, backward_along_path, problem.pairs, "sbhd")


def mtraining_one_pass(problem: Problem) -> Call:
    """:func:`mtraining` with the one-pass backward, which is not deterministic."""
    return mtraining(problem, "one_pass")


def cudnn_dense(problem: Problem) -> Call:
    run = dense_with(DENSE["cudnn"])
    return Call(*passes(run, _heads_first(problem.dense)), problem.dense_pairs, "bhsd", None)


def flex(problem: Problem) -> Call:
    run = flex_for(problem.index)
    return Call(*passes(run, _heads_first(problem.operands)), problem.pairs, "bhsd")


def cudnn_blocks(problem: Problem) -> Call:
    """Block-sparse attention of the cuDNN frontend. It has no causal mask: blocks on the diagonal are whole.
    Its backward takes no groups of heads, and builds its index by key blocks in each call."""
    api = import_module("cudnn").BSA
    case = problem.case
    query, key, value, grad_out = _heads_first(problem.operands)
    count, order = key_blocks(problem.distances)
    blocks = dict(q2k_block_nums=count, sparse_block_size=BLOCK, softmax_scale=case.dim**-0.5)

    def forward():
        return api.block_sparse_attention_forward(query, key, value, order, **blocks)["o_tensor"]

    found = api.block_sparse_attention_forward(query, key, value, order, **blocks)
    group = case.heads // case.kv_heads
    keys, values = (t.repeat_interleave(group, 1) for t in (key, value))

    def backward():
        grads = api.block_sparse_attention_backward(
            grad_out, query, keys, values, found["o_tensor"], found["lse_tensor"], order, **blocks
        )
        return grads["dq_tensor"], grads["dk_tensor"], grads["dv_tensor"]

    note = "no causal mask: whole blocks on the diagonal"
    if group > 1:
        note += f"; backward without groups: keys and values repeated to {case.heads} heads"
    return Call(forward, backward, int(count.sum()) * BLOCK**2, "bhsd", note=note)


def cudnn_flex(problem: Problem) -> Call:
    """Flex attention of the cuDNN frontend, whose mask is intervals of keys for each query."""
    api = import_module("cudnn.flex_attention")
    case = problem.case
    *inputs, grad_out = _tokens_first(problem.operands)
    intervals = key_intervals(problem.distances, case.seq, BLOCK)
    plan = api.create_mask_plan(intervals, *inputs, build_backward=True)

    def run(query, key, value):
        return api.flex_attn_func(query, key, value, mask_plan=plan, softmax_scale=case.dim**-0.5)

    tile = (128, 128) if case.dim > 96 else (192, 128)  # of its forward on Hopper
    return Call(*passes(run, (*inputs, grad_out)), problem.pairs, block=tile, note=ATOMIC)


@functools.cache
def _causal_in_cute():
    from cutlass import cute

    @cute.jit
    def causal(batch, head, query, key, seqlen, tensors):
        return query >= key

    return causal


def fa4_blocks(problem: Problem) -> Call:
    """FlashAttention-4 (CuTe DSL, on Hopper too) with lists of blocks by query and by key, made ahead."""
    cute = import_module("flash_attn.cute")
    sparse = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    distances = problem.distances
    count = torch.ones_like(distances, dtype=torch.int32)[None]
    diagonal = torch.arange(count.shape[-1], dtype=torch.int32, device=count.device)
    diagonal = diagonal.expand_as(count)[..., None].contiguous()
    forward, backward = (
        sparse(count, diagonal, *listed(distances, 1), block_size=BLOCKS)
        for listed in (key_blocks, query_blocks)
    )
    mask = _causal_in_cute()

    def run(query, key, value):
        return cute.flash_attn_func(
            query, key, value, softmax_scale=problem.case.dim**-0.5, mask_mod=mask,
            block_sparse_tensors=forward, block_sparse_tensors_bwd=backward,
        )[0]  # fmt: skip

    return Call(*passes(run, _tokens_first(problem.operands)), problem.pairs, note=ATOMIC)


def fa4_dense(problem: Problem) -> Call:
    calls = passes(fa4, _tokens_first(problem.dense))
    return Call(*calls, problem.dense_pairs, block=None, note=ATOMIC)


def msa_blocks(problem: Problem) -> int:
    """The fewest key blocks of a query, its own included, with which flash-msa attends to as many pairs."""
    blocks = torch.arange(1, problem.distances.shape[-1] + 1)
    wanted = problem.distances.cpu().cumsum(-1).sum() / problem.case.heads
    for most in range(1, MSA_BLOCKS + 1):
        if blocks.clamp(max=most).sum() >= wanted:
            return most
    raise Refusal(f"takes at most {MSA_BLOCKS} blocks of {BLOCK} keys for a query")


def flash_msa(problem: Problem) -> Call:
    """flash-msa with its own selection by proxy heads, one for each KV head: as many blocks as the pattern
    has, but other ones, for each query its own."""
    case, most = problem.case, msa_blocks(problem)
    attend = import_module("flash_msa").flash_msa_func
    query, key, value, grad_out = _heads_first(problem.operands)
    proxies = [torch.randn_like(key), torch.randn_like(key[:, :1])]
    grad_out = grad_out.transpose(1, 2).flatten(2).contiguous()

    def run(*tensors):
        return attend(*tensors, most * BLOCK, case.dim**-0.5)[0]

    rows = torch.arange(1, problem.distances.shape[-1] + 1)
    earlier = int((rows.clamp(max=most) - 1).sum())
    pairs = case.heads * (earlier * BLOCK**2 + len(rows) * BLOCK * (BLOCK + 1) // 2)
    calls = passes(run, (*proxies, query, key, value, grad_out))
    note = f"its own selection of {most} blocks, which is timed too; backward with the proxies' gradients"
    return Call(*calls, pairs, "own", (1, BLOCK), note)


class Peer(NamedTuple):
    """
    Attributes:
        build: its call for a case.
        packages: distributions that bring it, any of which will do; none: torch.
        dense: whether it attends to all pairs whatever the pattern.
    """

    build: Callable[[Problem], Call]
    packages: tuple[str, ...] = ()
    dense: bool = False

    def version(self) -> str:
        """Of the package that is installed, "none" if none is."""
        if self.build is mtraining:
            return __version__
        if self.build is cudnn_dense:
            return f"cuDNN {torch.backends.cudnn.version()}"
        if not self.packages:
            return f"torch {torch.__version__}"
        found = (f"{name} {record.installed(name)}" for name in self.packages)
        return next((name for name in found if not name.endswith(" none")), "none")


PEERS = {
    "mtraining": Peer(mtraining),
    "mtraining_one_pass": Peer(mtraining_one_pass),
    "cudnn": Peer(cudnn_dense, dense=True),
    "flex": Peer(flex),
    "cudnn_blocks": Peer(cudnn_blocks, ("nvidia-cudnn-frontend",)),
    "cudnn_flex": Peer(cudnn_flex, ("nvidia-cudnn-frontend",)),
    "fa4_blocks": Peer(fa4_blocks, ("flash-attn-4",)),
    "fa4": Peer(fa4_dense, ("flash-attn-4",), dense=True),
    "flash_msa": Peer(flash_msa, ("flash-msa",)),
}


def own_heads(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """out or a gradient of any layout as ``[s, h, d]`` in float32; repeated KV heads are added up.

    Args:
        layout: "sbhd", "bshd" or "bhsd".
        heads: that the result has.
    """
    dims = {"sbhd": (0, 2), "bshd": (1, 2), "bhsd": (2, 1)}[layout]
    batch = layout.index("b")
    found = tensor.detach().float().permute(batch, *dims, 3)[0]
    return found.unflatten(1, (heads, -1)).sum(2)
