# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Texts from packages, and the name of their tokens."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.model import corpus, texts


def write_wheel(path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@pytest.fixture
def packages(tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    for number, name in enumerate(corpus.REPOSITORIES):
        files = {
            "b/z.py": f"z{number}\n",
            "a.py": f"a{number}\n",
            "b/tests/t.py": "no\n",
            "c.txt": "no\n",
        }
        write_wheel(folder / name, files)
    essays = {
        "long_context_eval/data/synthetic/json/PaulGrahamEssays.json": json.dumps(
            {"text": "essays"}
        )
    }
    write_wheel(folder / corpus.ESSAYS, essays)
    with tarfile.open(folder / corpus.DATASETS, "w:gz") as datasets:
        for name, text in {
            "moby-dick/data/data.txt": "Ishmael ", "moby-dick/data/chapter_1.txt": "no",
            "sotu/data/1791.txt": "two ", "sotu/data/1790.txt": "one ", "sotu/data/1790.json": "no",
        }.items():  # fmt: skip
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            datasets.addfile(member, io.BytesIO(text.encode()))
    return folder


def test_texts_of_packages(packages, tmp_path, capsys):
    corpus.main([str(packages), "--output", str(tmp_path / "texts")])
    assert (tmp_path / "texts/code.txt").read_text() == "a0\nz0\na1\nz1\na2\nz2\na3\nz3\n"
    assert (tmp_path / "texts/book.txt").read_text() == "Ishmael essays"
    assert (tmp_path / "texts/speech.txt").read_text() == "one two "
    assert "book.txt: 14 bytes, SHA-256" in capsys.readouterr().out


def test_missing_package_is_named(packages, tmp_path):
    (packages / corpus.ESSAYS).unlink()
    with pytest.raises(SystemExit, match=corpus.ESSAYS):
        corpus.main([str(packages), "--output", str(tmp_path / "texts")])
    assert not (tmp_path / "texts").exists()


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
