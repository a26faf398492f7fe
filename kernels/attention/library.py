# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dense attention by the kernels of a library: where the pattern keeps everything, and one rank has all keys.

out, LSE and gradients are what the backends compute, so forward and backward choose independently. The rounds
of a ring of several ranks, block-striped, are no causal attention that a library knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from ...requirements import require
from ...switches import switch
from ..limits import LIBRARY_HEAD_DIM
from ..types import PatternOperand


class Library(NamedTuple):
    """Kernels of a library.

    Attributes:
        forward: from query ``[s, b, h, d]``, key and value ``[s, b, hk, d]`` and the softmax scale: out
            ``[s, b, h, d]``, contiguous, and lse ``[b, h, s]``, float32.
        backward: from grad_out, query, key, value, out, lse and the softmax scale: the gradients of query,
            key and value.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def library_for(index: PatternOperand, *operands: Tensor) -> Library | None:
    """The library whose kernels take these operands, query, key and value; None for this package's own.

    ``MTRAINING_DENSE`` in the environment chooses: ``flash4`` (FlashAttention-4, package flash-attn-4), or
    ``own``, the default. Never under ``torch.use_deterministic_algorithms(True)``.

    Raises:
        ConfigError: another value of ``MTRAINING_DENSE``, or the library that it names is not installed.
    """
    query = operands[0]
    if (
        switch("MTRAINING_DENSE") != "flash4"
        or not (index.is_dense and index.world == 1 and query.is_cuda)
        or query.element_size() != 2
        or query.shape[-1] > LIBRARY_HEAD_DIM
        or torch.are_deterministic_algorithms_enabled()
    ):
        return None
    return FLASH4 if _flash4_runs(query.device) else None


@functools.cache
def _flash4_runs(device: torch.device) -> bool:
    require("flash_attn.cute", extra="")
    return torch.cuda.get_device_capability(device) >= (9, 0)


# FlashAttention has [b, s, h, d].


def _flash4_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    run = import_module("flash_attn.cute.interface")._flash_attn_fwd
    operands = [each.transpose(0, 1) for each in (query, key, value)]
    out, lse, *_ = run(*operands, softmax_scale=scale, causal=True, return_lse=True)
    return out.transpose(0, 1).contiguous(), lse


def _flash4_backward(grad_out, query, key, value, out, lse, scale: float):
    run = import_module("flash_attn.cute.interface")._flash_attn_bwd
    operands = [each.transpose(0, 1) for each in (query, key, value, out, grad_out)]
    found = run(*operands, lse, softmax_scale=scale, causal=True)
    return tuple(each.transpose(0, 1) for each in found[:3])


FLASH4 = Library("FlashAttention-4", _flash4_forward, _flash4_backward)
