# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: what it writes from each kind of input."""

from __future__ import annotations

import os
import random
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron_mtraining.tools.data.inputs import File, Part
from megatron_mtraining.tools.data.readers import read
from tests.support.data_cases import (
    COMPRESS,
    EOD,
    IN_ORDER,
    SEQ,
    ids,
    ids_of,
    in_order,
    refused,
    report,
    write_jsonl,
    write_mds,
)

pytest.importorskip("transformers")


def test_samples_in_order_are_those_of_the_slow_reference(prepare, documents, tmp_path):
    assert prepare(write_jsonl(tmp_path / "a.jsonl", documents), **IN_ORDER) == 0
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents], SEQ)
    assert not list(tmp_path.glob("out.*part*"))


@pytest.mark.parametrize("pack", ["best-fit", "in-order"])
def test_report_accounts_for_every_token(pack, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", [*documents, "", " \n", "ab<eod>cd", "x" * (5 * SEQ)])
    assert prepare(given, pack=pack, long_only=30) == 0
    samples, about = ids(tmp_path / "out"), report(tmp_path / "out")
    counted, tokens = about["documents"], about["tokens"]
    expected = [ids_of(text) for text in documents] + [[0] * 5, [0] * 5 * SEQ]
    assert counted["read"] == len(expected) and counted["empty"] == 2 and counted["eod_inside"] == 1
    assert tokens["read"] == sum(map(len, expected))
    short = [one for one in expected if len(one) < 30]
    assert (counted["short"], tokens["short"]) == (len(short), sum(map(len, short)))
    assert tokens["read"] == tokens["short"] + tokens["written"] + tokens["left_over"]
    assert about["samples"] == len(samples) and about["samples_an_epoch"] == len(samples) - 1
    assert sum(map(len, samples)) == tokens["written"] + tokens["end_of_document"]
    assert counted["longer_cut"] == sum(len(one) > SEQ for one in expected)
    ends = sum(sample.count(EOD) for sample in samples)
    assert ends == tokens["end_of_document"]
    for row in about["histogram"]:
        there = [len(one) for one in expected if row["from"] <= len(one) <= row["to"]]
        assert (row["documents"], row["tokens"]) == (len(there), sum(there))
    assert sum(row["documents"] for row in about["histogram"]) == len(expected)
    shown = capsys.readouterr().out
    assert f"{tokens['left_over']:,}" in shown and "with the end-of-document token inside" in shown


def whole_documents(samples) -> list[bytes]:
    """What is between ends of documents in a sample, without what its own ends may cut."""
    found = []
    for sample in samples:
        ends = [at for at, token in enumerate(sample) if token == EOD]
        found += [bytes(sample[a + 1 : b]) for a, b in zip(ends, ends[1:])]
    return found


def test_shuffled_documents_stay_whole(prepare, documents, tmp_path):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    for number, seed in enumerate((1, 1, 2)):
        assert prepare(given, output=f"out{number}", seed=seed, buffer=50) == 0
    same, again, other = (Path(tmp_path / f"out{n}.bin").read_bytes() for n in range(3))
    assert same == again != other
    texts = [text.encode() for text in documents]
    found = whole_documents(ids(tmp_path / "out0"))
    whole = [text for text in found if text in texts]
    assert len(whole) > 50 and len(set(whole)) == len(whole)
    assert whole != sorted(whole, key=texts.index)
    for rest in set(found) - set(whole):
        assert any(text.endswith(rest) for text in texts)


def as_files(kind: str, documents: list[str], folder: Path) -> Path:
    """The documents, in order, as input of some kind."""
    folder.mkdir()
    plain = write_jsonl(folder / "a.jsonl", documents)
    if kind == "jsonl":
        return plain
    if kind in COMPRESS:
        data, compress = plain.read_bytes(), COMPRESS[kind]()
        half = len(data) // 2  # two frames, as parallel compressors write them
        (folder / f"a.{kind}").write_bytes(compress(data[:half]) + compress(data[half:]))
    elif kind in ("parquet", "parquet ids"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {"n": list(range(len(documents))), "text": documents}
        if kind == "parquet ids":
            columns = {"input_ids": [ids_of(text) for text in documents]}
        parquet.write_table(pyarrow.table(columns), folder / "a.parquet", row_group_size=30)
    elif kind == "text":
        for number, text in enumerate(documents):
            (folder / f"{number // 50}").mkdir(exist_ok=True)
            (folder / f"{number // 50}" / f"{number:04d}.py").write_text(text, encoding="utf-8")
    elif kind == "mds":
        pytest.importorskip("streaming")
        rows = [{"domain": "books", "text": text, "length": 1} for text in documents]
        write_mds(folder / "books", rows, {"domain": "str", "length": "int", "text": "str"})
    elif kind == "mds ids of a shape":
        pytest.importorskip("streaming")
        for number, text in enumerate(documents):
            encodings = {"input_ids": f"ndarray:uint16:{len(ids_of(text))}"}
            write_mds(folder / f"{number:04d}", [{"input_ids": ids_of(text)}], encodings)
    elif kind == "mds ids":
        pytest.importorskip("streaming")
        encodings = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32"}
        rows = []
        for at in range(0, len(documents), 40):
            # Half of them with the end-of-document token, which is not to be doubled.
            some = [ids_of(text) + [EOD] * (at % 80 == 0) for text in documents[at : at + 40]]
            ends = np.cumsum([0, *map(len, some)])
            bounds = np.stack([ends[:-1], ends[1:]], 1)
            rows.append({"domain": "books", "indices": bounds, "input_ids": np.concatenate(some)})
        write_mds(folder / "books-524288" / "proc00-64", rows, encodings)
    plain.unlink()
    return folder


KINDS = [
    "jsonl",
    *COMPRESS,
    "parquet",
    "parquet ids",
    "text",
    "mds",
    "mds ids",
    "mds ids of a shape",
]


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_input_give_the_same(kind, prepare, documents, tmp_path):
    given = as_files(kind, documents, tmp_path / "in")
    assert prepare(given, **IN_ORDER, part_bytes=20000) == 0
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents], SEQ)


