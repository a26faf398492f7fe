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
from ..visibility import MOST_TOKENS, VisibleRanges
from .backend import is_active, training_arguments
from .borders import Borders, whole_sequence
from .checks import is_from
from .layer_pattern import has_recurrent_layers


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


APART = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
"""Megatron-LM's arguments that ask for attention within documents."""
SFT_ON_ALL_STAGES = (0, 17)
"""The first Megatron that tells all pipeline stages of the sequences of ``--sft``."""
MTP_RECOMPUTES_SEQUENCES = (0, 18)
"""The first Megatron that can run layers of multi-token prediction again which are given packed sequences."""


def masks_documents(arguments) -> bool:
    """Whether a run's arguments ask for attention within documents."""
    return _asked(arguments) is not None


def _asked(arguments) -> str | None:
    """The option that asks for it."""
    names = [name for name in APART if getattr(arguments, name, False)]
    return "--" + names[0].replace("_", "-") if names else None


def check_documents(args) -> None:
    """Refuse packed documents in runs that do not know where documents begin.

    Raises:
        ConfigError: names the option and what to do.
    """
    asked = _asked(args)
    if asked is None:
        return
    if has_recurrent_layers(args):
        raise ConfigError(
            f"{asked} does not work with gated delta nets (--hybrid-layer-pattern G, "
            "--linear-attention-freq): they would run across documents; leave one of them out"
        )
    if args.seq_length is not None and args.seq_length > MOST_TOKENS:
        raise ConfigError(
            f"{asked} does not work with --seq-length {args.seq_length}: use at most {MOST_TOKENS}"
        )
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            f"{asked} does not work with --overlap-moe-expert-parallel-comm, which does not tell "
            "layers what is packed: leave one of them out"
        )
    if (
        getattr(args, "mtp_num_layers", None)
        and getattr(args, "recompute_granularity", None) == "full"
        and not is_from(MTP_RECOMPUTES_SEQUENCES)
    ):
        raise ConfigError(
            f"{asked} does not work with --mtp-num-layers {args.mtp_num_layers} and --recompute-granularity "
            "full: layers of multi-token prediction that this Megatron runs again cannot be told what is "
            "packed; use --recompute-granularity selective, or Megatron 0.18 or later"
        )
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    if asked != "--reset-attention-mask":
        if asked != "--sft" or not is_from(SFT_ON_ALL_STAGES):
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

    A padded sequence is one document: its padding comes last, where no token of it sees it.

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
    ends = _ends(params, "q")
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
    documents = VisibleRanges.from_cu_seqlens(ends, padded, params.cu_seqlens_q.device)
    return packed_seq_params_of(documents, lengths)


def _ends(params: PackedSeqParams, of: str) -> Tensor:
    """``cu_seqlens`` of queries or of keys, with their padding, on the host; those of queries if keys have
    none."""
    for name in (f"cu_seqlens_{of}_padded", f"cu_seqlens_{of}"):
        ends = getattr(params, name, None)
        if ends is not None:
            check_values(**{name: ends})
            return ends.flatten().cpu()
    return _ends(params, "q")


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
            f"the {place} must keep documents apart ({_asked(arguments)}), but no documents are given: give "
            "the model position_ids, or packed_seq_params"
        )
    return None
