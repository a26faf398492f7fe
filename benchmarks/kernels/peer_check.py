# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Output and gradients of a peer against dense attention under the mask that the peer was given."""

from __future__ import annotations

import torch
from torch import Tensor

from .peer_calls import BLOCK, Call, Problem, own_heads

TENSORS = ("out", "dq", "dk", "dv")
TOO_FAR = 0.02  # relative; bfloat16 is within 0.01 here


def mask(problem: Problem, call: Call) -> Tensor:
    """bool ``[h, s, s]``: the pattern under the causal mask, with whole blocks on the diagonal if the call
    has more pairs than that; all causal pairs of a dense call."""
    seq, device = problem.case.seq, problem.operands[0].device
    position = torch.arange(seq, device=device)
    causal = position[:, None] >= position
    if call.block is None:
        return causal.expand(problem.case.heads, seq, seq)
    block = position // BLOCK
    apart = block[:, None] - block
    kept = problem.distances[:, apart.clamp(min=0)]
    return kept & (apart >= 0) if call.pairs > problem.pairs else kept & causal


def reference(problem: Problem, allowed: Tensor) -> list[Tensor]:
    """out and the gradients of query, key and value in float32, ``[s, h, d]``."""
    *inputs, grad_out = (t[:, 0].float().transpose(0, 1) for t in problem.operands)
    query, key, value = (t.contiguous().requires_grad_() for t in inputs)
    group = len(query) // len(key)
    keys, values = (t.repeat_interleave(group, 0) for t in (key, value))
    scores = (query @ keys.transpose(-1, -2)) * problem.case.dim**-0.5
    out = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ values
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    return [t.detach().transpose(0, 1) for t in (out, *grads)]


def errors(problem: Problem, call: Call) -> dict[str, float]:
    """Relative errors by tensor; none of a call whose pattern is its own."""
    if call.layout not in ("sbhd", "bshd", "bhsd"):
        return {}
    expected = reference(problem, mask(problem, call))
    found = [call.forward(), *(call.backward() if call.backward is not None else ())]
    if isinstance(found[0], tuple):
        found[0] = found[0][0]
    return {
        name: float((own_heads(actual, call.layout, right.shape[1]) - right).norm() / right.norm())
        for name, actual, right in zip(TENSORS, found, expected)
    }


def too_far(found: dict[str, float]) -> bool:
    return any(not error <= TOO_FAR for error in found.values())  # NaN is too far
