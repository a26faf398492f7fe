# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What models and attentions are given beside hidden states: another layout and other masks are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_mtraining import ConfigError
from megatron_mtraining.layout import Part, part_of, stripe
from megatron_mtraining.megatron.batch import slice_batch
from megatron_mtraining.megatron.inputs import check_mask, check_parts
from megatron_mtraining.megatron.packed_documents import packed_seq_params_of
from megatron_mtraining.visibility import VisibleRanges
from tests.support.gpt_models import build, draw_batch, start
from tests.support.megatron_cases import BATCH_SEQUENCE, BLOCK, make, operands, whole_batch
from tests.support.ranks import run_ranks

LENGTHS = [256, 128, 384]
"""Of documents in a pack, multiples of twice the ranks: code for Megatron's layout can slice them."""


def zigzag(tensor: torch.Tensor, lengths: list[int], rank: int, size: int) -> torch.Tensor:
    """A rank's part of packed documents ``[b, s]`` in Megatron's layout, document by document."""
    parts = []
    for document in tensor.split(lengths, 1):
        pieces = document.chunk(2 * size, 1)
        parts += [pieces[rank], pieces[2 * size - 1 - rank]]
    return torch.cat(parts, 1)


def packed(lengths: list[int]) -> PackedSeqParams:
    """As frameworks that pad their documents give it: the padded lengths are the lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return PackedSeqParams(
        qkv_format="thd", max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
        **dict.fromkeys(names, ends),
    )  # fmt: skip


def said(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    return ""


def layouts_that_a_model_meets(rank, size):
    start(context_parallel_size=size)
    model = build(
        dict(block_size=BLOCK, slash=BATCH_SEQUENCE, vertical=0), dict(context_parallel_size=size)
    )
    batch = draw_batch(1, BATCH_SEQUENCE)
    one = [BATCH_SEQUENCE]
    errors = {}
    for name, lengths, params in (
        ("packed", LENGTHS, packed(LENGTHS)),
        (
            "ours",
            LENGTHS,
            packed_seq_params_of(VisibleRanges.from_lengths(LENGTHS, BATCH_SEQUENCE)),
        ),
        ("plain", one, None),
    ):
        tokens, labels = (zigzag(batch[each], lengths, rank, size) for each in ("tokens", "labels"))
        given = dict(labels=labels, packed_seq_params=params)
        errors[name] = said(model, tokens, None, None, **given)
        errors[f"{name}, schedule"] = said(model.build_schedule_plan, tokens, None, None, **given)
    own = slice_batch(dict(batch), rank, size, BLOCK)
    tokens, labels = own["tokens"], own["labels"]
    given = dict(labels=labels, packed_seq_params=packed(LENGTHS))
    errors["right"] = said(model, tokens, own["position_ids"], None, **given)
    errors["right"] += said(model.eval(), tokens, torch.arange(5), None, labels=labels)
    errors["copy"] = said(model, tokens.clone(), None, None, labels=labels)
    errors["labels"] = said(model, tokens, None, None, labels=tokens.roll(-1, 1))
    other = slice_batch(dict(batch), rank, size, 2 * BLOCK)
    errors["blocks"] = said(model, other["tokens"], None, None)
    errors["embeddings"] = said(model, None, None, None, decoder_input=torch.zeros(384, 1, 128))
    return errors


def test_tokens_that_other_code_has_sliced_are_refused_on_every_rank():
    for rank, errors in enumerate(run_ranks(2, layouts_that_a_model_meets)):
        assert errors.pop("right") == ""
        blocks = errors.pop("blocks")
        assert f"the part of rank {rank} of 2, in blocks of 128" in blocks and "of 64" in blocks
        assert "sliced the labels" in errors["labels"]
        assert "sliced the decoder_input" in errors["embeddings"]
        for name, error in errors.items():
            assert "verl" in error and "slice_batch" in error, name


def model(kind="rope", pre_process=True, **part):
    expected = Part(1, 2, BLOCK, 2)._replace(**part) if part is not None else None
    return SimpleNamespace(
        mtraining_part=expected, position_embedding_type=kind, pre_process=pre_process
    )


def test_a_stage_looks_at_what_it_uses():
    own = slice_batch(whole_batch(padding_mask=torch.zeros(2, BATCH_SEQUENCE)), 1, 2, BLOCK)
    own["input_ids"] = own.pop("tokens")
    for kind in ("rope", "learned_absolute"):
        check_parts(model(kind), own)
    check_parts(model(), {**own, "position_ids": own["position_ids"].clone()})
    for name in ("input_ids", "position_ids", "labels", "padding_mask"):
        with pytest.raises(ConfigError, match=f"sliced the {name} "):
            check_parts(model("learned_absolute"), {**own, name: own[name].clone()})
    nothing = dict.fromkeys(own)
    check_parts(model(pre_process=False), {**nothing, "decoder_input": torch.zeros(1)})
    check_parts(model(pre_process=False), {**nothing, "labels": own["labels"]})
    embeddings = stripe(torch.zeros(BATCH_SEQUENCE, 1, 8), 1, 2, BLOCK)
    check_parts(model(), {"decoder_input": embeddings})
    assert part_of(embeddings) == model().mtraining_part


@pytest.mark.parametrize("wrong", [dict(cp_rank=0), dict(inner=1), dict(cp_size=4)])
def test_a_batch_of_another_layout_is_refused(wrong):
    own = slice_batch(whole_batch(), 1, 2, BLOCK)
    with pytest.raises(ConfigError, match="are the part of rank 1 of 2, .* computes the part of"):
        check_parts(model(**wrong), {"input_ids": own["tokens"]})
    alone = SimpleNamespace(**{**vars(model()), "mtraining_part": None})
    with pytest.raises(ConfigError, match="computes the whole sequence"):
        check_parts(alone, {"input_ids": own["tokens"]})
    check_parts(alone, {"input_ids": whole_batch()["tokens"]})


def causal(length: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Megatron's mask, True where a key is hidden."""
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    if starts is not None:
        mask = mask | (torch.arange(length) < starts[:, None, :, None])
    return mask


