# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Packed documents, from the batch to the layers.

The model is told of documents by ``packed_seq_params``, as by Megatron's packed sequences (``--sft``,
``--dataloader-inter-document-masking``, trainers that are built on Megatron), or, with
``--reset-attention-mask``, by position ids that restart, which Megatron's data sets make with
``--reset-position-ids``, an end-of-document token being the last of its document. It hands them as
``packed_seq_params`` to all layers, of this microbatch and no other: also in a replay under activation
recomputation.
"""

from __future__ import annotations

import inspect

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..config import ConfigError
from ..tensors import check_values
from ..visibility import VisibleRanges
from .backend import is_active, training_arguments
from .borders import Borders, whole_sequence
from .document_options import asked_option, masks_documents


class DocumentParams(PackedSeqParams):
    """What layers are given of documents: sequences stay ``[s, b, ...]``, and nothing but our core attention
    and :mod:`.borders` looks at it. Made by :func:`packed_seq_params_of`."""

    documents: VisibleRanges
    lengths: tuple[int, ...] | None
    """Tokens of the sequences that Megatron's context-parallel layout cuts apart; None for the whole
    sequence. Fewer, together, than tokens of the documents, where the last of these is padding."""
    are_of_positions: bool = False
    """Whether Megatron is not told of them, but by position ids that restart."""


def packed_seq_params_of(
    documents: VisibleRanges, lengths: tuple[int, ...] | None = None
) -> DocumentParams:
    """``packed_seq_params`` of a forward of the model, for training loops that make their own batches."""
    if not isinstance(documents, VisibleRanges):
        raise ConfigError(f"documents are a {type(documents).__name__}: give VisibleRanges")
    length = documents.seq_length  # positions of the rotary table
    params = DocumentParams(qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length)
    params.documents, params.lengths = documents, lengths
    return params


def wrap_forward(original):
    """``GPTModel.forward`` or ``build_schedule_plan`` that hands documents to the layers as
    :class:`DocumentParams`."""
    signature = inspect.signature(original)

    def forward(self, *args, **kwargs):
        if not is_active(self.config):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        params = given.get("packed_seq_params")
        given["packed_seq_params"] = made = _params_of_model(self, given)
        if (
            made is not None
            and getattr(self.config, "context_parallel_size", 1) == 1
            and hasattr(params, "tokens_per_sample")
        ):
            # MoE layers split samples by it. With context parallelism a rank's tokens mix samples.
            made.tokens_per_sample = params.tokens_per_sample
        return original(*bound.args, **bound.kwargs)

    return forward


def _params_of_model(model, given: dict) -> DocumentParams | None:
    """The documents of a model's forward, by its arguments."""
    params, borders = given.get("packed_seq_params"), getattr(model, "mtraining_borders", None)
    arguments = training_arguments()
    resets = is_active(arguments) and getattr(arguments, "reset_attention_mask", False)
    if params is None and resets and (ids := given.get("position_ids")) is not None:
        params = packed_seq_params_of(_documents_of_positions(ids, borders))
        params.are_of_positions = True
    return params_for_layers(params, model.config, borders)


def params_for_layers(params, config, borders: Borders | None) -> DocumentParams | None:
    """What layers are given of a forward's ``packed_seq_params``, Megatron's or ours; None for None."""
    if params is None or isinstance(params, DocumentParams):
        return params
    made = document_params(params, borders, _is_cut_whole(training_arguments()))
    _check_stages_of(made, config)
    return made


def _documents_of_positions(ids: Tensor, borders: Borders | None) -> VisibleRanges:
    """Documents begin where position ids ``[b, s / cp]`` are 0."""
    if borders is not None:
        ids = whole_sequence(ids, borders)
    return VisibleRanges.from_position_ids(ids, check=False)


def _is_cut_whole(arguments) -> bool:
    """Whether Megatron's data loader cuts a batch of packed documents over context-parallel ranks as one
    sequence, and not document by document."""
    return (
        is_active(arguments)
        and getattr(arguments, "dataloader_inter_document_masking", False)
        and not getattr(arguments, "sft", False)
    )


def check_length(params: DocumentParams, length: int) -> None:
    """Raise :class:`ConfigError` unless documents are of the ``length`` tokens of the sequence."""
    told = params.documents.seq_length if params.lengths is None else sum(params.lengths)
    if told != length:
        raise ConfigError(
            f"documents are of {told} tokens, but the sequence of {length} (over all context-parallel "
            "ranks): give the documents of this batch"
        )


