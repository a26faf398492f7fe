# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's own dataset over what ``mtraining data prepare`` writes: its samples are those packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_mtraining.tools import cli
from tests.support.data_cases import EOD, make_documents, save_tokenizer, write_jsonl

pytest.importorskip("transformers")
SEQ = 128


@pytest.fixture(scope="module", params=[{}, {"pad_token": "<eod>"}], ids=["no-pad", "eod-pads"])
def prepared(request, tmp_path_factory):
    """Prefix, tokenizer as Megatron loads it, and the samples."""
    from megatron.core.tokenizers import MegatronTokenizer

    folder = tmp_path_factory.mktemp("data")
    tokenizer = save_tokenizer(folder / "tokenizer", eos_token="<eod>", **request.param)
    given = write_jsonl(folder / "a.jsonl", make_documents(300, longest=1000))
    words = ["data", "prepare", given, "--tokenizer", tokenizer, "--seq-length", SEQ]
    words += ["--output", folder / "out", "--workers", 1]
    assert cli.main([str(word) for word in words]) == 0
    ours = np.fromfile(folder / "out.bin", np.uint16).reshape(-1, SEQ).astype(np.int64)
    theirs = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(tokenizer), metadata_path={"library": "huggingface"}
    )
    assert theirs.eod == EOD
    return folder / "out", theirs, ours


def build(prepared, cache, sizes=(None, None, None), split="1,0,0", **options):
    prefix, tokenizer, _ = prepared
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQ,
        blend=([str(prefix)], None),
        split=split,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        **{**flags, **options},
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()


def numbers(dataset, rows) -> list[int]:
    """Which of our samples each of the dataset's is; fails if one is none of ours."""
    known = {row.tobytes(): number for number, row in enumerate(rows)}
    assert len(known) == len(rows)
    return [known[dataset[n]["tokens"].numpy().tobytes()] for n in range(len(dataset))]


def test_samples_are_those_that_were_packed(prepared, tmp_path):
    rows = prepared[2]
    train = build(prepared, tmp_path)[0]
    assert len(train) == len(rows) - 1
    order = numbers(train, rows)
    assert len(set(order)) == len(order) and order != sorted(order)
    starts = set(rows[:, 0].tolist())
    for n in range(len(train)):
        tokens, labels = train[n]["tokens"], train[n]["labels"]
        assert torch.equal(labels[:-1], tokens[1:]) and labels[-1].item() in starts


def test_samples_stay_so_over_several_epochs(prepared, tmp_path):
    rows = prepared[2]
    wanted = int(2.5 * len(rows))
    order = numbers(build(prepared, tmp_path, (wanted, None, None))[0], rows)
    assert len(order) >= wanted
    counts = np.bincount(order, minlength=len(rows))
    assert 2 <= counts.min() and counts.max() <= 3


def test_splits_fall_between_samples(prepared, tmp_path):
    rows = prepared[2]
    train, valid, test = build(prepared, tmp_path, split="80,20,0")
    assert test is None
    middle = round(0.8 * len(rows))
    assert max(numbers(train, rows)) < middle <= min(numbers(valid, rows))


def test_documents_are_told_apart_by_their_ends(prepared, tmp_path):
    rows = prepared[2]
    train = build(prepared, tmp_path)[0]
    for n in range(len(train)):
        sample = train[n]
        tokens = sample["tokens"]
        # A token belongs to the document whose end comes next, the end itself to the one before.
        document = (tokens == EOD).long().cumsum(0) - (tokens == EOD).long()
        first = torch.stack([(document == d).nonzero()[0, 0] for d in document])
        assert torch.equal(sample["position_ids"], torch.arange(SEQ) - first)
        assert torch.equal(sample["loss_mask"], (tokens != EOD).float())
        seen = (document[:, None] == document[None, :]) & torch.ones(SEQ, SEQ).tril().bool()
        assert torch.equal(sample["attention_mask"][0], ~seen)
    assert (rows == EOD).sum(1).max() > 1