def test_an_explicit_mask_is_what_attention_does_by_itself():
    query, key, value = operands()
    length, batch = query.shape[:2]
    documents = VisibleRanges.from_lengths([[10, length - 10], [length]], length)
    params = packed_seq_params_of(documents)
    attention = make()
    expected = attention(query, key, value, None)
    for mask in (causal(length), causal(length).expand(batch, -1, -1, -1)):
        assert torch.equal(attention(query, key, value, mask), expected)
    apart = causal(length, documents.start)
    attention(query, key, value, apart, packed_seq_params=params)
    padding = causal(length).clone()
    padding[..., 100:] = True
    for mask, given in (
        (apart, None),  # though it was right with documents
        (causal(length), params),
        (padding, None),
        (~causal(length), None),
        (causal(length).float(), None),
        (torch.ones(batch, length) > 0, None),
        (causal(length)[..., :-1], None),
    ):
        with pytest.raises(ConfigError, match="attention of layer 3 is given an attention_mask"):
            attention(query, key, value, mask, packed_seq_params=given)


def test_a_mask_has_the_rows_of_its_rank():
    mask = causal(BATCH_SEQUENCE)
    for rank in range(2):
        own = slice_batch(whole_batch(attention_mask=mask), rank, 2, BLOCK)["attention_mask"]
        query = torch.zeros(BATCH_SEQUENCE // 2, 2, 1)
        cp = SimpleNamespace(rank=rank, world=2, inner=2)
        check_mask(own, query, None, cp, BLOCK, "attention")
        cp.rank = 1 - rank
        with pytest.raises(ConfigError, match="attention_mask"):
            check_mask(own.clone(), query, None, cp, BLOCK, "attention")
