# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: what it refuses, in one error; nothing is lost in silence."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from tests.support.data_cases import (
    COMPRESS,
    IN_ORDER,
    ids,
    refused,
    report,
    save_tokenizer,
    write_jsonl,
    write_mds,
)
from tests.support.permissions import permissions_hold

pytest.importorskip("transformers")


BROKEN = {
    "a.jsonl": [
        (b'{"text": "a"}\n{"text": "b"\n', ["line 2", "not JSON"]),
        (b'{"text": "a"}\n\n[1]\n', ["line 3", "not a JSON object"]),
        (
            b'{"text": "a"}\n{"body": "b", "id": 1}',
            ["line 2", "no text", "body, id", "--text-field"],
        ),
        (b'{"text": 5}', ["line 1", "text", "int"]),
        (b'{"input_ids": [1, true]}', ["line 1", "input_ids", "list"]),
        (b'{"text": "a\xff"}', ["line 1", "not JSON"]),
        (b'{"input_ids": [1, 257]}', ["line 1", "257", "--tokenizer"]),
        (b'{"input_ids": [-1]}', ["line 1", "-1"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1]]}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1], [1]]}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 99999999999999999999]}', ["line 1", "input_ids", "list"]),
        (b'{"text": "\\ud800"}', ["line 1", "\\ud800", "surrogate pair"]),
        (b"[" * 200000, ["line 1", "not JSON", "recursion"]),
        (b'{"text": false}', ["line 1", "text", "bool"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1.0], [1, 2]]}', ["line 1", "indices"]),
        (b"", ["a.jsonl", "empty"]),
        (b'{"text": null}\n{"text": ""}\n', ["no documents", "2 are empty"]),
        (b'{"text": "few tokens"}\n', ["--seq-length is 256", "10 tokens"]),
    ],
    "a.jsonl.gz": [
        # With the time in it, the test's name would not be the same in all of pytest's workers.
        (gzip.compress(b'{"text": "abc"}\n' * 99, mtime=0)[:-9], ["a.jsonl.gz", "decompressed"]),
    ],
    "a.JSONL.GZ": [(b"no gzip", ["a.JSONL.GZ", "gzip"])],
    "a.parquet": [(b"PAR1 not", ["a.parquet", "pyarrow"])],
    "a.txt": [(b"\xff\xfe", ["a.txt", "UTF-8", "byte 0"]), (b"", ["a.txt", "empty"])],
    "a.arrow": [(b"ARROW1", [".arrow", "convert"])],
    "a.json": [(b"{}", ["a.json", "--format"])],
    "a.jsonl.lz4": [(b"LZ", [".lz4", "gzip"])],
    "a.json.gz": [(b"", [".json.gz", "decompress it"])],
    "a.mds": [(b"\0\0\0\0", ["a.mds", "index.json"])],
}


PACKAGES = {".zst": "backports.zstd", ".parquet": "pyarrow", ".mds": "streaming"}


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        pytest.param(name, *case, id=f"{name}-{number}")
        for name, cases in BROKEN.items()
        for number, case in enumerate(cases)
    ],
)
def test_broken_input_is_named(name, data, named, prepare, tmp_path, capsys):
    for suffix, package in PACKAGES.items():
        if name.endswith(suffix):
            pytest.importorskip(package)
    (tmp_path / name).write_bytes(data)
    refused(capsys, named, prepare(tmp_path / name))
    assert not list(tmp_path.glob("out.[bij]*"))


INDEX = {
    "column_encodings": [["pkl"], ["ndarray:uint16:x"]],
    "column_sizes": [[], 5],
    "samples": [3],
    "version": [1],
}


@pytest.fixture
def shards(tmp_path):
    pytest.importorskip("streaming")
    return write_mds(tmp_path / "in", [{"text": "abc" * 200}, {"text": "d" * 500}], {"text": "str"})


def test_broken_shards_are_named(shards, prepare, capsys):
    shard = shards / "shard.00000.mds"
    good = shard.read_bytes()
    assert prepare(shards) == 0
    broken = good[:4] + b"\xff\xff" + good[6:]
    for data, named in ((good[:-1], "bytes"), (broken, "broken")):
        shard.write_bytes(data)
        refused(capsys, ["shard.00000.mds", named], prepare(shards, output="b"))
    shard.write_bytes(good)
    (shards / "index.json").write_text("[" * 200000)
    refused(capsys, ["shard.00000.mds", "does not say"], prepare(shards, output="b"))


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in INDEX.items() for value in values]
)
def test_broken_indexes_of_shards_are_named(key, value, shards, prepare, capsys):
    about = json.loads((shards / "index.json").read_text())
    about["shards"][0][key] = value
    (shards / "index.json").write_text(json.dumps(about))
    refused(capsys, ["shard.00000.mds"], prepare(shards))


