# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The backends of attention, and which of them takes given operands."""

from __future__ import annotations

import functools
import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from ...switches import switch
from ..common.dispatch import uses_triton
from ..common.triton_version import is_tested_triton
from ..types import BackwardPath, PatternOperand
from . import reference
from .backward_path import ONE_PASS_HEAD_DIM, gpu_of, is_faster_in_one_pass
from .operands import BackwardInputs, ForwardInputs, RoundKeys, StepKeys

GLUON_VERSIONS = ((3, 6), (3, 9))
"""First and last version of Triton for the Hopper kernels: Gluon still changes."""


class Backend(Protocol):
    """A module with the operations of ``__init__.py``, which documents the arguments. Results are written to
    memory that the caller provides (``out``, ``grad_query``, ``grad_kv``); it may be the accumulator's."""

    def forward(self, inputs: ForwardInputs, out: Tensor) -> None:
        """Attention to the keys of one round."""

    def backward_query(
        self,
        inputs: BackwardInputs,
        keys: RoundKeys,
        grad_query: Tensor,
        accumulator: Tensor | None,
        head_range: range,
    ) -> None:
        """The query's gradient through the keys of one round, for a range of the ``b * h`` heads."""

    def backward_columns(self, inputs: BackwardInputs, column_kv: Tensor, rank: int) -> Tensor:
        """Gradients of all columns through the queries of one rank. The backend chooses the number of splits,
        so it allocates the result."""

    def backward_key(
        self,
        inputs: BackwardInputs,
        keys: StepKeys,
        grad_kv: Tensor,
        accumulator: Tensor | None,
        column_gradients: Tensor | None,
    ) -> None:
        """Gradients of one rank's keys and values through the queries of one rank."""


class OnePassBackend(Backend, Protocol):
    """A backend whose ``backward_columns`` and ``backward_key`` can add to ``query_sums``; the others are
    never given any."""

    def new_query_sums(self, query: Tensor) -> Tensor:
        """Zeros to add the queries' gradient to, in the backend's own order."""

    def finish_query_sums(self, query_sums: Tensor, query: Tensor, softmax_scale: float) -> Tensor:
        """The gradient made of them."""


def backend_for(index: PatternOperand, query: Tensor, *operands: Tensor) -> Backend:
    """The backend that takes these operands, ``[s, b, h, d]`` (keys and values also ``[I, s, b, hk, d]``)."""
    if not uses_triton(query):
        return reference
    return _kernels("hopper" if uses_hopper(index, query, *operands) else "portable")


@functools.cache
def _kernels(name: str) -> Backend:
    """Imported when they are first needed, so that CPU users need no Triton."""
    return cast(Backend, importlib.import_module(f"{__package__}.{name}.backend"))


def choose_backward(
    index: PatternOperand, query: Tensor, *operands: Tensor, attended: Tensor | None = None
) -> BackwardPath:
    """How the backward of these operands is computed.

    ``MTRAINING_BACKWARD`` in the environment chooses: ``two_kernels``; ``one_pass`` where the backend has it
    (the Hopper kernels and the references do); ``auto``, the default, where it has been measured to be faster
    (:func:`.backward_path.is_faster_in_one_pass`). Never one pass under
    ``torch.use_deterministic_algorithms(True)``, nor with ``attended`` (:class:`.operands.BackwardInputs`),
    which the kernel of the queries' gradient sums.

    Raises:
        ConfigError: another value of ``MTRAINING_BACKWARD``.
    """
    wanted = switch("MTRAINING_BACKWARD") or "auto"
    if wanted == "auto":
        faster = is_faster_in_one_pass(index.is_dense, query.shape[0], gpu_of(query.device))
        wanted = "one_pass" if faster else "two_kernels"
    if (
        wanted == "two_kernels"
        or attended is not None
        or torch.are_deterministic_algorithms_enabled()
        or not _has_one_pass(backend_for(index, query, *operands), query.shape[-1])
    ):
        return BackwardPath.TWO_KERNELS
    return BackwardPath(wanted)


def _has_one_pass(backend: Backend, head_dim: int) -> bool:
    fits = backend is reference or head_dim <= ONE_PASS_HEAD_DIM
    return fits and hasattr(backend, "new_query_sums")


def uses_hopper(index: PatternOperand, query: Tensor, *operands: Tensor) -> bool:
    """Whether the Hopper kernels take these operands.

    They need a Hopper GPU, 16-bit operands with 16-byte aligned strides, blocks of 128, lengths that are
    multiples of 4, and a Triton of :data:`GLUON_VERSIONS`. ``MTRAINING_PORTABLE_KERNELS=1`` in the
    environment disables them.
    """
    return (
        query.is_cuda
        and query.element_size() == 2
        and index.block_size == 128
        and query.shape[0] % 4 == 0
        and _is_hopper(query.device)
        and switch("MTRAINING_PORTABLE_KERNELS") != "1"
        and all(map(fits_tma, (query, *operands)))
        and is_tested_triton(
            GLUON_VERSIONS, "attention takes the portable kernels, which are slower"
        )
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def fits_tma(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it: 16-byte aligned, rows of unit stride, nothing
    expanded."""
    return tensor.data_ptr() % 16 == 0 and _strides_fit(tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=1024)
def _strides_fit(strides: tuple[int, ...], size: int) -> bool:
    aligned = all(stride > 0 and stride * size % 16 == 0 for stride in strides[:-1])
    return aligned and strides[-1] == 1
