# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare`` with inputs of strangers: nothing hangs, and nothing is lost in silence."""

from __future__ import annotations

import json
import os
import sys
import types

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.data import inputs as inputs_module
from megatron_mtraining.tools.data import readers
from tests.support.data_cases import (
    COMPRESS,
    IN_ORDER,
    ids,
    refused,
    report,
    write_jsonl,
)
from tests.support.permissions import permissions_hold

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_hang")


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("out*"))


# Compressed files


@pytest.mark.parametrize("kind", COMPRESS)
def test_what_follows_a_whole_stream_is_not_left_out(kind, prepare, documents, tmp_path, capsys):
    """A second stream is read, one that is damaged or cut is an error, as is anything else."""
    compress = COMPRESS[kind]()
    lines = write_jsonl(tmp_path / "a", documents).read_bytes()
    half = lines.index(b"\n", len(lines) // 2) + 1
    first, second = compress(lines[:half]), compress(lines[half:])
    path = tmp_path / f"a.{kind}"
    path.write_bytes(first + compress(b"") + second)
    assert prepare(path, **IN_ORDER) == 0
    expected = ids(tmp_path / "out")
    assert prepare(tmp_path / "a", format="jsonl", output="b", **IN_ORDER) == 0
    assert ids(tmp_path / "b") == expected
    capsys.readouterr()
    for rest in (b"\xff" + second[1:], b"garbage", b"\n", second[:3], second[:-1]):
        path.write_bytes(first + rest)
        status = prepare(path, output="c")
        refused(capsys, [str(path), "decompressed", f"of {len(first + rest)}"], status)
    assert not list(tmp_path.glob("c.*"))


def test_padding_of_xz_is_no_garbage(prepare, documents, tmp_path):
    compress = COMPRESS["jsonl.xz"]()
    data = compress(write_jsonl(tmp_path / "a", documents).read_bytes())
    (tmp_path / "a.jsonl.xz").write_bytes(data + b"\0" * 8 + data + b"\0" * 4)
    assert prepare(tmp_path / "a.jsonl.xz") == 0
    assert report(tmp_path / "out")["documents"]["read"] == 2 * len(documents)


@pytest.mark.parametrize("name", ["a.jsonl.lzma", "a.parquet.gz", "a.ndjson.zip", "A.JSONL.Z"])
def test_data_in_other_compressions_is_refused_in_folders(name, prepare, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abc" * 200)
    (tmp_path / "in" / name).write_bytes(b"\xff")
    refused(capsys, [name, "decompress it"], prepare(tmp_path / "in"))


def test_checksums_of_parquet_pages_are_compared(prepare, documents, tmp_path, capsys):
    """A changed letter in a page of text that is not compressed is seen by nothing else."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    how = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(pyarrow.table({"text": documents}), path, **how)
    assert prepare(path) == 0
    data = path.read_bytes()
    at = data.index(documents[5].encode())
    path.write_bytes(data[:at] + b"Z" + data[at + 1 :])
    capsys.readouterr()
    refused(capsys, [str(path), "checksum"], prepare(path, output="b"))
    assert not list(tmp_path.glob("b.[bij]*"))


# What cannot be read


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "in"
    (folder / "closed").mkdir(parents=True)
    (folder / "a.txt").write_text("abc" * 200)
    (folder / "closed" / "b.txt").write_text("abc" * 200)
    yield folder
    (folder / "closed").chmod(0o755)


@pytest.mark.parametrize("mode", [0, 0o111, 0o444])
def test_folders_that_cannot_be_read(mode, folder, prepare, tmp_path, capsys):
    """Or listed, or searched: an error, or counted and named."""
    closed = folder / "closed"
    closed.chmod(mode)
    with permissions_hold():
        refused(capsys, [str(closed), "Permission", "--skip-unreadable"], prepare(folder))
        assert not files(tmp_path)
        assert prepare(folder, skip_unreadable=True) == 0
    assert "1 files and folders that cannot be read were left out" in capsys.readouterr().out
    about = report(tmp_path / "out")
    assert about["unreadable"] == 1 and about["unreadable_names"][0].startswith(str(closed))


def test_files_that_cannot_be_read(folder, prepare, tmp_path, capsys):
    file = folder / "closed" / "b.txt"
    file.chmod(0)
    with permissions_hold():
        refused(capsys, [str(file), "Permission", "--skip-unreadable"], prepare(folder))
        status = prepare(file, skip_unreadable=True)  # named: no doubt that it is wanted
        refused(capsys, [str(file), "Permission"], status)
        assert prepare(folder, skip_unreadable=True) == 0
        assert report(tmp_path / "out")["unreadable_names"] == [str(file)]
        (folder / "a.txt").unlink()
        status = prepare(folder, skip_unreadable=True, output="b")
        refused(capsys, ["no file that can be read", str(file)], status)
        (folder / "closed").chmod(0)
        refused(capsys, [str(file), "Permission"], prepare(file, output="b"))


def test_a_tokenizer_that_cannot_be_read(prepare, tokenizer, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    mine = tmp_path / "tokenizer"
    mine.mkdir()
    for file in tokenizer.iterdir():
        (mine / file.name).write_bytes(file.read_bytes())
    (mine / "notes.txt").write_text("of a stranger")
    (mine / "notes.txt").chmod(0)
    with permissions_hold():
        status = prepare(given, tokenizer=mine)
        refused(capsys, ["--tokenizer", "notes.txt", "Permission"], status)


def shards_of_a_copy_that_was_broken_off(folder, names, there):
    """Their index.json, and files in place of shards: none is read before all are found."""
    entries = [{"format": "mds", "raw_data": {"basename": name, "bytes": 4}} for name in names]
    for name in there:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1234")
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


@pytest.mark.parametrize("there", [["a.mds"], []], ids=["one of two", "none of two"])
def test_shards_that_are_not_there_are_named(there, prepare, tmp_path, capsys):
    folder = tmp_path / "in" / "books"
    folder.mkdir(parents=True)
    (folder / "read.txt").write_text("abc" * 200)
    shards_of_a_copy_that_was_broken_off(folder, ["a.mds", "b.mds"], there)
    words = [str(folder / "index.json"), f"{2 - len(there)} shards", "--skip-unreadable"]
    refused(capsys, words, prepare(folder.parent))
    assert not files(tmp_path)


def test_shards_that_are_not_there_are_left_out_on_request(prepare, tmp_path, capsys):
    """And an index.json of shards is no document, wherever its shards are."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "read.txt").write_text("abc" * 200)
    shards_of_a_copy_that_was_broken_off(folder, ["sub/b.mds"], [])
    assert prepare(folder, skip_unreadable=True) == 0
    about = report(tmp_path / "out")
    assert about["unreadable_names"] == [str(folder / "sub" / "b.mds")]
    assert about["documents"]["read"] == 1


@pytest.mark.parametrize(
    "index",
    ["{}", "[1]", '{"shards": 5}', '{"shards": [{"format": "mds"}]}', "[" * 200000,
     '{"shards": [{"format": "mds", "raw_data": {"basename": [5]}}]}'],
    ids=["object", "list", "number", "no names", "deep", "no name"],
)  # fmt: skip
def test_an_index_of_something_else_is_a_document(index, prepare, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "read.txt").write_text("abc" * 200)
    (folder / "index.json").write_text(index)
    assert prepare(folder) == 0
    assert report(tmp_path / "out")["documents"]["read"] == 2


# Pipes and devices


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl.gz", "a.parquet", "a.mds", "/dev/zero", "/dev/full", "/dev/null"]
)
def test_pipes_and_devices_as_input(name, prepare, tmp_path, capsys):
    if not name.startswith("/"):
        os.mkfifo(tmp_path / name)
    refused(capsys, [name, "a pipe or a device", "into a file"], prepare(tmp_path / name))


@pytest.mark.parametrize("name", ["a.model", "tokenizer.json", "pipe"])
def test_pipes_as_tokenizer(name, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    os.mkfifo(tmp_path / name)
    status = prepare(given, tokenizer=tmp_path / name)
    refused(capsys, ["--tokenizer", name, "a pipe or a device"], status)


@pytest.mark.parametrize("suffix", ["bin", "json", "idx"])
def test_pipes_in_place_of_the_output(suffix, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    os.mkfifo(tmp_path / f"out.{suffix}")
    for overwrite in ({}, {"overwrite": True}):
        refused(capsys, [f"out.{suffix}"], prepare(given, **overwrite))
    assert files(tmp_path) == [f"out.{suffix}"]


# Limits


def test_long_documents_are_refused_before_they_take_memory(prepare, tmp_path, capsys):
    """The one limit holds for text, folders that are joined, records, and lines without an end."""
    texts = tmp_path / "in"
    texts.mkdir()
    (texts / "a.txt").write_text("é" * 400)
    (texts / "b.txt").write_text("é" * 400)
    limit = {"document_bytes": 1000, "seq_length": 100}
    assert prepare(texts, **limit) == 0
    status = prepare(texts, output="b", join=True, **limit)
    refused(capsys, [str(texts), "--document-bytes (1000)"], status)
    (texts / "c.txt").write_text("é" * 501)  # cut within a character by the limit
    refused(capsys, ["c.txt", "--document-bytes (1000)"], prepare(texts, output="b", **limit))
    lines = write_jsonl(tmp_path / "a.jsonl", ["fits", "é" * 501])
    status = prepare(lines, output="b", **limit)
    refused(capsys, ["a.jsonl, line 2", "--document-bytes (1000)"], status)
    lines.write_text('{"text": "' + "a" * 10000)
    status = prepare(lines, output="b", part_bytes=1024, **limit)
    refused(capsys, ["a.jsonl, line 1", "8 times --document-bytes"], status)


def test_long_rows_are_refused_before_they_are_decoded(prepare, tmp_path, capsys, monkeypatch):
    """By what the footer says: a file of a few KB can have rows of any size."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def write(*texts):
        path = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table({"text": texts, "x": ["y"] * len(texts)}), path)
        return path

    limit = {"document_bytes": 1000, "seq_length": 100}
    assert prepare(write("a" * 900, "b" * 100), **limit) == 0
    status = prepare(write("a" * 1001, "b"), output="b", **limit)
    refused(capsys, ["a.parquet, row 0", "--document-bytes (1000)"], status)
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)  # nothing is decoded
    for texts in (["a" * 9000], ["a" * 20000, "b"]):
        status = prepare(write(*texts), output="b", **limit)
        last = f"rows 0 to {len(texts) - 1}"
        refused(capsys, ["a.parquet", last, "8 times --document-bytes (1000)"], status)


def test_long_samples_of_mds_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    """By the positions in the shard's header; mosaicml-streaming need not be installed for it."""
    sizes = [10, 9000]
    ends = np.cumsum([4 * (len(sizes) + 2), *sizes]).astype("<u4")
    file = tmp_path / "shard.00000.mds"
    header = np.array([len(sizes)], "<u4").tobytes() + ends.tobytes()
    file.write_bytes(header + bytes(sum(sizes)))

    class Reader:
        samples = len(sizes)

        def validate(self, allow_unsafe_types):
            pass

        def __getitem__(self, number):
            assert number == 0
            return {"text": "short"}

    library = types.ModuleType("streaming.base.format")
    library.reader_from_json = lambda *_: Reader()
    for name in ("streaming", "streaming.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    entry = {"column_names": ["text"], "column_encodings": ["str"]}
    monkeypatch.setattr(readers.shards, "entry", lambda path: entry)
    part = inputs_module.Part((inputs_module.File(str(file), "mds", True),), file.stat().st_size)
    found = readers.read(part, None, True, 1000)
    assert next(found)[1] == "short"
    with pytest.raises(ConfigError, match="mds, sample 1 is longer than 8 times --document-bytes"):
        next(found)


def test_binary_files_that_are_large_are_no_text(prepare, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abc" * 200)
    (tmp_path / "in" / "b").write_bytes(b"\xff" * 5000)
    assert prepare(tmp_path / "in", document_bytes=1000) == 0
    assert report(tmp_path / "out")["skipped_files"] == 1


def test_too_many_parts(prepare, documents, tmp_path, capsys, monkeypatch):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    monkeypatch.setattr(inputs_module, "MOST_PARTS", 5)
    least = -(-given.stat().st_size // 5)
    status = prepare(given, part_bytes=1024)
    refused(capsys, ["--part-bytes is 1024", "5 parts", f"use {least} or more"], status)
    assert prepare(given, part_bytes=least) == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "is empty"), (" ", "is empty"), ("a\0b", "zero byte"), ("s3://bucket/a", "download it")],
)
def test_words_that_are_no_paths(text, named, prepare, tmp_path, capsys, monkeypatch):
    """An empty word, of a shell variable that is not set, is not this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("abc" * 200)
    for run in (lambda: prepare(text), lambda: prepare("a.txt", tokenizer=text)):
        with pytest.raises(SystemExit) as ended:
            run()
        error = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2 and named in error
    assert not files(tmp_path)


# Names


def test_names_that_are_not_text(prepare, documents, tmp_path, capsys):
    """They are read and written as they are, and shown in a way that a terminal can."""
    folder = tmp_path / "in"
    folder.mkdir()
    names = [b"\xff\xfe.txt", b"new\nline.txt", b"\x1b[2J.txt"]
    for name in names:
        (folder / os.fsdecode(name)).write_text("abc" * 200)
        (folder / os.fsdecode(name[:-4])).write_bytes(b"\xff")
    assert prepare(folder, output=os.fsdecode(b"out\xff")) == 0
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out
    assert report(tmp_path / os.fsdecode(b"out\xff"))["documents"]["read"] == 3
    status = prepare(folder / os.fsdecode(names[1][:-4]), output="b")
    refused(capsys, ["new line is not UTF-8"], status)
    status = prepare(folder / os.fsdecode(names[2][:-4]), output="b")
    refused(capsys, ["\\x1b[2J is not UTF-8"], status)
