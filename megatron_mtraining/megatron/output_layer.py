# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``GPTModel``'s output layer and loss in chunks of tokens (``--mtraining-loss-chunk``)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from ..config import ConfigError, option
from ..loss import linear_cross_entropy
from .backend import is_active, training_arguments
from .loss_options import ADVICE, DEFAULT_CHUNK, why_not
from .main_grad import MainGrad
from .wrapping import is_first_local_rank


class ChunkedOutputLayer(tensor_parallel.ColumnParallelLinear):
    """The output layer, which can go on to the loss; made from Megatron's by :func:`chunk_loss`.

    Called as a module for that too, since wrappers (distributed optimizer, FSDP) gather a module's weights
    in hooks of its call.
    """

    mtraining_defers = False
    """Whether a call without labels gives :class:`DeferredLogits`."""

    def forward(
        self,
        input_,
        weight=None,
        runtime_gather_output=None,
        labels=None,
        scale=1.0,
        visit: Callable[[slice, Tensor], None] | None = None,
    ):
        """As Megatron's without labels.

        Args:
            input_: ``[s, b, h]``, or with sequence parallelism this rank's part of ``s``.
            weight: ``[V / tp, h]``, where it is the embedding's.
            labels: ``[s, b]``.
            scale: what logits are multiplied by.
            visit: is given the logits ``[s of a chunk, b, V / tp]`` of each chunk and its slice of ``s``, in
                place of losses.

        Returns:
            losses ``[s, b]``, float32.
        """
        if labels is None and visit is None:
            if self.mtraining_defers:
                return DeferredLogits(self, input_, weight), None
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(
                input_, group=self.tp_group
            )
        weight = self.weight if weight is None else weight
        if visit is not None:
            rows = max(self.mtraining_chunk // hidden.shape[1], 1)
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                visit(part, hidden[part] @ weight.t())
            return None
        return linear_cross_entropy(
            hidden, weight, labels, self.mtraining_chunk, self.tp_group, scale,
            MainGrad(weight) if self.gradient_accumulation_fusion else None,
        )  # fmt: skip


class DeferredLogits(NamedTuple):
    """In place of logits: what they are made of. Of multi-token prediction, whose labels Megatron shifts
    between output layer and loss, in code that differs by version, and of ``HybridModel``, whose forward has
    both."""

    layer: ChunkedOutputLayer
    hidden: Tensor
    weight: Tensor | None
    scale: float = 1.0

    def __mul__(self, scale: float) -> DeferredLogits:  # type: ignore[override]
        return self._replace(scale=self.scale * scale)

    def losses(self, labels: Tensor) -> Tensor:
        """``[b, s]``, float32, of labels ``[b, s]``."""
        losses = self.layer(self.hidden, self.weight, labels=labels.t(), scale=self.scale)
        return losses.t().contiguous()


# Megatron-FSDP knows by its class's name that a module's weight is split over tensor-parallel ranks.
ChunkedOutputLayer.__name__ = tensor_parallel.ColumnParallelLinear.__name__


def _why_not_of(model) -> str | None:
    """What in a model's own code the loss in chunks would bypass."""
    for name in ("compute_language_model_loss", "_scale_logits"):
        if getattr(type(model), name, None) is not getattr(LanguageModule, name, None):
            return f"{type(model).__name__} has a {name} of its own"
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return None
    if type(layer) is not tensor_parallel.ColumnParallelLinear:
        return f"the model's output layer is a {type(layer).__name__}, not Megatron's usual one"
    if layer.bias is not None:
        return "the model's output layer has a bias"
    if getattr(layer, "output_dtype", None) not in (None, model.config.params_dtype):
        return f"the model's logits are {layer.output_dtype}"
    if layer.gather_output and layer.tp_group.size() > 1:
        return "the model gathers logits over tensor-parallel ranks (parallel_output is False)"
    return None


def chunk_loss(model, chunk: int | None) -> None:
    """Give a model's output layer the loss in chunks, in place.

    Its class is exchanged, so that names in checkpoints, hooks and copies stay what they were.

    Args:
        model: a ``GPTModel``, whole or a pipeline stage.
        chunk: tokens; 0 for Megatron's own loss; None for a default, or Megatron's own, with a warning,
            where this model allows no chunks.

    Raises:
        ConfigError: the model allows no chunks, and ``chunk`` asks for some.
    """
    if chunk == 0:
        return
    # Some are not in the model's config.
    args = training_arguments()
    reason = why_not(model.config, command_line=False) or _why_not_of(model)
    if reason is None and is_active(args):
        reason = why_not(args, command_line=True)
    if reason:
        if chunk:
            raise ConfigError(f"{option('loss_chunk')} is {chunk}, but {reason}; {ADVICE}")
        if is_first_local_rank():
            warnings.warn(
                f"the logits of all tokens are held at once, as {reason} ({option('loss_chunk')})",
                stacklevel=2,
            )
        return
    layer = getattr(model, "output_layer", None)
    if layer is not None:
        layer.mtraining_chunk = chunk or DEFAULT_CHUNK
        layer.__class__ = ChunkedOutputLayer


def wrap_postprocess(original):
    """``GPTModel._postprocess`` with output layer and loss in chunks, where the model has them."""
    signature = inspect.signature(original)

    def _postprocess(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if not chunks_loss(self, given):
            return original(*bound.args, **bound.kwargs)
        layer = self.output_layer
        if getattr(self.config, "mtp_num_layers", None):
            with deferring(layer):
                return original(*bound.args, **bound.kwargs)
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        logits = DeferredLogits(layer, given["hidden_states"], weight, _scale(self.config))
        return logits.losses(given["labels"])

    return _postprocess


def chunks_loss(model, given: dict) -> bool:
    """Whether a model's forward, by its arguments, computes its loss in chunks."""
    # Distillation, for one, gives a model a loss of its own when it is built.
    has_own = "compute_language_model_loss" in vars(model)
    others = ("inference_context", "inference_params", "output_processor")
    alone = all(given.get(name) is None for name in others)
    wants_logits = given.get("labels") is None or not alone or given.get("runtime_gather_output")
    layer = getattr(model, "output_layer", None)
    return not has_own and not wants_logits and isinstance(layer, ChunkedOutputLayer)


@contextmanager
def deferring(layer: ChunkedOutputLayer):
    """While a model's own code calls output layer and loss one after the other: neither has logits."""
    layer.mtraining_defers = True
    try:
        yield
    finally:
        layer.mtraining_defers = False


def wrap_language_model_loss(original):
    """``LanguageModule.compute_language_model_loss`` of :class:`DeferredLogits`."""

    def compute_language_model_loss(self, labels, logits):
        if isinstance(logits, DeferredLogits):
            return logits.losses(labels)
        return original(self, labels, logits)

    return compute_language_model_loss


def wrap_acceptance_counts(original):
    """``_compute_mtp_acceptance_counts`` of :class:`DeferredLogits`: sums over chunks."""

    def _compute_mtp_acceptance_counts(logits, labels, mask, *args, **kwargs):
        if not isinstance(logits, DeferredLogits):
            return original(logits, labels, mask, *args, **kwargs)
        found = []

        def count(part: slice, some: Tensor) -> None:
            found.append(original(some, labels[:, part], mask[:, part], *args, **kwargs))

        with torch.no_grad():
            logits.layer(logits.hidden, logits.weight, visit=count)
        correct, total = zip(*found)
        return sum(correct), sum(total)

    return _compute_mtp_acceptance_counts


def _scale(config) -> float:
    """MuP's, of logits."""
    return config.mup_output_mult if getattr(config, "use_mup", False) else 1.0
