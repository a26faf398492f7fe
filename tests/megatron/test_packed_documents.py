# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Packed documents on their way from Megatron's batch to core attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron import decoder, packed_documents
from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.visibility import VisibleRanges
from tests.support.megatron_cases import (
    BATCH_SEQUENCE,
    check,
    make,
    operands,
    parse,
    run_with,
    whole_batch,
)

LENGTHS = [[1, 130, 64, 573], [300, 468]]


def restarting_ids() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in own]) for own in LENGTHS])


class Model:
    """As much of a GPTModel as the wrapper of its forward looks at."""

    def __init__(self, backend=AttnBackend.mtraining):
        self.config = SimpleNamespace(attention_backend=backend)

    def forward(self, input_ids, position_ids, attention_mask, labels=None, packed_seq_params=None):
        return packed_seq_params

    wrapped = packed_documents.wrap_forward(forward)


def test_the_model_gives_layers_the_documents_of_position_ids(monkeypatch):
    batch = whole_batch(position_ids=restarting_ids())
    run_with(monkeypatch, AttnBackend.mtraining)
    assert Model().wrapped(batch["tokens"], batch["position_ids"], None) is None
    run_with(monkeypatch, AttnBackend.mtraining, reset_attention_mask=True)
    params = Model().wrapped(batch["tokens"], batch["position_ids"], None)
    expected = VisibleRanges.from_lengths(LENGTHS, BATCH_SEQUENCE).start
    assert torch.equal(params.documents.start, expected)
    assert params.qkv_format == "sbhd" and params.max_seqlen_q == BATCH_SEQUENCE
    assert packed_documents.documents_for_layer(params, "attention") is params.documents
    assert Model().wrapped(None, None, None, packed_seq_params=params).documents is params.documents
    assert Model(AttnBackend.auto).wrapped(batch["tokens"], None, None) is None
    wrong = restarting_ids()
    wrong[1, 400] += 1
    with pytest.raises(ConfigError, match="token 400 of batch entry 1"):
        Model().wrapped(batch["tokens"], wrong, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_of_experts_can_tell_samples_apart(ranks):
    """Where a rank has whole samples; Megatron-LM 0.19 says how long they are."""
    ends = torch.tensor([0, 100, 768], dtype=torch.int32)
    given = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    given.tokens_per_sample = 384
    model = Model()
    model.config.context_parallel_size = ranks
    made = model.wrapped(None, None, None, packed_seq_params=given)
    assert getattr(made, "tokens_per_sample", None) == (384 if ranks == 1 else None)


def test_megatrons_packed_sequences_become_documents():
    ends = torch.tensor([0, 100, 101, 768, 768], dtype=torch.int32)
    packed = dict(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=667)
    ours = Model().wrapped(None, None, None, packed_seq_params=PackedSeqParams(**packed))
    expected = VisibleRanges.from_lengths([100, 1, 667], 768).start
    assert torch.equal(ours.documents.start, expected) and ours.max_seqlen_kv == 768
    for wrong, message in (
        (dict(cu_seqlens_q_padded=ends + 1), "cu_seqlens_kv of packed_seq_params .* differs"),
        (dict(qkv_format="sbhd"), "thd"),
        (dict(cu_seqlens_q=None), "cu_seqlens_q"),
        (dict(cu_seqlens_q=ends + 1, cu_seqlens_kv=None), "ascend from 0"),
        (dict(cu_seqlens_kv=ends[1:]), "cu_seqlens_kv of packed_seq_params .* differs"),
        (
            dict(cu_seqlens_kv_padded=ends.long() + 1),
            "cu_seqlens_kv of packed_seq_params .* differs",
        ),
        (dict(cu_seqlens_q=ends[:0], cu_seqlens_kv=None), "ascend from 0"),
        (dict(cu_seqlens_q=[0, 768]), "cu_seqlens_q is a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            params = PackedSeqParams(**{**packed, **wrong})
            Model().wrapped(None, None, None, packed_seq_params=params)
    padded = torch.tensor([0, 128, 192, 768, 768], dtype=torch.int32)
    packed |= dict(cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    ends[3:] = 600
    ours = Model().wrapped(None, None, None, packed_seq_params=PackedSeqParams(**packed))
    wanted = [*range(100), 128, *range(192, 192 + 499)]
    assert ours.documents.rows.tolist() == wanted and ours.documents.seq_length == 768
    with pytest.raises(ConfigError, match="documents are a list"):
        packed_documents.packed_seq_params_of([100, 668])


def test_padding_to_whole_blocks_is_told_to_stages_of_one_length():
    ends = torch.tensor([0, 100, 744], dtype=torch.int32)
    given = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_q_padded=ends)
    model = Model()
    model.mtraining_borders = SimpleNamespace(padded=lambda length: 768)
    made = model.wrapped(None, None, None, packed_seq_params=given)
    assert made.lengths == (100, 644) and made.documents.seq_length == made.max_seqlen_q == 768
    model.config.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="744 tokens together.* to 768.*variable_seq_lengths"):
        model.wrapped(None, None, None, packed_seq_params=given)
    model.config.variable_seq_lengths = True
    assert model.wrapped(None, None, None, packed_seq_params=given).lengths


def test_a_document_s_number_of_each_token_must_agree():
    ends = torch.tensor([0, 100, 101, 768, 768], dtype=torch.int32)
    given = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends)
    right = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([100, 1, 667]))[None]
    for index, agrees in ((right, True), (right.roll(1), False), (right[:, :384], False)):
        given.seq_idx = index
        if agrees:
            assert Model().wrapped(None, None, None, packed_seq_params=given).documents
            continue
        with pytest.raises(ConfigError, match="seq_idx of packed_seq_params tells other documents"):
            Model().wrapped(None, None, None, packed_seq_params=given)


