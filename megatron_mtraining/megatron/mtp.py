# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Multi-token prediction (``--mtp-num-layers``).

Its tokens, labels and loss masks, shifted by a token in each depth, stay in Megatron's layout. Hidden states
go to the striped layout for the transformer layer of each depth, and come back after it: two all-to-alls of
``[s / cp, b, h]``, beside those of the decoder.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigError
from ..cp_group import ProcessGroup, RankGroup
from ..relayout import zigzag_owner
from .borders import enter, relayout_of
from .layer_spec import replace_core_attention
from .packed_documents import DocumentParams, params_for_layers


def check_mtp(config) -> None:
    """Raise :class:`ConfigError` if multi-token prediction of this TransformerConfig cannot run."""
    if not getattr(config, "mtp_num_layers", None):
        return
    given = f"config.mtp_num_layers is {config.mtp_num_layers} (--mtp-num-layers)"
    if getattr(config, "mtp_standalone", False):
        raise ConfigError(
            f"{given}, on a pipeline stage without the loss: attention backend mtraining supports it on the "
            "stage that has the loss only; change --pipeline-model-parallel-layout"
        )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            f"{given}, with --overlap-moe-expert-parallel-comm, which runs the layers of multi-token "
            "prediction in parts: leave one of them out"
        )


def replace_mtp_attention(spec: Any) -> Any:
    """A copy of ``mtp_block_spec`` in which the self-attention of each depth has our core attention, which
    knows its depth: Megatron numbers these layers anew, or after the decoder's, by version."""
    from .core_attention import MTrainingAttention

    if not hasattr(spec, "layer_specs"):  # a ModuleSpec
        changed = copy.copy(spec)
        changed.submodules = replace_mtp_attention(spec.submodules)
        return changed
    changed = copy.copy(spec)
    changed.layer_specs = [
        replace_core_attention(each, partial(MTrainingAttention, mtp_depth=depth))
        for depth, each in enumerate(spec.layer_specs, 1)
    ]
    return changed


def convert_layers(model) -> None:
    """Have the transformer layers of a model's multi-token prediction run in the striped layout."""
    block = getattr(model, "mtp", None)
    for depth in () if block is None else block.layers:
        # Named anew in 0.17.
        layer = getattr(depth, "mtp_model_layer", None) or depth.transformer_layer
        layer.mtraining_borders = model.mtraining_borders
        layer.register_forward_pre_hook(_there, with_kwargs=True)
        layer.register_forward_hook(_back, with_kwargs=True)


def _there(layer, args, given: dict):
    borders = layer.mtraining_borders
    params = params_for_layers(given.get("packed_seq_params"), layer.config, borders)
    given = {**given, "packed_seq_params": params}
    if borders is not None:
        enter(borders, given, getattr(params, "lengths", None))
    return args, given


def _back(layer, args, given: dict, result):
    borders = layer.mtraining_borders
    if borders is None:
        return result
    hidden, context = result
    lengths = getattr(given["packed_seq_params"], "lengths", None)
    return relayout_of(borders, hidden, lengths).back(hidden), context


def wrap_roll_tensor(original):
    """``roll_tensor`` within packed documents, however they are cut over context-parallel ranks."""
    signature = inspect.signature(original)

    def roll_tensor(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        params, tensor = given.get("packed_seq_params"), given["tensor"]
        if not isinstance(params, DocumentParams) or tensor is None:
            return original(*args, **kwargs)
        if params.are_of_positions:  # of which Megatron tells it nothing
            given["packed_seq_params"] = None
            return original(*bound.args, **bound.kwargs)
        rolled = _rolled(tensor, given.get("cp_group"), params)
        return rolled, rolled.sum()

    return roll_tensor


def _rolled(tensor: Tensor, group: ProcessGroup | None, params: DocumentParams) -> Tensor:
    """``[b, s / cp]`` with the next token's value at each token, and 0 at the last ones of documents; in the
    layout of a batch."""
    ranks = RankGroup(group)
    total, device = tensor.shape[1] * ranks.world, tensor.device
    rank, at = zigzag_owner(params.lengths or (total,), ranks.world, device)
    whole = ranks.all_gather(tensor)[rank, :, at].t()
    start = params.documents.start[:, 1:total]
    is_last = torch.ones_like(whole, dtype=torch.bool)
    is_last[:, :-1] = start == torch.arange(1, total, device=device)
    own = (rank == ranks.rank).nonzero().flatten()
    return whole.roll(-1, 1).masked_fill(is_last, 0)[:, own[at[own].argsort()]]
