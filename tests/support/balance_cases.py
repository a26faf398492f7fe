# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Small datasets of packed documents, and Megatron's datasets over them, for tests of balanced ranks."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

EOD = 99


class Tokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    eod, pad, vocab_size = EOD, 0, 100
    unique_identifiers: ClassVar = OrderedDict({"class": "Tokenizer"})


def long_tailed(number: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of documents with their end-of-document token, most of them short."""
    random = np.random.default_rng(seed)
    return np.exp(random.normal(3.5, 1.2, number)).clip(2, longest).astype(int).tolist()


def write_documents(
    prefix: Path, lengths: list[int], sequence: int | None = None, seed: int = 0, eod: int = EOD
) -> None:
    """An indexed dataset of documents of random tokens that end with ``eod``: a sequence each, or one for
    each ``sequence`` tokens, as ``mtraining data prepare`` writes it."""
    random = np.random.default_rng(seed)
    documents = [np.append(random.integers(1, 90, length - 1), eod) for length in lengths]
    if sequence is not None:
        stream = np.concatenate(documents)
        documents = stream[: len(stream) // sequence * sequence].reshape(-1, sequence)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for each in documents:
        builder.add_document(each, [len(each)])
    builder.finalize(f"{prefix}.idx")


def training_dataset(
    prefixes: list[Path], cache: Path, samples: int | None, sequence: int, **options
):
    """Megatron's training split over datasets, blended if there are several."""
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    weights = None if len(prefixes) == 1 else [1.0 / len(prefixes)] * len(prefixes)
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=sequence,
        blend=([str(prefix) for prefix in prefixes], weights),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        **{**flags, **options},
    )
    sizes = [samples, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