@pytest.mark.parametrize("kind", ["jsonl.gz", "mds"])
def test_names_in_capitals_are_read_as_others(kind, prepare, documents, tmp_path):
    folder = as_files(kind, documents, tmp_path / "in")
    for path in [path for path in folder.rglob("*.*") if path.name != "index.json"]:
        path.rename(path.with_name(path.name.upper()))
    for index in folder.rglob("index.json"):
        index.write_text(index.read_text().replace("shard.00000.mds", "SHARD.00000.MDS"))
    assert prepare(folder, **IN_ORDER, part_bytes=20000) == 0
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents], SEQ)


def test_lines_are_read_once_wherever_parts_begin(documents, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents[:40])
    size = path.stat().st_size
    first = path.read_bytes().index(b"\n") + 1  # and so a part begins where a line does
    for step in (1, 7, first, 100, size - 1, size):
        bounds = [*range(0, size, step), size]
        parts = [
            Part((File(str(path), "jsonl", True),), b - a, a, b) for a, b in zip(bounds, bounds[1:])
        ]
        found = [
            (str(place), text) for part in parts for place, text in read(part, None, stretches=True)
        ]
        assert [text for _, text in found] == documents[:40]
        assert [place for place, _ in found] == [f"{path}, line {n}" for n in range(1, 41)]
        if step > 100:
            continue
        assert len(parts) > 40


def test_folder_leaves_out_what_is_no_text_and_says_so(prepare, documents, tmp_path, capsys):
    folder = as_files("text", documents, tmp_path / "in")
    (folder / "logo.png").write_bytes(b"\x89PNG\xff")
    (folder / "zero").write_bytes(b"a\0b")
    (folder / ".hidden").write_text("")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "again").symlink_to(folder / "0")
    (folder / "again.py").symlink_to(folder / "0" / "0001.py")
    (folder / "nowhere.py").symlink_to(folder / "none")
    (folder / "round").symlink_to("round")
    os.mkfifo(folder / "pipe")
    assert prepare(folder, **IN_ORDER) == 0
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents], SEQ)
    about = report(tmp_path / "out")
    assert (about["skipped_files"], about["left_out_in_folders"]) == (2, 7)
    names = sorted(os.path.basename(name) for name in about["left_out_names"])
    assert names == [".git", ".hidden", "again", "again.py", "nowhere.py", "pipe", "round"]
    shown = capsys.readouterr().out
    assert "logo.png" in shown and "7 hidden files, links and pipes" in shown