class Decoder(Model):
    """As much of a TransformerBlock as the wrapper of its forward looks at."""

    pre_process = post_process = True

    def forward(self, hidden_states, attention_mask, packed_seq_params=None):
        return packed_seq_params

    wrapped = decoder.wrap_forward(forward)


def test_documents_of_another_length_are_named_by_the_decoder(group):
    params = packed_documents.packed_seq_params_of(VisibleRanges.from_lengths([100, 668], 768))
    block = Decoder()
    block.pg_collection = SimpleNamespace(cp=group(0, 2), tp=group(0, 2))
    block.config.sequence_parallel = True
    assert block.wrapped(torch.zeros(192, 1, 8), None, packed_seq_params=params) is params
    with pytest.raises(ConfigError, match="documents are of 768 tokens, but the sequence of 1536"):
        block.wrapped(torch.zeros(384, 1, 8), None, packed_seq_params=params)


def test_a_forward_of_a_trainer_s_own_reaches_layers_with_documents(group):
    """Which does not pass the model's: of Megatron's packed sequences."""
    ends = torch.tensor([0, 100, 768], dtype=torch.int32)
    block = Decoder()
    block.pg_collection = SimpleNamespace(cp=None, tp=None)
    block.config.sequence_parallel = False
    given = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    made = block.wrapped(torch.zeros(768, 1, 8), None, packed_seq_params=given)
    assert torch.equal(made.documents.start, VisibleRanges.from_lengths([100, 668], 768).start)


@pytest.mark.parametrize("wrong", [VisibleRanges.from_lengths([768], 768), "thd"])
def test_what_are_no_packed_seq_params_is_refused(wrong):
    with pytest.raises(ConfigError, match="packed_seq_params are a .*packed_seq_params_of"):
        Model().wrapped(None, None, None, packed_seq_params=wrong)


def test_documents_that_do_not_reach_a_layer_are_missed(monkeypatch):
    query, key, value = operands()
    args = SimpleNamespace(attention_backend=AttnBackend.mtraining, reset_attention_mask=True)
    attention = make()
    monkeypatch.setattr(packed_documents, "training_arguments", lambda: args)
    with pytest.raises(ConfigError, match="--reset-attention-mask.* no documents are given"):
        attention(query, key, value, None)


def test_a_layer_keeps_documents_apart():
    query, key, value = operands()
    length, batch = query.shape[:2]
    documents = VisibleRanges.from_lengths([[10, length - 10]] * batch, length)
    attention = make()
    before = attention(
        query, key, value, None, packed_seq_params=packed_documents.packed_seq_params_of(documents)
    )
    key, value = key.clone(), value.clone()
    key[:10], value[:10] = 3, 5
    after = attention(
        query, key, value, None, packed_seq_params=packed_documents.packed_seq_params_of(documents)
    )
    assert torch.equal(before[10:], after[10:]) and not torch.equal(before[:10], after[:10])


def test_where_documents_cannot_be_had_is_said_early():
    args = parse(reset_attention_mask=True)
    lines = check(args)
    assert args.reset_position_ids is True
    assert "--reset-position-ids" in "\n".join(lines)
    check(
        parse(
            reset_attention_mask=True,
            reset_position_ids=True,
            position_embedding_type="learned_absolute",
        )
    )
    two = dict(dataloader_inter_document_masking=True, pipeline_model_parallel_size=2)
    check(parse(**two))
    for given, message in (
        (dict(pipeline_model_parallel_size=4), "--pipeline-model-parallel-size 4: only the first"),
        (dict(virtual_pipeline_model_parallel_size=2), "2 and virtual stages"),
        (dict(num_virtual_stages_per_pipeline_rank=2), "2 and virtual stages"),
        (dict(micro_batch_size=2), "--pipeline-model-parallel-size 2 and --micro-batch-size 2"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            check(parse(**{**two, **given}))
    own = dict(dataloader_inter_document_masking=True, micro_batch_size=2, num_experts=2)
    own |= dict(moe_router_load_balancing_type=["seq_aux_loss"], context_parallel_size=2)
    with pytest.raises(ArgumentsError, match="seq_aux_loss does not work with"):
        check(parse(**own))
    check(parse(**{**own, "context_parallel_size": 1}))
    predicts = dict(pipeline_model_parallel_size=2, mtp_num_layers=1)
    check(parse(reset_attention_mask=True, **predicts))
    virtual = {**predicts, "num_virtual_stages_per_pipeline_rank": 2}
    for given, message in (
        (dict(pipeline_model_parallel_size=2), "--pipeline-model-parallel-size 2: only the first"),
        ({**predicts, "pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 4"),
        (virtual, "--pipeline-model-parallel-size 2"),
        (dict(position_embedding_type="learned_absolute"), "needs --reset-position-ids"),
        (dict(overlap_moe_expert_parallel_comm=True), "--overlap-moe-expert-parallel-comm"),
        (dict(seq_length=2**25), "--seq-length 33554432"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            check(parse(reset_attention_mask=True, **given))
