# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The batch in the striped layout: entries, refusals, and the wrapped ``get_batch_on_this_cp_rank``."""

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining import ConfigError
from megatron_mtraining.layout import token_positions
from megatron_mtraining.megatron import batch as batch_module
from megatron_mtraining.megatron.batch import slice_batch
from tests.support.megatron_cases import (
    BATCH_SEQUENCE,
    BLOCK,
    run_with,
    slice_by_megatron,
    whole_batch,
)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_rank_gets_its_stripes(size):
    for rank in range(size):
        ours = slice_batch(whole_batch(), rank, size, BLOCK)
        positions = token_positions(BATCH_SEQUENCE, rank, size, BLOCK)
        assert torch.equal(ours["position_ids"], positions.repeat(2, 1))
        assert torch.equal(ours["tokens"][1], positions + BATCH_SEQUENCE)
        assert torch.equal(ours["labels"], ours["tokens"] + 1)
        assert torch.equal(ours["loss_mask"], (ours["tokens"] % 3 > 0).float())
        assert ours["attention_mask"] is None


def test_mask_is_sliced_by_query_row():
    mask = torch.ones(1, 1, BATCH_SEQUENCE, BATCH_SEQUENCE).tril() < 0.5
    ours = slice_batch(whole_batch(attention_mask=mask), 1, 2, BLOCK)
    positions = token_positions(BATCH_SEQUENCE, 1, 2, BLOCK)
    assert torch.equal(ours["attention_mask"], mask[:, :, positions])


def test_entries_without_a_sequence_stay():
    numbers = torch.tensor([3, 4])
    ours = slice_batch(whole_batch(dataset_id=numbers, cu_seqlens=None), 0, 2, BLOCK)
    assert ours["dataset_id"] is numbers and ours["cu_seqlens"] is None


def test_a_stage_without_tokens():
    empty = dict.fromkeys(["tokens", "labels", "loss_mask", "position_ids"])
    for documents in (None, True, False):
        assert slice_batch(empty, 0, 2, BLOCK, documents=documents) is empty


@pytest.mark.parametrize("name", batch_module.PACKED)
def test_packed_sequences_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        slice_batch(whole_batch(**{name: torch.tensor([0])}), 0, 2, BLOCK)


def test_another_length_is_refused():
    with pytest.raises(ConfigError, match=r"extra \[2, 100\]"):
        slice_batch(whole_batch(extra=torch.zeros(2, 100)), 0, 2, BLOCK)
    with pytest.raises(ConfigError, match="768"):
        slice_batch(whole_batch(), 0, 5, BLOCK)


def test_every_entry_is_sliced_without_tokens_too():
    """A multimodal model's batch, for one."""
    embeddings = torch.arange(2 * BATCH_SEQUENCE * 3).view(2, BATCH_SEQUENCE, 3)
    ours = slice_batch({"combined_embeddings": embeddings}, 1, 2, BLOCK)["combined_embeddings"]
    assert torch.equal(ours, embeddings[:, token_positions(BATCH_SEQUENCE, 1, 2, BLOCK)])


@pytest.mark.parametrize(("at", "to"), [(130, 0), (130, 300)], ids=["restart", "skip"])
def test_position_ids_of_several_documents_ask_whether_they_are_kept_apart(at, to):
    ids = torch.arange(BATCH_SEQUENCE).repeat(2, 1)
    ids[1, at:] += to - at
    with pytest.raises(ConfigError, match=f"from 129 to {to} at token 130 of batch entry 1.*=True"):
        slice_batch(whole_batch(position_ids=ids), 0, 2, BLOCK)
    found = slice_batch(whole_batch(position_ids=ids.clone()), 0, 2, BLOCK, documents=False)
    assert found["tokens"].shape == (2, BATCH_SEQUENCE // 2)
    slice_batch(whole_batch(position_ids=ids[:1].repeat(2, 1) + 5), 0, 2, BLOCK)


def test_wrapper_stripes_in_a_run_of_ours(monkeypatch, group):
    run_with(monkeypatch, AttnBackend.mtraining)
    ours = slice_by_megatron(whole_batch(), group(1, 3))
    assert torch.equal(ours["position_ids"][0], token_positions(BATCH_SEQUENCE, 1, 3, BLOCK))


@pytest.mark.parametrize("backend", [AttnBackend.auto, None])
def test_wrapper_hands_over_in_other_runs(monkeypatch, backend, group):
    """None: no training arguments at all."""
    calls = []

    def original(batch, cp_group=None):
        calls.append(cp_group)
        return batch

    if backend is None:
        monkeypatch.setattr(batch_module, "training_arguments", lambda: None)
    else:
        run_with(monkeypatch, backend)
    batch, cp_group = whole_batch(), group(0, 2)
    assert batch_module.wrap_get_batch(original)(batch, cp_group) is batch
    assert calls == [cp_group]


def test_hybrid_context_parallelism_is_refused(monkeypatch, group):
    def original(batch, is_hybrid_cp, cp_group=None): ...

    run_with(monkeypatch, AttnBackend.mtraining)
    with pytest.raises(ConfigError, match="hybrid"):
        batch_module.wrap_get_batch(original)(whole_batch(), True, group(0, 2))


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ([torch.zeros(2, 256)], "the batch is a list"),
        (whole_batch(tokens=[[1] * BATCH_SEQUENCE]), "the batch's tokens is a list"),
        (whole_batch(labels=torch.zeros(BATCH_SEQUENCE)), r"labels are of shape \[768\]"),
        (
            whole_batch(attention_mask=torch.ones(768, 768)),
            r"attention_mask is of shape \[768, 768\]",
        ),
    ],
    ids=["list", "tokens in a list", "one dimension", "mask of two"],
)
def test_what_is_no_batch_is_refused(batch, named):
    with pytest.raises(ConfigError, match=named):
        slice_batch(batch, 0, 2, BLOCK)
