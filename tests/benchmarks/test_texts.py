# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Texts and mixed sets of ``benchmarks/model``."""

import numpy as np
import pytest

from benchmarks.model import sets, texts


def test_texts_are_cut_in_order():
    source = texts.Texts({"book": np.arange(1000)}, seed=3)
    joined = np.concatenate((source.cut("book", 600), source.cut("book", 600)))
    length = len(source.streams["book"])
    assert length == 970 and ((np.diff(joined) == 1) | (np.diff(joined) == 1 - length)).all()
    held_out = texts.Texts({"book": np.arange(1000)}, held_out=True)
    assert held_out.cut("book", 5).tolist() == [970, 971, 972, 973, 974]


def test_sets_are_packed_to_the_last_token():
    chosen = sets.SETS["bimodal"]
    packed, again = (sets.pack(chosen.ranges, chosen.seq_length, 60, 1) for _ in range(2))
    assert len(packed.documents) >= 55 and (again.datasets == packed.datasets).all()
    assert all(each.sum() == packed.seq_length for each in packed.documents)
    assert all((a == b).all() for a, b in zip(again.documents, packed.documents))


def test_a_set_has_its_share_of_tokens_in_each_range():
    ranges, rng = sets.SETS["bimodal"].ranges, np.random.default_rng(0)
    drawn = np.array(sets.draw_lengths("code", ranges, 20_000_000, sets.real_lengths(), rng))
    short = drawn[drawn <= 4096].sum() / drawn.sum()
    assert short == pytest.approx(0.5, abs=0.05)
    assert not ((drawn > 4096) & (drawn < 16384)).any()
