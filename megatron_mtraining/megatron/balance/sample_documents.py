# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Lengths of the documents of samples, before the samples are loaded, from Megatron's GPTDataset and
BlendedDataset.

The lengths are equal to the lengths that layers will get. With ``--reset-attention-mask``, each
end-of-document token ends a document; the tokens of the sample are searched for them. With
``--dataloader-inter-document-masking``, each sequence of the index ends a document; no tokens are read.
Without either option, a sample is one document. A document that continues in the next sample counts in each
sample with the part that is in the sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...balance.plan import Samples
from ...config import ConfigError
from ..document_options import masks_documents


class SampleDocuments:
    """Returns properties of the samples of a training dataset, by their numbers.

    Args:
        dataset: a GPTDataset, or a BlendedDataset of them; or of classes derived from them.
        args: Megatron-LM's arguments.

    Raises:
        ConfigError: a dataset of another class.
    """

    def __init__(self, dataset, args):
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.gpt_dataset import GPTDataset

        self.blend = dataset if isinstance(dataset, BlendedDataset) else None
        self.parts = [dataset] if self.blend is None else dataset.datasets
        for part in self.parts:
            if not isinstance(part, GPTDataset):
                raise ConfigError(
                    f"the training dataset is a {type(part).__name__}: --mtraining-batching and "
                    "--mtraining-tuning read the documents of Megatron's GPTDataset and BlendedDataset; "
                    "leave them out"
                )
        self.seq_length = args.seq_length
        self.apart = masks_documents(args)
        self.by_index = bool(getattr(args, "dataloader_inter_document_masking", False))

    def __call__(self, numbers: np.ndarray) -> Samples:
        """Properties of the samples with these numbers, ``[n]``."""
        datasets, own = self._in_datasets(numbers)
        longest = np.full(len(numbers), self.seq_length, np.int64)
        pairs = np.full(len(numbers), self.seq_length * (self.seq_length + 1) / 2)
        if self.apart:
            for at, (dataset, number) in enumerate(zip(datasets.tolist(), own.tolist())):
                lengths = self.lengths(dataset, number)
                longest[at] = lengths.max()
                pairs[at] = (lengths * (lengths + 1.0)).sum() / 2
        return Samples(np.asarray(numbers, np.int64), datasets, longest, pairs)

    def _in_datasets(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's dataset in the blend, and its number there."""
        if self.blend is None:
            return np.zeros(len(numbers), np.int32), np.asarray(numbers)
        if self.blend.dataset_index is None:  # --defer-npy-index-mmap: loaded by the first access
            self.blend[int(numbers[0])]
        return (
            np.asarray(self.blend.dataset_index[numbers], np.int32),
            np.asarray(self.blend.dataset_sample_index[numbers]),
        )

    def lengths(self, dataset: int, number: int) -> np.ndarray:
        """Number of tokens of each document of a sample, by the number of the sample in a dataset: int64.
        Their sum is the sequence length."""
        part = self.parts[dataset]
        ends = []
        position = 0
        for sequence, offset, count in self._sequences(part, number):
            if not self.by_index:
                tokens = part.dataset.get(sequence, offset=offset, length=count)
                last = np.flatnonzero(tokens == np.asarray(part.config.tokenizer.eod, tokens.dtype))
                ends.append(position + last + 1)
            position += count
            if self.by_index:
                ends.append(np.array([position]))
        found = np.concatenate(ends) if ends else np.empty(0, np.int64)
        inner = found[found < min(position, self.seq_length)]
        # A sample that is too short is padded; the padding belongs to the last document.
        return np.diff(np.concatenate(([0], inner, [self.seq_length])))

    def _sequences(self, part, number: int) -> Iterator[tuple[int, int, int]]:
        """The parts of a sample: sequence of the index, first token and number of tokens. Megatron reads one
        more token, for the last label; it is left out here."""
        if part.shuffle_index is None:  # --defer-npy-index-mmap
            part[0]
        row = int(part.shuffle_index[number])
        (first, begin), (last, end) = (
            part.sample_index[row].tolist(),
            part.sample_index[row + 1].tolist(),
        )
        sequences = part.document_index[first : last + 1].tolist()
        if first == last:
            yield sequences[0], begin, end - begin
            return
        lengths = part.dataset.sequence_lengths
        for at, sequence in enumerate(sequences):
            offset = begin if at == 0 else 0
            count = end if at == last - first else int(lengths[sequence]) - offset
            if count:
                yield sequence, offset, count
