# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a model and its attention are given beside hidden states: refused where it would be of another layout,
or ignored."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ConfigError
from ..cp_group import CPGroup
from ..layout import part_of, positions_at
from ..visibility import VisibleRanges

CHECKED = "mtraining_checked"
"""The attribute of an attention mask that has the documents it was compared with."""


def check_parts(model, given: dict) -> None:
    """Raise :class:`ConfigError` unless the tensors of a call are this rank's part of the batch, in the
    model's layout: those that :func:`~megatron_mtraining.layout.stripe` has returned. No values are read.

    Args:
        model: a ``GPTModel`` with this backend, whole or a pipeline stage.
        given: arguments of its forward.
    """
    if not hasattr(model, "mtraining_part"):
        return
    expected = model.mtraining_part
    names = ["input_ids", "labels", "padding_mask"]
    if model.position_embedding_type == "learned_absolute":  # others do not look at them
        names.append("position_ids")
    if model.pre_process and given.get("input_ids") is None:
        names.append("decoder_input")
    for name in names:
        tensor = given.get(name)
        if not isinstance(tensor, Tensor) or (found := part_of(tensor)) == expected:
            continue
        if found is None:
            raise ConfigError(
                f"attention backend mtraining has not sliced the {name} that the model is given: each of the "
                f"{expected.cp_size} context-parallel ranks computes one of every {expected.cp_size} blocks, "
                "and tokens in Megatron's zigzag order, by sequence or by document (as of verl, slime, "
                "Megatron-Bridge or Megatron's RL), would give wrong results. Slice whole batches by "
                "Megatron's get_batch_on_this_cp_rank or by megatron_mtraining.megatron.batch.slice_batch, "
                "after any other change (a copy, by .clone() or .cuda() for example, is not known to be "
                "sliced), or use context-parallel size 1"
            )
        own = "the whole sequence" if expected is None else expected
        raise ConfigError(
            f"the {name} that the model is given are {found}, but this rank of the model computes {own}: "
            "slice the batch by the model's settings"
        )


def check_mask(
    mask: Tensor,
    query: Tensor,
    documents: VisibleRanges | None,
    cp: CPGroup,
    block_size: int,
    place: str,
) -> None:
    """Raise :class:`ConfigError` unless an explicit mask hides just what attention does not see by itself.
    It is compared once for all layers.

    Args:
        mask: bool ``[b or 1, 1, s/cp, s]``, True where a key is hidden.
        query: ``[s/cp, b, ...]``.
        documents: what attention is given of documents.
        cp, block_size: the layout.
        place: which attention, for the message.
    """
    if getattr(mask, CHECKED, CHECKED) is documents:
        return
    rows, batch = query.shape[:2]
    keys = torch.arange(rows * cp.world, device=query.device)
    positions = positions_at(keys[:rows], cp.rank, cp.world, block_size, cp.inner)
    hidden = (keys > positions[:, None]).expand(batch, 1, -1, -1)
    if documents is not None:
        documents.check(batch, len(keys), query.device)
        hidden = hidden | (keys < documents.start[:, None, positions, None])
    shapes = (hidden.shape, (1, *hidden.shape[1:]))
    of_shape = mask.dtype == torch.bool and tuple(mask.shape) in shapes
    if not (of_shape and bool((mask.to(query.device) == hidden).all())):
        raise ConfigError(
            f"the {place} is given an attention_mask ({mask.dtype} {list(mask.shape)}) that hides other keys "
            "than causal attention within documents does: leave it out. Attention is causal by itself; "
            "documents are given by --reset-attention-mask, by slice_batch(..., documents=True), or as "
            "packed_seq_params_of(documents)"
        )
    setattr(mask, CHECKED, documents)
