# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Packing: each token of each document once, in full samples, by rules that a slow reference follows too."""

import random

import pytest

from megatron_mtraining.tools.data import packing
from tests.support.data_cases import EOD, in_order


def samples(*given):
    return [sample for group in packing.samples(*given) for sample in group]


def lengths(seed, seq_length, count=300):
    rng = random.Random(seed)
    special = [seq_length - 1, seq_length, seq_length + 1, 3 * seq_length - 1, 2 * seq_length, 1]
    drawn = [
        min(4 * seq_length, int(rng.paretovariate(0.9) * seq_length / 10) + 1) for _ in range(count)
    ]
    drawn += special
    rng.shuffle(drawn)
    return drawn


@pytest.mark.parametrize("how", ["in-order", "best-fit"])
@pytest.mark.parametrize("seq_length", [2, 7, 64, 1000])
@pytest.mark.parametrize("pool", [1, 5, 8192])
def test_every_token_is_there_once_and_samples_are_full(how, seq_length, pool):
    given = lengths(seq_length + pool, seq_length)
    found = samples(enumerate(given), seq_length, how, pool)
    full, last = found[:-1], found[-1]
    assert all(sum(map(len, sample)) == seq_length for sample in full)
    assert 0 < sum(map(len, last)) <= seq_length
    pieces = [piece for sample in found for piece in sample]
    for number, length in enumerate(given):
        ours = [piece for piece in pieces if piece.document == number]
        assert [piece.start for piece in ours] == [0, *(piece.stop for piece in ours[:-1])]
        assert ours[-1].stop == length
        assert all(piece.whole == (len(ours) == 1) for piece in ours)
    for sample in found:
        for place, piece in enumerate(sample):
            ends = piece.stop == given[piece.document]
            if place < len(sample) - 1:
                assert piece.eod and ends
            assert ends or not piece.eod


@pytest.mark.parametrize("seq_length", [2, 7, 64])
def test_in_order_is_the_stream_cut_at_every_sample(seq_length):
    given = lengths(seq_length, seq_length)
    documents = [
        [1000 * n + at % 1000 for at in range(length)] for n, length in enumerate(given, 1)
    ]
    found = []
    for sample in samples(enumerate(given), seq_length, "in-order"):
        if sum(map(len, sample)) == seq_length:
            ids = []
            for piece in sample:
                ids += documents[piece.document][piece.start : piece.stop] + [EOD] * piece.eod
            found.append(ids)
    assert sorted(found) == sorted(in_order(documents, seq_length))


def cuts(found, seq_length):
    pieces = [piece for sample in found for piece in sample]
    return sum(not piece.whole and piece.start == 0 and len(piece) < seq_length for piece in pieces)


def test_best_fit_cuts_few_documents():
    rng = random.Random(3)
    given = [rng.randrange(1, 400) for _ in range(5000)]
    few, many = (
        cuts(samples(enumerate(given), 1000, how), 1000) for how in ("best-fit", "in-order")
    )
    assert few < 5 and many > 900


def test_long_documents_are_not_held_back():
    """What is kept in memory does not grow with documents that fill samples by themselves."""
    taken = []

    def documents():
        for number in range(1000):
            taken.append(number)
            yield number, 128

    first = next(packing.samples(documents(), 64, "best-fit"))
    assert [len(sample) for sample in first] == [1, 1] and len(taken) == 1
