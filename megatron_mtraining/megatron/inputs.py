# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""An explicit attention mask, which attention does not read: refused if it hides anything else."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ConfigError
from ..visibility import VisibleRanges

CHECKED = "mtraining_checked"
"""The attribute of an attention mask that has the documents it was compared with, and its version then."""


def check_mask(
    mask: Tensor, query: Tensor, documents: VisibleRanges | None, ranks: int, place: str
) -> None:
    """Raise :class:`ConfigError` unless an explicit mask hides just what attention does not see by itself.
    It is compared once for all layers.

    Args:
        mask: bool ``[b or 1, 1, s, s]``, True where a key is hidden.
        query: ``[s, b, ...]``.
        documents: what attention is given of documents.
        ranks: of the context-parallel group; over several, the rows of a mask are not those of attention.
        place: which attention, for the message.
    """
    if ranks > 1:
        raise ConfigError(
            f"the {place} is given an attention_mask over {ranks} context-parallel ranks: leave it out "
            "(--no-create-attention-mask-in-dataloader). Attention is causal by itself"
        )
    # Memory that a loop fills with the mask of each batch is another mask then; of inference tensors torch
    # does not say.
    version = None if mask.is_inference() else mask._version
    compared_with, then = getattr(mask, CHECKED, (None, None))
    if compared_with is documents and then is not None and then == version:
        return
    length, batch = query.shape[:2]
    keys = torch.arange(length, device=query.device)
    hidden = (keys > keys[:, None]).expand(batch, 1, -1, -1)
    if documents is not None:
        documents.check(batch, length, query.device)
        hidden = hidden | (keys < documents.start[:, None, :, None])
    shapes = (hidden.shape, (1, *hidden.shape[1:]))
    of_shape = mask.dtype == torch.bool and tuple(mask.shape) in shapes
    if not (of_shape and bool((mask.to(query.device) == hidden).all())):
        raise ConfigError(
            f"the {place} is given an attention_mask ({mask.dtype} {list(mask.shape)}) that hides other keys "
            "than causal attention within documents does: leave it out. Attention is causal by itself; "
            "documents are given by --reset-attention-mask or by packed_seq_params"
        )
    setattr(mask, CHECKED, (documents, version))