def test_repositories_are_joined_and_books_are_not(prepare, tmp_path, capsys):
    """No file of a repository is as long as --long-only, and each book is."""
    books = {f"books/{name}.txt": name * 300 for name in "abc"}
    files = {f"repos/{n % 2}/{n}.py": f"f{n}()\n" * 20 for n in range(8)}
    for name, text in {**books, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    repos = [tmp_path / "repos" / name for name in "01"]
    kept = dict(IN_ORDER, long_only=200, seq_length=64)
    assert prepare(tmp_path / "books", **kept, join=repos) == 0
    joined = ["".join(f"f{n}()\n" * 20 for n in range(first, 8, 2)) for first in (0, 1)]
    expected = [ids_of(text) for text in [*books.values(), *joined]]
    assert ids(tmp_path / "out", 64) == in_order(expected, 64)
    about = report(tmp_path / "out")
    assert about["documents"]["read"] == 5 and about["join"] == [*map(str, repos)]
    assert "warning" not in capsys.readouterr().err
    assert prepare(tmp_path / "books", *repos, **kept, output="apart") == 0
    said = "--long-only 200 leaves out 8 of 11 documents, with 800 of 1,700 tokens"
    error = capsys.readouterr().err
    assert f"warning: {said}: " in error and "--join FOLDER" in error


@pytest.mark.parametrize("longer, most", [(700, True), (300, False)])
def test_a_warning_of_long_documents_that_hold_most_tokens(longer, most, prepare, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", ["b" * longer, "a" * 250, "a" * 250])
    assert prepare(given, longer="drop") == 0
    said = "warning: --longer drop leaves out 1 of 3 documents, with 700 of 1,200 tokens: use --longer cut"
    assert (said in capsys.readouterr().err) is most


def test_joined_folders_with_records_and_folders(prepare, tmp_path):
    """Text files of each are one document, longer than a part or not, in the order of their paths, wherever
    records are between them."""
    folder, other = tmp_path / "in", tmp_path / "other"
    for path, text in {
        folder / "a" / "x.py": "first", folder / "b.py": "second\n", folder / "d.py": "third",
        other / "0.py": "x\n" * 600, other / "1.py": "y",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write_jsonl(folder / "c.jsonl", ["a record"])
    write_jsonl(folder / "a" / "y.jsonl", ["another record"])
    options = dict(join=True, part_bytes=1024, pack="in-order", no_shuffle=True, seq_length=8)
    assert prepare(folder, other, **options) == 0
    expected = ["first\nsecond\nthird\n", "a record", "another record", "x\n" * 600 + "y\n"]
    assert ids(tmp_path / "out", 8) == in_order([ids_of(text) for text in expected], 8)
    assert report(tmp_path / "out")["documents"]["read"] == 4


@pytest.mark.parametrize("how", [{}, IN_ORDER], ids=["shuffled best fit", "in order"])
def test_splits_share_documents_that_are_cut(how, prepare, tmp_path):
    """As docs/data.md says of --split; the full samples of a long document stay together."""
    documents = [[number] * (40 + 13 * number % 150) for number in range(99)]
    given = write_jsonl(tmp_path / "a.jsonl", [*documents, [99] * 5 * SEQ], "input_ids")
    assert prepare(given, **how) == 0
    samples = ids(tmp_path / "out")
    middle = int(0.8 * len(samples))
    parts = ({*chain.from_iterable(part)} for part in (samples[:middle], samples[middle:]))
    assert len(set.intersection(*parts) - {EOD}) >= 1
    long = [number for number, sample in enumerate(samples) if {*sample} == {99}]
    assert long == [*range(long[0], long[0] + 5)]


def test_samples_that_are_packed_already(prepare, tmp_path, capsys):
    rng = random.Random(0)
    packed = [[rng.randrange(EOD + 1) for _ in range(SEQ)] for _ in range(9)]
    given = write_jsonl(tmp_path / "a.jsonl", packed, "input_ids")
    assert prepare(given, pack="as-is", no_shuffle=True) == 0
    assert ids(tmp_path / "out") == packed
    assert prepare(given, pack="as-is", seq_length=SEQ // 2, output="b") == 2
    assert "line 1 has 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("longer", ["cut", "drop", "error"])
def test_documents_longer_than_a_sample(longer, prepare, tmp_path, capsys):
    texts = ["a" * 100] * 10 + ["b" * (SEQ + 1)] + ["c" * SEQ]
    given = write_jsonl(tmp_path / "a.jsonl", texts)
    status = prepare(given, longer=longer, **IN_ORDER)
    if longer == "error":
        assert status == 2 and "line 11 has 257 tokens" in capsys.readouterr().err
        assert not (tmp_path / "out.idx").exists()
        return
    kept = texts if longer == "cut" else texts[:10] + texts[11:]
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in kept], SEQ)
    assert report(tmp_path / "out")["documents"]["longer_dropped"] == (longer == "drop")


def test_sentencepiece(prepare, documents, tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(documents))
    for name, eos in {"tokens": 2, "bare": -1}.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"), model_prefix=str(tmp_path / name), vocab_size=40,
            eos_id=eos, model_type="char", hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    model = tmp_path / "tokens.model"
    encode = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    assert prepare(given, tokenizer=model, **IN_ORDER) == 0
    assert ids(tmp_path / "out") == in_order([encode(text) for text in documents], SEQ, eod=2)
    refused(
        capsys,
        ["bare.model", "--eod"],
        prepare(given, tokenizer=tmp_path / "bare.model", output="b"),
    )
    assert prepare(given, tokenizer=tmp_path / "bare.model", eod="<unk>", output="b") == 0
