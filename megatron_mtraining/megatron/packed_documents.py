# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Packed documents, from the batch to the layers.

Documents are known where the whole batch is, before it is sliced: from position ids that restart, which
Megatron's data sets make with ``--reset-position-ids``, an end-of-document token being the last of its
document. They go with the batch's own tensors to the model, and from there as its ``packed_seq_params`` to
all layers, of this microbatch and no other: also in a replay under activation recomputation. With
``--dataloader-inter-document-masking`` Megatron brings lengths of documents itself, on all pipeline stages.
"""

from __future__ import annotations

import inspect

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..config import ConfigError
from ..tensors import check_values
from ..visibility import MOST_TOKENS, VisibleRanges
from .backend import is_active, training_arguments
from .inputs import check_parts

ATTRIBUTE = "mtraining_documents"
"""The attribute of a batch's tensors that has their documents."""


class DocumentParams(PackedSeqParams):
    """What layers are given of documents: sequences stay ``[s, b, ...]``, and nothing but our core attention
    looks at it. Made by :func:`packed_seq_params_of`."""

    documents: VisibleRanges


def packed_seq_params_of(documents: VisibleRanges) -> DocumentParams:
    """``packed_seq_params`` of a forward of the model, for training loops that make their own batches."""
    if not isinstance(documents, VisibleRanges):
        raise ConfigError(f"documents are a {type(documents).__name__}: give VisibleRanges")
    length = documents.seq_length  # positions of the rotary table
    params = DocumentParams(qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length)
    params.documents = documents
    return params


def attach_documents(batch: dict, documents: VisibleRanges) -> None:
    """Attach a batch's documents to its tokens and position ids, which the model is given."""
    for name in ("tokens", "position_ids"):
        if batch.get(name) is not None:
            setattr(batch[name], ATTRIBUTE, documents)


def attached_documents(*tensors: Tensor | None) -> VisibleRanges | None:
    """The documents attached to any of a batch's tensors."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and hasattr(tensor, ATTRIBUTE):
            return getattr(tensor, ATTRIBUTE)
    return None


def masks_documents(arguments) -> bool:
    """Whether a run's arguments ask for attention within documents."""
    names = ("reset_attention_mask", "dataloader_inter_document_masking")
    return any(getattr(arguments, name, False) for name in names)


def check_documents(args) -> None:
    """Refuse packed documents in runs that do not know where documents begin.

    Raises:
        ConfigError: names the option and what to do.
    """
    if not masks_documents(args):
        return
    asked = "--dataloader-inter-document-masking"
    if getattr(args, "reset_attention_mask", False):
        asked = "--reset-attention-mask"
    if args.seq_length is not None and args.seq_length > MOST_TOKENS:
        raise ConfigError(
            f"{asked} does not work with --seq-length {args.seq_length}: use at most {MOST_TOKENS}"
        )
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            f"{asked} does not work with --overlap-moe-expert-parallel-comm, which does not tell "
            "layers what is packed: leave one of them out"
        )
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    if asked != "--reset-attention-mask":
        _check_stages(args, asked, stages)
        _check_expert_loss(args, asked)
        return
    if stages > 1:
        raise ConfigError(
            f"--reset-attention-mask does not work with --pipeline-model-parallel-size {stages}: "
            "stages without tokens do not know where documents end; use 1, or, where Megatron has it, two "
            "stages and --dataloader-inter-document-masking, which finds documents in their indexed dataset"
        )
    if getattr(args, "reset_position_ids", False):
        return
    kind = getattr(args, "position_embedding_type", "rope")
    if kind not in ("rope", "yarn", "none"):
        raise ConfigError(
            f"--reset-attention-mask needs --reset-position-ids with --position-embedding-type "
            f"{kind}: documents are recognized by position ids that restart, which change what such a model "
            "learns; give both"
        )


def _check_stages(args, asked: str, stages: int) -> None:
    """Refuse pipelines in which Megatron does not tell all stages where documents begin."""
    if stages == 1:
        return
    pipeline = f"--pipeline-model-parallel-size {stages}"
    virtual = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    if stages > 2 or any((getattr(args, name, None) or 1) > 1 for name in virtual):
        raise ConfigError(
            f"{asked} does not work with {pipeline}"
            f"{' and virtual stages' if stages == 2 else ''}: only the first and the last stage read data, "
            "and the others do not know where documents end; use at most 2 stages, none of them virtual"
        )
    size = getattr(args, "micro_batch_size", None) or 1
    if size > 1:
        raise ConfigError(
            f"{asked} does not work with {pipeline} and --micro-batch-size {size}: a stage sends one "
            "sequence of all samples, and the next expects them apart; use --micro-batch-size 1"
        )


