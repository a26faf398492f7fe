# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Output layer and cross entropy in one function, with the logits of a few tokens at a time.

All logits of 131072 tokens and 151936 vocabulary entries are 37 GiB in bf16, and their softmax, which the
backward needs, twice that in float32. Here a chunk's logits serve for its losses and are gone; the backward
computes them again, and turns them into their gradient in place. That is one more matrix product than the
three without chunks: tokens' losses are weighted (loss mask, number of tokens) only after the forward, and
the weight's gradient is a sum over tokens that cannot be weighted afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from .cp_group import ProcessGroup, RankGroup
from .kernels.loss import cross_entropy_gradient, cross_entropy_rows
from .labels import LOSS_BACKWARD, LOSS_FORWARD, labelled
from .tensors import check_values, own_context

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LABELS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GradientBuffer(Protocol):
    """Memory of a training framework that a weight's gradient is added to, in place of ``weight.grad``."""

    def buffer(self) -> Tensor | None:
        """``[V, h]``; None if there is none after all. Called once, in the backward."""

    def placeholder(self) -> Tensor | None:
        """What autograd gets in place of the gradient."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    tp_group: ProcessGroup | None = None,
    scale: float = 1.0,
    gradient_buffer: GradientBuffer | None = None,
) -> Tensor:
    """``cross_entropy(scale * hidden @ weight.T, labels)`` of each token. It has first derivatives only.

    Args:
        hidden: ``[..., h]``, alike on all tensor-parallel ranks. Its gradient is this rank's part: the sum
            over ranks is left to the caller.
        weight: ``[V, h]`` in the same dtype: ``V`` vocabulary entries of each rank, in rank order.
        labels: whole numbers ``[...]``, over all ranks. One outside of the vocabulary has the loss
            ``log(sum(exp(logit - largest)))``, as in Megatron: such tokens are masked.
        chunk: tokens whose logits are held at once; the last chunk may have fewer.
        tp_group: tensor-parallel ranks, or None for one.
        scale: what logits are multiplied by.
        gradient_buffer: memory to add the weight's gradient to, such as Megatron's ``main_grad``; None for
            autograd's own.

    Returns:
        losses ``[...]``, float32 (float64 for float64 operands).

    Raises:
        ValueError: operands that do not fit each other.
    """
    check_values(hidden=hidden, weight=weight, labels=labels)
    if (within := own_context(hidden.device)) is not None:
        with within:
            return linear_cross_entropy(
                hidden, weight, labels, chunk, tp_group, scale, gradient_buffer
            )
    if hidden.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"hidden is of {hidden.dtype}: give numbers of {names}")
    if labels.dtype not in LABELS:
        raise ValueError(f"labels are of {labels.dtype}: give token ids, as whole numbers")
    if not isinstance(chunk, int) or isinstance(chunk, bool):
        raise ValueError(f"chunk is {chunk!r}: give a whole number of tokens")
    # Above the largest float32, logits are infinite or not numbers.
    if (
        isinstance(scale, bool)
        or not isinstance(scale, int | float)
        or not abs(scale) <= torch.finfo(torch.float32).max
    ):
        raise ValueError(f"scale is {scale!r}: give a finite number, of float32")
    if gradient_buffer is not None and not callable(getattr(gradient_buffer, "buffer", None)):
        raise ValueError(
            f"gradient_buffer is a {type(gradient_buffer).__name__}: give a GradientBuffer, or None"
        )
    fits = hidden.shape[:-1] == labels.shape and hidden.shape[-1:] == weight.shape[1:]
    if not fits or hidden.dtype != weight.dtype or chunk < 1:
        raise ValueError(
            f"expected [..., h], [V, h], [...] and a chunk of 1 or more, got hidden {tuple(hidden.shape)} "
            f"{hidden.dtype}, weight {tuple(weight.shape)} {weight.dtype}, labels {tuple(labels.shape)}, "
            f"chunk {chunk}"
        )
    if 0 in weight.shape:
        raise ValueError(f"weight {tuple(weight.shape)} is empty: give 1 or more in each dimension")
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = labels.reshape(-1).long()
    losses = _LinearCrossEntropy.apply(
        rows, weight, flat, chunk, tp_group, float(scale), gradient_buffer
    )
    return losses.view(labels.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @labelled(LOSS_FORWARD)
    def forward(ctx, hidden, weight, labels, chunk, tp_group, scale, gradient_buffer):
        ranks = RankGroup(tp_group)
        first_token = ranks.rank * len(weight)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest, total, label_logits = hidden.new_empty((3, len(hidden)), dtype=dtype)
        for part, logits in _chunks(hidden, weight, chunk):
            cross_entropy_rows(
                logits, labels[part], first_token, scale, largest[part], total[part], label_logits[part]
            )  # fmt: skip
        # Once for all chunks: collectives of a few bytes each would wait for each other's latency.
        local = largest
        if ranks.world > 1:
            largest = ranks.all_reduce(local.clone(), "max")
            total = total * (local - largest).exp()
        owned = (labels >= first_token) & (labels < first_token + len(weight))
        sums = torch.stack([total, torch.where(owned, label_logits - largest, 0)])
        ranks.all_reduce(sums)
        log_total = sums[0].log()
        ctx.save_for_backward(hidden, weight, labels, log_total + largest)
        ctx.settings = chunk, first_token, scale, gradient_buffer
        return log_total - sums[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    @labelled(LOSS_BACKWARD)
    def backward(ctx, grad):
        if (within := own_context(grad.device)) is not None:
            with within:
                return _LinearCrossEntropy.backward(ctx, grad)
        hidden, weight, labels, lse = ctx.saved_tensors
        chunk, first_token, scale, gradient_buffer = ctx.settings
        grad = grad.to(lse.dtype).contiguous()
        wanted = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        buffer = gradient_buffer.buffer() if wanted[1] and gradient_buffer is not None else None
        if buffer is not None and buffer.shape != weight.shape:
            raise ValueError(
                f"the gradient buffer is of shape {tuple(buffer.shape)}, but the weight of "
                f"{tuple(weight.shape)}: give memory of the weight's shape"
            )
        total = None
        if buffer is not None and buffer.dtype == lse.dtype:
            total = buffer
        elif wanted[1]:
            # A sum over chunks in bf16 would be rounded with each of them.
            total = torch.zeros_like(weight, dtype=lse.dtype)
        for part, logits in _chunks(hidden, weight, chunk):
            cross_entropy_gradient(logits, labels[part], lse[part], grad[part], first_token, scale)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if total is not None:
                _add_product(total, logits, hidden[part])
        grad_weight = None
        if buffer is not None:
            if total is not buffer:
                buffer.add_(total)
            grad_weight = gradient_buffer.placeholder()
        elif total is not None:
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk's tokens and their logits ``[n, V]``, all in the same memory."""
    memory = hidden.new_empty((min(chunk, len(hidden)), len(weight)))
    for start in range(0, len(hidden), chunk):
        part = slice(start, min(start + chunk, len(hidden)))
        yield part, torch.mm(hidden[part], weight.t(), out=memory[: part.stop - start])


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """``total += grad_logits.T @ hidden``, ``[V, h]``, in the dtype of the sum."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
    elif total.dtype == torch.float32 and total.is_cuda and _widens(total.device):
        torch.addmm(total, grad_logits.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(grad_logits.t(), hidden))


@functools.cache
def _widens(device: torch.device) -> bool:
    """Whether 16-bit products can be added to a float32 sum in place (PyTorch 2.8 and later)."""
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17).all())