def _check_stages_of(params: DocumentParams, config) -> None:
    """Refuse padding to whole blocks where pipeline stages expect hidden states of the sequence's length."""
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    varies = getattr(config, "variable_seq_lengths", False)
    if params.lengths is None or stages == 1 or varies:
        return
    length, padded = sum(params.lengths), params.documents.seq_length
    if padded != length:
        raise ConfigError(
            f"packed sequences have {length} tokens together, and attention backend mtraining pads them to "
            f"{padded}, whole blocks on all context-parallel ranks: with {stages} pipeline stages pad the "
            "last sequence to that, or set config.variable_seq_lengths"
        )


def document_params(
    params: PackedSeqParams, borders: Borders | None = None, is_whole: bool = True
) -> DocumentParams:
    """Documents of Megatron's packed sequences, one after the other in one sequence. Read on the host.

    Padding of a sequence comes last, where no token of it sees it.

    Args:
        borders: of the model, with context parallelism.
        is_whole: context-parallel ranks have parts of the whole sequence, and not of each document.

    Raises:
        ConfigError: keys have other documents, or they are for another context-parallel group.
    """
    if not isinstance(params, PackedSeqParams):
        raise ConfigError(
            f"packed_seq_params are a {type(params).__name__}: give Megatron's PackedSeqParams, or the "
            "result of megatron_mtraining.megatron.packed_documents.packed_seq_params_of(documents)"
        )
    if params.cu_seqlens_q is None or getattr(params, "qkv_format", None) != "thd":
        raise ConfigError(
            "packed_seq_params are given without cu_seqlens_q: attention backend mtraining takes packed "
            "sequences (thd) with cu_seqlens_q"
        )
    if getattr(params, "cp_group", None) is not None:
        raise ConfigError(
            "packed_seq_params are given with a cp_group: attention backend mtraining does not "
            "support hybrid context parallelism"
        )
    ends, own = _ends(params, "q"), _read(params.cu_seqlens_q, "cu_seqlens_q").diff()
    if not ends.equal(keys := _ends(params, "kv")):
        raise ConfigError(
            f"cu_seqlens_kv of packed_seq_params {keys.tolist()[:6]} differs from cu_seqlens_q "
            f"{ends.tolist()[:6]}: attention backend mtraining supports self-attention only"
        )
    _check_seq_idx(getattr(params, "seq_idx", None), ends)
    length = int(ends[-1]) if ends.numel() else 0
    lengths = None if is_whole else tuple(each for each in ends.diff().tolist() if each)
    padded = length if is_whole or borders is None else borders.padded(length)
    if padded > length:
        ends = torch.cat((ends, ends.new_tensor([padded])))
        own = torch.cat((own, own.new_tensor([0])))
    documents = VisibleRanges.from_cu_seqlens(ends, padded, params.cu_seqlens_q.device, own)
    return packed_seq_params_of(documents, lengths)


def _ends(params: PackedSeqParams, of: str) -> Tensor:
    """``cu_seqlens`` of queries or of keys, with their padding, on the host; those of queries if keys have
    none."""
    for name in (f"cu_seqlens_{of}_padded", f"cu_seqlens_{of}"):
        ends = getattr(params, name, None)
        if ends is not None:
            return _read(ends, name)
    return _ends(params, "q")


def _read(ends: Tensor, name: str) -> Tensor:
    check_values(**{name: ends})
    return ends.flatten().cpu()


def _check_seq_idx(index: Tensor | None, ends: Tensor) -> None:
    """Megatron's number of each token's document, where it is given, tells the same bounds."""
    if index is None:
        return
    index = index.flatten().cpu()
    bounds = (index.diff() != 0).nonzero().flatten() + 1
    inner = ends.unique()[1:-1]
    if len(index) != int(ends[-1]) or not bounds.equal(inner.long()):
        raise ConfigError(
            "seq_idx of packed_seq_params tells other documents than cu_seqlens_q: give one of them"
        )


def documents_for_layer(params, place: str) -> VisibleRanges | None:
    """The documents that a layer is given; None if there are none.

    Raises:
        ConfigError: it is given something else, or the run asks for documents and none have come.
    """
    if isinstance(params, DocumentParams):
        return params.documents
    if params is not None:
        raise ConfigError(
            f"the {place} is given packed_seq_params of Megatron's: give them to GPTModel's forward, or "
            "give the layer the result of packed_documents.packed_seq_params_of(documents)"
        )
    arguments = training_arguments()
    if is_active(arguments) and masks_documents(arguments):
        raise ConfigError(
            f"the {place} must keep documents apart ({asked_option(arguments)}), but no documents are given: "
            "give the model position_ids, or packed_seq_params"
        )
    return None
