# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: what it refuses, in one error."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from tests.support.data_cases import COMPRESS, refused, save_tokenizer, write_jsonl, write_mds

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
        (b'{"text": [1.5]}', ["line 1", "text", "list"]),
        (b'{"input_ids": [1, true]}', ["line 1", "input_ids", "list"]),
        (b'{"text": "a\xff"}', ["line 1", "not JSON"]),
        (b'{"input_ids": [1, 257]}', ["line 1", "257", "--tokenizer"]),
        (b'{"input_ids": [-1]}', ["line 1", "-1"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1]]}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1], [1]]}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 2], "indices": 5}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 99999999999999999999]}', ["line 1", "input_ids", "list"]),
        (b'{"text": "\\ud800"}', ["line 1", "\\ud800", "surrogate pair"]),
        (b"[" * 200000, ["line 1", "not JSON", "recursion"]),
        (b'{"text": {}}', ["line 1", "text", "dict"]),
        (b'{"text": false}', ["line 1", "text", "bool"]),
        *(
            (b'{"input_ids": [1, 2], "indices": [[0, %s], [1, 2]]}' % end, ["line 1", "indices"])
            for end in (b"Infinity", b"1e400", b"NaN", b"1.5", b'"1"')
        ),
        (b"", ["a.jsonl", "empty"]),
        (b'{"text": null}\n{"text": ""}\n', ["no documents", "2 are empty"]),
        (b'{"text": ""}\n', ["no documents", "1 are empty"]),
        (b'{"text": "few tokens"}\n', ["--seq-length is 256", "10 tokens"]),
    ],
    "a.jsonl.gz": [
        (b"no gzip", ["a.jsonl.gz"]),
        # With the time in it, the test's name would not be the same in all of pytest's workers.
        (gzip.compress(b'{"text": "abc"}\n' * 99, mtime=0)[:-9], ["a.jsonl.gz", "decompressed"]),
    ],
    "a.JSONL.GZ": [(b"no gzip", ["a.JSONL.GZ", "gzip"])],
    "a.jsonl.zst": [(b"no zstd", ["a.jsonl.zst"])],
    "a.parquet": [(b"PAR1 not", ["a.parquet", "pyarrow"])],
    "a.txt": [(b"\xff\xfe", ["a.txt", "UTF-8", "byte 0"]), (b"", ["a.txt", "empty"])],
    "a.arrow": [(b"ARROW1", [".arrow", "convert"])],
    "a.json": [(b"{}", ["a.json", "--format"])],
    "a.jsonl.bz2": [(b"BZ", ["a.jsonl.bz2", "decompressed"])],
    "a.jsonl.lz4": [(b"LZ", [".lz4", "gzip"])],
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
    "column_encodings": [["pkl"], [5], "t", ["ndarray:uint16:x"]],
    "column_names": [[5], {"body": 1}],
    "column_sizes": [[], ["x"], 5],
    "samples": [3, None, "2", 2.0],
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


@pytest.mark.parametrize("encoding", ["ndarray:uint16:2:3", "ndarray:uint16:99"])
def test_broken_arrays_of_shards_are_named(encoding, prepare, tmp_path, capsys):
    pytest.importorskip("streaming")
    folder = write_mds(tmp_path / "in", [{"input_ids": [1] * 300}], {"input_ids": "ndarray:uint16"})
    index = folder / "index.json"
    index.write_text(index.read_text().replace("ndarray:uint16", encoding))
    refused(capsys, ["shard.00000.mds, sample 0", "mosaicml-streaming"], prepare(folder))


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


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_truncated_files_are_named(kind, share, prepare, documents, tmp_path, capsys):
    """Even if what can be read ends with a line."""
    data = COMPRESS[kind]()(write_jsonl(tmp_path / "a", documents).read_bytes())
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data[: int(len(data) * share)])
    refused(capsys, [str(path), "decompressed", "byte"], prepare(path))
    assert not list(tmp_path.glob("out*"))


def test_a_zstd_frame_that_ends_between_lines(prepare, documents, tmp_path, capsys):
    compressor = pytest.importorskip("backports.zstd").ZstdCompressor()
    lines = write_jsonl(tmp_path / "a", documents).read_bytes()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress(lines, compressor.FLUSH_BLOCK))
    size = path.stat().st_size
    refused(capsys, [str(path), f"byte {size} of {size}"], prepare(path))


def test_parquet_columns_of_other_types_are_named(prepare, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for value, kind in (({"a": 1}, "dict"), (b"", "bytes"), ([{"a": 1}], "list")):
        parquet.write_table(pyarrow.table({"text": ["few", value][1:]}), tmp_path / "a.parquet")
        refused(
            capsys, ["a.parquet, row 0", f"text of type {kind}"], prepare(tmp_path / "a.parquet")
        )


OPTIONS = [
    ({"seq_length": 1}, ["--seq-length is 1"]),
    ({"workers": 0}, ["--workers is 0"]),
    ({"output": "a.bin"}, ["--output", ".bin"]),
    ({"tokenizer": "/nowhere"}, ["--tokenizer is /nowhere"]),
    ({"tokenizer": __file__}, ["--tokenizer is", ".gguf"]),
    ({"eod": "<none>"}, ["--eod is <none>"]),
    ({"pack": "as-is", "long_only": 5}, ["--long-only", "as-is"]),
    ({"join": True}, ["--join"]),
    ({"join": [__file__]}, ["--join is", "not a folder: name it before --join"]),
    ({"join": ["nowhere/none"]}, ["INPUT is", "none, which does not exist"]),
    ({"no_shuffle": True, "seed": 1234}, ["--seed is 1234", "--no-shuffle"]),
    ({"no_shuffle": True, "buffer": 5}, ["--buffer is 5", "--no-shuffle"]),
    ({"format": "text", "text_field": "body"}, ["--text-field is body", "leave it out"]),
    ({"text_field": "body"}, ["line 1", "no body", "id, text"]),
    ({"workers": 10**9}, ["--workers is 1000000000", "256"]),
    ({"document_bytes": 0}, ["--document-bytes is 0"]),
    ({"part_bytes": 1}, ["--part-bytes is 1:", "1024 or more"]),
    ({"long_only": 10**9}, ["--long-only is 1000000000", "lower it"]),
    ({"output": "a\0b"}, ["--output", "zero byte"]),
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
    refused(capsys, ["cannot be made"], prepare(given, output=str(tmp_path / "file/mix")))


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
