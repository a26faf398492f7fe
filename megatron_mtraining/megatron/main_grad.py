# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Where Megatron's data-parallel wrappers want a weight's gradient: in ``weight.main_grad``."""

from __future__ import annotations

import torch
from torch import Tensor


class MainGrad:
    """A weight's ``main_grad``, as Megatron's ``ColumnParallelLinear`` uses it with
    ``gradient_accumulation_fusion``; see :class:`~megatron_mtraining.loss.GradientBuffer`.

    Made in the forward: other microbatches add to ``main_grad`` between it and its backward.
    """

    def __init__(self, weight: Tensor):
        self._weight = weight
        self._main_grad: Tensor | None = getattr(weight, "main_grad", None)

    def buffer(self) -> Tensor | None:
        """``[V, h]``: what the gradient is added to; None if the wrapper has given the weight none."""
        weight = self._weight
        if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP: a buffer that is to be overwritten
            weight.main_grad = weight.get_main_grad()
            return weight.main_grad.zero_()
        if self._main_grad is not None:
            weight.main_grad = self._main_grad
        return self._main_grad

    def placeholder(self) -> Tensor | None:
        """The gradient that autograd gets for a weight whose ``main_grad`` has it already.

        Hooks of the data-parallel wrapper run only if there is one. With tied embeddings it is summed with
        the embedding's gradient (``zero_out_wgrad``); else its content is not read.
        """
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)
