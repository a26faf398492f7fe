# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A context-parallel rank's part of the batch, in the striped layout."""

from __future__ import annotations

import inspect

from torch import Tensor

from ..config import ConfigError
from ..layout import stripe_batch
from ..tensors import check_dense
from ..visibility import VisibleRanges
from .backend import is_active, training_arguments
from .checks import inner_group_size
from .options import config_from_args
from .packed_documents import attach_documents

PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
SEQUENCES = ("tokens", "labels", "loss_mask", "position_ids")


def wrap_get_batch(original):
    """``get_batch_on_this_cp_rank`` in the striped layout."""
    signature = inspect.signature(original)

    def get_batch_on_this_cp_rank(*args, **kwargs):
        arguments = training_arguments()
        if not is_active(arguments):
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if given.get("is_hybrid_cp"):
            raise ConfigError("attention backend mtraining does not support hybrid CP")
        group = given.get("cp_group")
        if group is None:
            from megatron.core import parallel_state

            group = parallel_state.get_context_parallel_group()
        config, size = config_from_args(arguments), group.size()
        inner = inner_group_size(arguments, size, config.gathered_ranks, command_line=True)
        batch = given["batch"]
        packed = getattr(arguments, "dataloader_inter_document_masking", False)
        # They come to the model as packed_seq_params then.
        kept = {name: batch.pop(name) for name in PACKED if name in batch} if packed else {}
        attach = getattr(arguments, "reset_attention_mask", False)
        batch = slice_batch(batch, group.rank(), size, config.block_size, inner, attach)
        batch.update(kept)
        return batch

    return get_batch_on_this_cp_rank


def slice_batch(
    batch: dict,
    cp_rank: int,
    cp_size: int,
    block_size: int,
    inner: int | None = None,
    documents: bool | None = None,
) -> dict:
    """This rank's part of a Megatron batch.

    Args:
        batch: ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` ``[b, s]``, perhaps
            ``attention_mask`` ``[b, 1, s, s]``, and entries without a sequence dimension (such as
            the ``[b]`` numbers that data sets add), which stay as they are; None stays None.
        cp_rank, cp_size: position in the context-parallel group, and its size.
        block_size: tokens in a block.
        inner: ranks of the inner group, as for :func:`~megatron_mtraining.layout.inner_size`.
        documents: True attaches packed documents, which begin where position ids are 0, to the result's
            tensors (:mod:`.packed_documents`). False does not look at position ids. None takes position ids
            that go on from token to token, and no others: waits for the GPU that they are on.

    Returns:
        The same dict. Models on several context-parallel ranks take these tensors, and no copies of them.

    Raises:
        ConfigError: packed sequences, an entry with another length, documents that position ids do not tell,
            or, with ``documents`` None, position ids that restart or skip.
    """
    if not isinstance(batch, dict):
        raise ConfigError(f"the batch is a {type(batch).__name__}: give a dict of tensors")
    packed = [name for name in PACKED if batch.get(name) is not None]
    if packed:
        raise ConfigError(
            f"the batch has {', '.join(packed)}: attention backend mtraining does not support "
            "packed sequences or hybrid context parallelism"
        )
    for name in SEQUENCES:
        value = batch.get(name)
        if value is None:
            continue
        check_dense(f"the batch's {name}", value)
        if value.dim() < 2:
            raise ConfigError(
                f"the batch's {name} are of shape {list(value.shape)}: give [batch, sequence]"
            )
    ours, lengths = {}, set()
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        if name == "attention_mask" and value.dim() < 3:
            raise ConfigError(
                f"the batch's attention_mask is of shape {list(value.shape)}: give [batch, 1, sequence, "
                "sequence], or None"
            )
        lengths.add(value.shape[2 if name == "attention_mask" else 1])
        ours[name] = value
    if len(lengths) > 1:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in ours.items())
        raise ConfigError(
            f"the entries of the batch are not of one sequence length: {shapes}; attention backend "
            "mtraining does not know how to slice them"
        )
    if not ours:  # a pipeline stage without data
        return batch
    if documents is None:
        _check_positions(batch.get("position_ids"))
    found = _documents(batch) if documents else None
    batch.update(stripe_batch(ours, cp_rank, cp_size, block_size, inner))
    if found is not None:
        attach_documents(batch, found)
    return batch


def _documents(batch: dict) -> VisibleRanges:
    ids = batch.get("position_ids")
    if ids is None:
        raise ConfigError(
            "the batch has no position_ids: --reset-attention-mask finds the start of documents by them; "
            "give position_ids"
        )
    return VisibleRanges.from_position_ids(ids, check=False)


def _check_positions(ids: Tensor | None) -> None:
    """Refuse position ids of several documents where nothing says whether they are kept apart."""
    if ids is None:
        return
    breaks = (ids.diff(dim=1) != 1).nonzero()
    if len(breaks):
        entry, token = breaks[0, :2].tolist()
        before, after = ids[entry, token : token + 2].tolist()
        raise ConfigError(
            f"position_ids go from {before} to {after} at token {token + 1} of batch entry {entry}: give "
            "documents=True if documents begin where they are 0 and are to be kept apart, or documents=False "
            "if not, or if the model is given packed_seq_params_of(documents)"
        )
