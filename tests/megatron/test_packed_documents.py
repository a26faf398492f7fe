# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Packed documents on their way from Megatron's batch to core attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining import ConfigError
from megatron_mtraining.layout import token_positions
from megatron_mtraining.megatron import packed_documents
from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.visibility import VisibleRanges
from tests.support.megatron_cases import (
    BATCH_SEQUENCE,
    BLOCK,
    check,
    make,
    operands,
    parse,
    run_with,
    slice_by_megatron,
    whole_batch,
)

LENGTHS = [[1, 130, 64, 573], [300, 468]]


def restarting_ids() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in own]) for own in LENGTHS])


def test_the_batch_carries_documents_where_they_are_kept_apart(monkeypatch, group):
    expected = VisibleRanges.from_lengths(LENGTHS, BATCH_SEQUENCE).start
    for apart in (False, True):
        run_with(monkeypatch, AttnBackend.mtraining, reset_attention_mask=apart)
        ours = slice_by_megatron(whole_batch(position_ids=restarting_ids()), group(1, 2))
        positions = token_positions(BATCH_SEQUENCE, 1, 2, BLOCK)
        assert torch.equal(ours["position_ids"], restarting_ids()[:, positions])
        found = packed_documents.attached_documents(ours["tokens"], None)
        assert (found is None) == (not apart)
        if apart:
            assert torch.equal(found.start, expected)
            assert packed_documents.attached_documents(None, ours["position_ids"]) is found


def test_position_ids_that_are_none_or_wrong_are_named(monkeypatch, group):
    run_with(monkeypatch, AttnBackend.mtraining, reset_attention_mask=True)
    with pytest.raises(ConfigError, match="no position_ids"):
        slice_by_megatron(whole_batch(position_ids=None), group(0, 2))
    wrong = restarting_ids()
    wrong[1, 400] += 1
    with pytest.raises(ConfigError, match="token 400 of batch entry 1"):
        slice_by_megatron(whole_batch(position_ids=wrong), group(0, 2))


def test_lengths_of_documents_stay_in_the_batch(monkeypatch, group):
    run_with(monkeypatch, AttnBackend.mtraining, dataloader_inter_document_masking=True)
    ends = torch.tensor([[0, 100, BATCH_SEQUENCE]], dtype=torch.int32)
    ours = slice_by_megatron(
        whole_batch(cu_seqlens=ends, max_seqlen=torch.tensor([668])), group(1, 3)
    )
    assert ours["cu_seqlens"] is ends and ours["tokens"].shape == (2, BATCH_SEQUENCE // 3)


class Model:
    """As much of a GPTModel as the wrapper of its forward looks at."""

    def __init__(self, backend=AttnBackend.mtraining):
        self.config = SimpleNamespace(attention_backend=backend)

    def forward(self, input_ids, position_ids, attention_mask, labels=None, packed_seq_params=None):
        return packed_seq_params

    wrapped = packed_documents.wrap_forward(forward)


def test_the_model_gives_layers_what_the_batch_carries(monkeypatch, group):
    run_with(monkeypatch, AttnBackend.mtraining, reset_attention_mask=True)
    batch = slice_by_megatron(whole_batch(position_ids=restarting_ids()), group(0, 2))
    params = Model().wrapped(batch["tokens"], batch["position_ids"], None)
    assert params.documents is packed_documents.attached_documents(batch["tokens"])
    assert params.qkv_format == "sbhd" and params.max_seqlen_q == BATCH_SEQUENCE
    assert packed_documents.documents_for_layer(params, "attention") is params.documents
    assert Model().wrapped(None, None, None, packed_seq_params=params).documents is params.documents
    assert Model(AttnBackend.auto).wrapped(batch["tokens"], None, None) is None
    assert Model().wrapped(torch.zeros(1), None, None) is None


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
        (dict(cu_seqlens_q_padded=ends + 1), "padding between documents"),
        (dict(qkv_format="sbhd"), "thd"),
        (dict(cu_seqlens_q=None), "cu_seqlens_q"),
        (dict(cu_seqlens_q=ends + 1), "ascend from 0"),
        (dict(cu_seqlens_kv=ends[1:]), "cu_seqlens_kv of packed_seq_params differs"),
        (dict(cu_seqlens_kv_padded=ends.long() + 1), "cu_seqlens_kv_padded of packed_seq_params"),
        (dict(cu_seqlens_q=ends[:0]), "ascend from 0"),
        (dict(cu_seqlens_q=[0, 768]), "cu_seqlens_q is a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            params = PackedSeqParams(**{**packed, **wrong})
            Model().wrapped(None, None, None, packed_seq_params=params)
    with pytest.raises(ConfigError, match="documents are a list"):
        packed_documents.packed_seq_params_of([100, 668])


def test_two_carriers_of_documents_must_agree(monkeypatch, group):
    run_with(monkeypatch, AttnBackend.mtraining, reset_attention_mask=True)
    tokens = slice_by_megatron(whole_batch(position_ids=restarting_ids()), group(0, 2))["tokens"]
    for lengths in (LENGTHS, [[1, 767], [768]]):
        params = packed_documents.packed_seq_params_of(VisibleRanges.from_lengths(lengths, 768))
        if lengths is LENGTHS:
            assert Model().wrapped(tokens, None, None, packed_seq_params=params).documents
            continue
        with pytest.raises(ConfigError, match="other documents than the position ids of the batch"):
            Model().wrapped(tokens, None, None, packed_seq_params=params)


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


def test_documents_of_another_length_are_named_by_the_model(group):
    """The rotary table is made for their length: it would not fit, or be too short to stripe."""
    params = packed_documents.packed_seq_params_of(VisibleRanges.from_lengths([100, 668], 768))
    model = Model()
    model.pg_collection = SimpleNamespace(cp=group(0, 2))
    assert model.wrapped(torch.zeros(1, 384).long(), None, None, packed_seq_params=params)
    with pytest.raises(ConfigError, match="documents are of 768 tokens, but the sequence of 1536"):
        model.wrapped(torch.zeros(1, 768).long(), None, None, packed_seq_params=params)


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
    for given, message in (
        (dict(pipeline_model_parallel_size=2), "--pipeline-model-parallel-size 2"),
        (dict(position_embedding_type="learned_absolute"), "needs --reset-position-ids"),
        (dict(overlap_moe_expert_parallel_comm=True), "--overlap-moe-expert-parallel-comm"),
        (dict(seq_length=2**25), "--seq-length 33554432"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            check(parse(reset_attention_mask=True, **given))