def test_pickles_are_not_opened(prepare, tmp_path, capsys):
    """In the document's column they are refused, others are not decoded."""
    pytest.importorskip("streaming")

    class Evil:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    text = "abc" * 200
    mine = write_mds(tmp_path / "a", [{"text": text, "x": Evil()}], {"text": "str", "x": "pkl"})
    assert prepare(mine) == 0
    theirs = write_mds(tmp_path / "b", [{"text": Evil()}], {"text": "pkl"})
    refused(capsys, ["shard.00000.mds", "pkl"], prepare(theirs, output="b"))
    assert not (tmp_path / "ran").exists()


def test_a_zstd_frame_that_ends_between_lines(prepare, documents, tmp_path, capsys):
    compressor = pytest.importorskip("backports.zstd").ZstdCompressor()
    lines = write_jsonl(tmp_path / "a", documents).read_bytes()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress(lines, compressor.FLUSH_BLOCK))
    size = path.stat().st_size
    refused(capsys, [str(path), f"byte {size} of {size}"], prepare(path))


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
    for rest in (b"\xff" + second[1:], b"\n", second[:-1]):
        path.write_bytes(first + rest)
        status = prepare(path, output="c")
        refused(capsys, [str(path), "decompressed", f"of {len(first + rest)}"], status)
    assert not list(tmp_path.glob("c.*"))


@pytest.mark.parametrize("name", ["a.parquet.gz", "A.JSONL.Z"])
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


