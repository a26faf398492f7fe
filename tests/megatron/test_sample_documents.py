# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Documents of samples, looked up before these are read: those that the samples turn out to have."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron.balance.sample_documents import SampleDocuments
from tests.support.balance_cases import long_tailed, training_dataset, write_documents

SEQ = 128
BY_INDEX = "inter_document_masking" in [field.name for field in fields(GPTDatasetConfig)]


@pytest.fixture(autouse=True)
def alone():
    """A process group of this process: the oldest version blends datasets in one only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def look_up(dataset, **apart) -> SampleDocuments:
    given = dict(reset_attention_mask=True, dataloader_inter_document_masking=False)
    return SampleDocuments(dataset, SimpleNamespace(seq_length=SEQ, **{**given, **apart}))


def lengths_by_position_ids(sample) -> list[int]:
    """What attention is told: documents begin where position ids are 0."""
    starts = torch.nonzero(sample["position_ids"] == 0).flatten().tolist()
    return np.diff([*starts, SEQ]).tolist()


@pytest.mark.parametrize(
    "sequence", [None, SEQ], ids=["a document a sequence", "a sample a sequence"]
)
@pytest.mark.parametrize("prefixes", [1, 2])
def test_documents_are_those_that_the_sample_has(sequence, prefixes, tmp_path):
    """Documents longer than a sample too, which go on in the next one, and more than an epoch."""
    names = [tmp_path / f"part{number}" for number in range(prefixes)]
    for number, name in enumerate(names):
        write_documents(name, long_tailed(150, 400, number), sequence, number)
    dataset = training_dataset(names, tmp_path / "cache", 100, SEQ)
    found = look_up(dataset)(np.arange(len(dataset)))
    several, most = 0, 0
    for number in range(len(dataset)):
        expected = lengths_by_position_ids(dataset[number])
        assert sum(expected) == SEQ
        several, most = several + (len(expected) > 1), max(most, *expected)
        assert found.longest[number] == max(expected)
        assert found.pairs[number] == sum(n * (n + 1) / 2 for n in expected)
        assert found.datasets[number] == int(dataset[number].get("dataset_id", 0))
    assert several > 20 and most == SEQ and len(set(found.datasets.tolist())) == prefixes
    assert found.numbers.tolist() == list(range(len(dataset)))
    whole = look_up(dataset, reset_attention_mask=False)(
        np.arange(5, 8)
    )  # without masks, a sample is one
    assert whole.longest.tolist() == [SEQ] * 3 and whole.pairs.tolist() == [SEQ * (SEQ + 1) / 2] * 3


@pytest.mark.skipif(
    not BY_INDEX, reason="this Megatron-Core has no --dataloader-inter-document-masking"
)
def test_documents_by_the_index(tmp_path):
    write_documents(tmp_path / "part", long_tailed(150, 400))
    reset = dict(reset_attention_mask=False, reset_position_ids=False)
    dataset = training_dataset(
        [tmp_path / "part"], tmp_path / "cache", 60, SEQ, inter_document_masking=True, **reset
    )
    documents = look_up(dataset, reset_attention_mask=False, dataloader_inter_document_masking=True)
    several = 0
    for number in range(len(dataset)):
        ends = dataset[number]["cu_seqlens"].unique()
        assert documents.lengths(0, number).tolist() == ends.diff().tolist()
        several += len(ends) > 2
    assert several > 20


def test_indices_that_are_loaded_at_first_access(tmp_path):
    write_documents(tmp_path / "a", long_tailed(150, 400))
    write_documents(tmp_path / "b", long_tailed(150, 400))
    names = [tmp_path / "a", tmp_path / "b"]
    made = training_dataset(names, tmp_path / "cache", 60, SEQ)
    try:
        lazy = training_dataset(names, tmp_path / "cache", 60, SEQ, defer_npy_index_mmap=True)
    except TypeError:
        pytest.skip("this Megatron-Core has no --defer-npy-index-mmap")
    assert lazy.dataset_index is None
    found, expected = look_up(lazy)(np.arange(60)), look_up(made)(np.arange(60))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))


def test_datasets_of_other_classes_are_named():
    with pytest.raises(
        ConfigError, match="the training dataset is a list: --mtraining-batching and"
    ):
        look_up([])