def _check_expert_loss(args, asked: str) -> None:
    """Refuse a balancing loss of each sample where samples cannot be told apart."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    size, ranks = (
        getattr(args, name, None) or 1 for name in ("micro_batch_size", "context_parallel_size")
    )
    if getattr(args, "num_experts", None) and "seq_aux_loss" in kinds and size > 1 and ranks > 1:
        raise ConfigError(
            f"--moe-router-load-balancing-type seq_aux_loss does not work with {asked}, --micro-batch-size "
            f"{size} and --context-parallel-size {ranks}: it is a loss of each sample, and a rank's tokens "
            "are of all of them; use --micro-batch-size 1"
        )


def fill_in_documents(args) -> list[str]:
    """With ``--reset-attention-mask``, have the data loader's position ids say where documents begin.

    Returns:
        Lines for the log.
    """
    if not getattr(args, "reset_attention_mask", False) or getattr(
        args, "reset_position_ids", False
    ):
        return []
    args.reset_position_ids = True
    return [
        "--reset-attention-mask: position ids restart with documents (as with --reset-position-ids), "
        "which says where they are; rotary embeddings do not look at them"
    ]


def wrap_forward(original):
    """``GPTModel.forward`` or ``build_schedule_plan`` that takes tensors of the model's own layout only, and
    hands documents to the layers as :class:`DocumentParams`."""
    signature = inspect.signature(original)

    def forward(self, *args, **kwargs):
        if not is_active(self.config):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        check_parts(self, given)
        params = given.get("packed_seq_params")
        documents = attached_documents(given.get("input_ids"), given.get("position_ids"))
        if params is not None:
            documents = _agreed(documents, _documents_of(params))
        given["packed_seq_params"] = None
        if documents is not None:
            _check_length(documents, given.get("input_ids"), getattr(self, "pg_collection", None))
            given["packed_seq_params"] = made = packed_seq_params_of(documents)
            if getattr(self.config, "context_parallel_size", 1) == 1 and hasattr(
                params, "tokens_per_sample"
            ):
                # MoE layers split samples by it. With context parallelism a rank's tokens mix samples.
                made.tokens_per_sample = params.tokens_per_sample
        return original(*bound.args, **bound.kwargs)

    return forward


def _documents_of(params) -> VisibleRanges:
    is_ours = isinstance(params, DocumentParams)
    return params.documents if is_ours else documents_from_packed_seq_params(params)


def _agreed(attached: VisibleRanges | None, given: VisibleRanges) -> VisibleRanges:
    """The documents of ``packed_seq_params``, which must be those that the batch carries, if it does."""
    if attached is None or attached is given:
        return given
    if not attached.start.equal(given.start.to(attached.start)):
        raise ConfigError(
            "packed_seq_params have other documents than the position ids of the batch: give one of them, or "
            "slice the batch with documents=False"
        )
    return given


def _check_length(documents: VisibleRanges, tokens: Tensor | None, pg_collection) -> None:
    """Raise :class:`ConfigError` if documents are of another length than the sequence: the rotary table is
    made for theirs. A pipeline stage without tokens cannot tell."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or pg_collection is None:
        return
    group = getattr(pg_collection, "cp", None)
    length = tokens.shape[1] * (1 if group is None else group.size())
    if documents.seq_length != length:
        raise ConfigError(
            f"documents are of {documents.seq_length} tokens, but the sequence of {length} (over all "
            "context-parallel ranks): give the documents of this batch"
        )


def documents_from_packed_seq_params(params: PackedSeqParams) -> VisibleRanges:
    """Documents of Megatron's packed sequences, one after the other in one sequence. Read on the host.

    Raises:
        ConfigError: there is padding between them, keys have other ones, or they are for another
            context-parallel group.
    """
    if not isinstance(params, PackedSeqParams):
        raise ConfigError(
            f"packed_seq_params are a {type(params).__name__}: give Megatron's PackedSeqParams, or the "
            "result of megatron_mtraining.megatron.packed_documents.packed_seq_params_of(documents)"
        )
    ends = params.cu_seqlens_q
    if ends is None or getattr(params, "qkv_format", None) != "thd":
        raise ConfigError(
            "packed_seq_params are given without cu_seqlens_q: attention backend mtraining takes packed "
            "sequences (thd) with cu_seqlens_q"
        )
    if getattr(params, "cp_group", None) is not None:
        raise ConfigError(
            "packed_seq_params are given with a cp_group: attention backend mtraining does not "
            "support hybrid context parallelism"
        )
    check_values(cu_seqlens_q=ends)
    length = int(ends.flatten()[-1]) if ends.numel() else 0
    documents = VisibleRanges.from_cu_seqlens(ends, length)
    for name, why in (
        ("cu_seqlens_q_padded", "does not support padding between documents"),
        ("cu_seqlens_kv", "supports self-attention only"),
        ("cu_seqlens_kv_padded", "does not support padding between documents"),
    ):
        others = getattr(params, name, None)
        if others is None or others is ends:
            continue
        check_values(**{name: others})
        if others.tolist() != ends.tolist():
            raise ConfigError(
                f"{name} of packed_seq_params differs from cu_seqlens_q: attention backend mtraining {why}"
            )
    _check_seq_idx(getattr(params, "seq_idx", None), documents)
    return documents


def _check_seq_idx(index: Tensor | None, documents: VisibleRanges) -> None:
    """Megatron's number of each token's document, where it is given, tells the same bounds."""
    if index is None:
        return
    index = index.flatten()
    bounds = documents.start[0].diff() != 0
    if len(index) != documents.seq_length or not (index.diff() != 0).equal(bounds):
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
        packs = getattr(arguments, "dataloader_inter_document_masking", False)
        flag = "--dataloader-inter-document-masking" if packs else "--reset-attention-mask"
        raise ConfigError(
            f"the {place} must keep documents apart ({flag}), but no documents are "
            "given: give the model the tensors that get_batch_on_this_cp_rank has returned, or the result of "
            "megatron_mtraining.megatron.packed_documents.packed_seq_params_of(documents)"
        )
    return None