def test_parquet_columns_of_other_types_are_named(prepare, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for value, kind in (({"a": 1}, "dict"), (b"", "bytes"), ([{"a": 1}], "list")):
        parquet.write_table(pyarrow.table({"text": ["few", value][1:]}), tmp_path / "a.parquet")
        refused(
            capsys, ["a.parquet, row 0", f"text of type {kind}"], prepare(tmp_path / "a.parquet")
        )


OPTIONS = [
    ({"tokenizer": __file__}, ["--tokenizer is", ".gguf"]),
    ({"eod": "<none>"}, ["--eod is <none>"]),
    ({"pack": "as-is", "long_only": 5}, ["--long-only", "as-is"]),
    ({"join": True}, ["--join"]),
    ({"join": [__file__]}, ["--join is", "not a folder: name it before --join"]),
    ({"join": ["nowhere/none"]}, ["INPUT is", "none, which does not exist"]),
    ({"no_shuffle": True, "seed": 1234}, ["--seed is 1234", "--no-shuffle"]),
    ({"format": "text", "text_field": "body"}, ["--text-field is body", "leave it out"]),
    ({"text_field": "body"}, ["line 1", "no body", "id, text"]),
    ({"workers": 10**9}, ["--workers is 1000000000", "256"]),
    ({"long_only": 10**9}, ["--long-only is 1000000000", "lower it"]),
]


@pytest.mark.parametrize(("wrong", "named"), OPTIONS)
def test_bad_options(wrong, named, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    refused(capsys, named, prepare(given, **wrong))


def test_all_bad_options_are_named_at_once(prepare, tmp_path, capsys):
    wrong = {"seq_length": 1, "workers": 0, "output": "a.bin", "tokenizer": "/nowhere"}
    named = [
        "--seq-length is 1",
        "--workers is 0",
        "a.bin",
        "/nowhere",
        "INPUT is",
        "missing.jsonl",
    ]
    refused(capsys, named, prepare(tmp_path / "missing.jsonl", **wrong))


def test_the_output_folder_is_made_and_kept_only_with_a_dataset(
    prepare, documents, tmp_path, capsys
):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    output = str(tmp_path / "new/folder/mix")
    refused(capsys, ["line 1", "no body"], prepare(given, output=output, text_field="body"))
    assert not (tmp_path / "new").exists()
    assert prepare(given, output=output) == 0
    assert "End-of-document token: id " in capsys.readouterr().out
    assert (tmp_path / "new/folder/mix.idx").is_file()
    (tmp_path / "file").write_text("")
    refused(
        capsys, ["file/mix", "cannot be written"], prepare(given, output=str(tmp_path / "file/mix"))
    )


def test_bad_inputs(prepare, documents, tokenizer, tmp_path, capsys, monkeypatch):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    refused(capsys, ["nothing.jsonl", "does not exist"], prepare(tmp_path / "nothing.jsonl"))
    (tmp_path / "empty").mkdir()
    refused(capsys, ["empty", "without files"], prepare(tmp_path / "empty"))
    refused(capsys, ["a.jsonl twice"], prepare(given, given))
    bare = save_tokenizer(tmp_path / "bare", pad_token="<eod>")
    refused(capsys, ["bare", "end-of-document", "--eod"], prepare(given, tokenizer=bare))
    monkeypatch.setattr("megatron_mtraining.requirements.find_spec", lambda name: None)
    refused(capsys, ["tqdm", "pip install tqdm"], prepare(given))
    assert not list(tmp_path.glob("out*"))


def test_error_of_a_worker_process_is_the_same(
    prepare, sentencepiece_model, documents, tmp_path, capsys
):
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    path.write_text(path.read_text() + "broken\n")
    status = prepare(path, workers=2, part_bytes=9000, tokenizer=sentencepiece_model)
    refused(capsys, [f"line {len(documents) + 1} ", "not JSON"], status)
    assert os.listdir(tmp_path / "out.parts")


@pytest.mark.parametrize("name", ["closed", "closed/b.txt"])
def test_what_cannot_be_read_in_a_folder(name, prepare, tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / "closed").mkdir(parents=True)
    (folder / "a.txt").write_text("abc" * 200)
    (folder / "closed" / "b.txt").write_text("abc" * 200)
    mode = (folder / name).stat().st_mode
    (folder / name).chmod(0)
    try:
        with permissions_hold():
            refused(capsys, [str(folder / name), "Permission"], prepare(folder))
    finally:
        (folder / name).chmod(mode)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("there", [["a.mds"], []], ids=["one of two", "none of two"])
def test_shards_that_are_not_there_are_named(there, prepare, tmp_path, capsys):
    """As in a copy that was broken off."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "read.txt").write_text("abc" * 200)
    for name in there:
        (folder / name).write_bytes(b"1234")
    entries = [{"format": "mds", "raw_data": {"basename": name}} for name in ("a.mds", "b.mds")]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    refused(capsys, ["index.json", f"{2 - len(there)} shards"], prepare(folder))


@pytest.mark.parametrize("index", ["{}", "[1]", "[" * 200000], ids=["object", "list", "deep"])
def test_an_index_of_something_else_is_a_document(index, prepare, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "read.txt").write_text("abc" * 200)
    (folder / "index.json").write_text(index)
    assert prepare(folder) == 0
    assert report(tmp_path / "out")["documents"]["read"] == 2


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.mds", "/dev/zero"])
def test_pipes_and_devices_as_input(name, prepare, tmp_path, capsys):
    if not name.startswith("/"):
        os.mkfifo(tmp_path / name)
    refused(capsys, [name, "a pipe or a device", "into a file"], prepare(tmp_path / name))


@pytest.mark.usefixtures("no_hang")
def test_pipes_in_place_of_the_output(prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    os.mkfifo(tmp_path / "out.json")
    for overwrite in ({}, {"overwrite": True}):
        refused(capsys, ["out.json"], prepare(given, **overwrite))
    assert [path.name for path in tmp_path.glob("out*")] == ["out.json"]


def test_long_documents_are_refused(prepare, tmp_path, capsys):
    """Of text, of folders that are joined, and in records: tokenizing them takes too much memory."""
    texts = tmp_path / "in"
    texts.mkdir()
    (texts / "a.txt").write_text("é" * 400)
    (texts / "b.txt").write_text("é" * 400)
    (texts / "c").write_bytes(b"\xff" * 5000)  # no text, and no document
    limit = {"document_bytes": 1000, "seq_length": 100}
    assert prepare(texts, **limit) == 0
    status = prepare(texts, output="b", join=True, **limit)
    refused(capsys, [str(texts), "--document-bytes (1000)"], status)
    (texts / "d.txt").write_text("é" * 501)  # cut within a character by the limit
    refused(capsys, ["d.txt", "--document-bytes (1000)"], prepare(texts, output="b", **limit))
    lines = write_jsonl(tmp_path / "a.jsonl", ["fits", "é" * 501])
    status = prepare(lines, output="b", **limit)
    refused(capsys, ["a.jsonl, line 2", "--document-bytes (1000)"], status)


@pytest.mark.parametrize(
    ("text", "named"), [("", "is empty"), (" ", "is empty"), ("s3://bucket/a", "download it")]
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
