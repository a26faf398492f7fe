# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: what it writes from each kind of input, goes on with, and refuses."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from data_cases import EOD, ids_of, in_order, make_documents, save_tokenizer, write_jsonl, write_mds

from megatron_mtraining import cli
from megatron_mtraining.data import prepare as prepare_module
from megatron_mtraining.data.inputs import Part
from megatron_mtraining.data.readers import read

pytest.importorskip("transformers")
SEQ = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A quick one for several processes, which need not import transformers then."""
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokens"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_documents(100)), model_prefix=str(prefix), vocab_size=30,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.fixture
def documents():
    return make_documents(200)


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Run the command over inputs, into ``tmp_path/out`` or another prefix; returns the exit status."""

    def run(*inputs, output="out", **options):
        defaults = {"tokenizer": tokenizer, "seq_length": SEQ, "workers": 1}
        words = ["data", "prepare", *map(str, inputs), "--output", str(tmp_path / output)]
        for name, value in {**defaults, **options}.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return cli.main(words)

    return run


def ids(prefix: Path, seq_length=SEQ) -> list[list[int]]:
    """The samples, read without Megatron's code: tokens, and an index of as many sequences."""
    samples = np.fromfile(f"{prefix}.bin", np.uint16).reshape(-1, seq_length)
    header = Path(f"{prefix}.idx").read_bytes()[:34]
    assert header[:9] == b"MMIDIDX\0\0"
    assert int.from_bytes(header[18:26], "little") == len(samples)
    return samples.tolist()


def report(prefix: Path) -> dict:
    return json.loads(Path(f"{prefix}.json").read_text())


IN_ORDER = {"pack": "in-order", "no_shuffle": True}


# What is written


def test_samples_in_order_are_those_of_the_slow_twin(prepare, documents, tmp_path):
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
    if kind == "jsonl.gz":
        with gzip.open(folder / "a.jsonl.gz", "wb") as file:
            file.write(plain.read_bytes())
    elif kind == "jsonl.zst":
        zstandard = pytest.importorskip("zstandard")
        data, compressor = plain.read_bytes(), zstandard.ZstdCompressor()
        half = len(data) // 2  # two frames
        both = compressor.compress(data[:half]) + compressor.compress(data[half:])
        (folder / "a.jsonl.zst").write_bytes(both)
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
        rows = [{"domain": "books", "text": text, "length": 1} for text in documents]
        write_mds(folder / "books", rows, {"domain": "str", "length": "int", "text": "str"})
    elif kind == "mds ids of a shape":
        for number, text in enumerate(documents):
            encodings = {"input_ids": f"ndarray:uint16:{len(ids_of(text))}"}
            write_mds(folder / f"{number:04d}", [{"input_ids": ids_of(text)}], encodings)
    elif kind == "mds ids":
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
    "jsonl.gz",
    "jsonl.zst",
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


def test_lines_are_read_once_wherever_parts_begin(documents, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents[:40])
    size = path.stat().st_size
    first = path.read_bytes().index(b"\n") + 1  # and so a part begins where a line does
    for step in (1, 7, first, 100, size - 1, size):
        bounds = [*range(0, size, step), size]
        parts = [Part("jsonl", (str(path),), a, b, b - a, True) for a, b in zip(bounds, bounds[1:])]
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
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "again").symlink_to(folder / "0")
    (folder / "again.py").symlink_to(folder / "0" / "0001.py")
    (folder / "nowhere.py").symlink_to(folder / "none")
    os.mkfifo(folder / "pipe")
    assert prepare(folder, **IN_ORDER) == 0
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents], SEQ)
    about = report(tmp_path / "out")
    assert (about["skipped_files"], about["left_out_in_folders"]) == (2, 5)
    shown = capsys.readouterr().out
    assert "logo.png" in shown and "5 hidden files and links" in shown


def test_joined_folder_is_one_document(prepare, tmp_path):
    for name, texts in {"one": ["def f():\n", "b = 2"], "two": ["x\n" * 300, "y"]}.items():
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number}.py").write_text(text)
    assert prepare(tmp_path / "one", tmp_path / "two", join=True, part_bytes=1, **IN_ORDER) == 0
    joined = [ids_of("def f():\nb = 2\n"), ids_of("x\n" * 300 + "y\n")]
    assert ids(tmp_path / "out") == in_order(joined, SEQ)
    assert report(tmp_path / "out")["documents"]["read"] == 2


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


# Several processes, and going on


def command(given, tokenizer, prefix, *more) -> list[str]:
    words = ["data", "prepare", given, "--tokenizer", tokenizer, "--output", prefix]
    words += ["--seq-length", SEQ, "--part-bytes", 20000, *more]
    return [sys.executable, "-m", "megatron_mtraining.cli", *map(str, words)]


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Processes two levels below: their server is the one between."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for server in process.children() for child in server.children()]
    return []


def test_killed_run_goes_on_and_gives_the_same(prepare, tokenizer, tmp_path, capsys):
    texts = make_documents(4000)
    given = write_jsonl(tmp_path / "a.jsonl", texts)
    prefix = tmp_path / "out"
    running = subprocess.Popen(
        command(given, tokenizer, prefix, "--workers", 2),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    parts, deadline = tmp_path / "out.parts", time.monotonic() + 60
    while len(list(parts.glob("*.json"))) < 3:
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    # Stopped first: else it may end before the signal that kills it.
    running.send_signal(signal.SIGSTOP)
    workers = workers_of(psutil.Process(running.pid))
    assert len(workers) == 2
    running.kill()
    running.wait()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert not list(tmp_path.glob("out.bin*")) and not list(tmp_path.glob("out.idx*"))
    done = len(list(parts.glob("*.json")))
    assert prepare(given, part_bytes=20000) == 0
    assert f"going on: {done} of " in capsys.readouterr().err
    assert not parts.exists()
    assert prepare(given, part_bytes=20000, output="alone") == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"{prefix}{suffix}").read_bytes() == (tmp_path / f"alone{suffix}").read_bytes()


def test_a_worker_that_dies_ends_the_run_with_one_error(
    prepare, sentencepiece_model, tmp_path, capsys
):
    given = write_jsonl(tmp_path / "a.jsonl", make_documents(4000))
    options = {"tokenizer": sentencepiece_model, "part_bytes": 20000}

    def kill_one():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for worker in workers_of(psutil.Process()):
                with contextlib.suppress(psutil.NoSuchProcess):  # of an earlier run
                    worker.kill()
                    return
            time.sleep(0.002)

    killer = threading.Thread(target=kill_one)
    killer.start()
    status = prepare(given, workers=2, **options)
    killer.join()
    refused(capsys, ["worker", "--workers"], status)
    assert not (tmp_path / "out.idx").exists()
    assert prepare(given, **options) == 0


def test_parts_of_other_input_or_broken_ones_are_not_used(prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    assert prepare(given, keep_parts=True, part_bytes=5000, **IN_ORDER) == 0
    first = ids(tmp_path / "out")
    again = {"keep_parts": True, "part_bytes": 5000, "overwrite": True, **IN_ORDER}
    tokens = sorted((tmp_path / "out.parts").glob("*.tokens"))
    tokens[1].write_bytes(tokens[1].read_bytes()[:-2])
    (tmp_path / "out.parts" / "abc.tokens.partial").write_text("half")
    capsys.readouterr()
    assert prepare(given, **again) == 0
    assert f"going on: {len(tokens) - 1} of {len(tokens)}" in capsys.readouterr().err
    assert ids(tmp_path / "out") == first
    # Packed in another way, from the same parts
    assert prepare(given, **{**again, "seq_length": 100}) == 0
    assert f"going on: {len(tokens)} of {len(tokens)}" in capsys.readouterr().err
    assert ids(tmp_path / "out", 100) == in_order([ids_of(text) for text in documents], 100)
    # Another file, read before: its parts are new, those of the first are not.
    other = write_jsonl(tmp_path / "b.jsonl", documents[::-1])
    assert prepare(other, given, **again) == 0
    assert f"going on: {len(tokens)} of {2 * len(tokens)}" in capsys.readouterr().err
    both = [ids_of(text) for text in documents[::-1] + documents]
    assert ids(tmp_path / "out") == in_order(both, SEQ)
    write_jsonl(given, documents[::-1])
    assert prepare(given, **again) == 0
    assert "going on" not in capsys.readouterr().err
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents[::-1]], SEQ)
    left = {path.suffix for path in (tmp_path / "out.parts").iterdir()}
    assert left == {"", ".json", ".lengths", ".tokens"}
    assert len(list((tmp_path / "out.parts").glob("*.json"))) == len(tokens)


def test_interrupted_run_says_how_to_go_on(prepare, documents, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_shuffled", interrupt)
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    assert prepare(given) == 130
    assert "goes on" in capsys.readouterr().err
    assert sorted(path.suffix for path in tmp_path.glob("out.*")) == [".parts"]


def test_overwriting_forgets_what_megatron_kept(prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    assert prepare(given) == 0
    kept = tmp_path / "out" / "cache" / "GPTDataset_indices"
    kept.mkdir(parents=True)
    (kept / "abc-GPTDataset-train-document_index.npy").write_text("")
    before = (tmp_path / "out.bin").read_bytes()
    refused(capsys, ["out.idx", "--overwrite"], prepare(given, seed=5))
    assert (tmp_path / "out.bin").read_bytes() == before and kept.exists()
    assert prepare(given, seed=5, overwrite=True) == 0
    assert (tmp_path / "out.bin").read_bytes() != before and not (tmp_path / "out").exists()


def test_a_dataset_stays_until_there_is_another(prepare, documents, tmp_path, capsys):
    assert prepare(write_jsonl(tmp_path / "a.jsonl", documents)) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("out.*")}
    few = write_jsonl(tmp_path / "b.jsonl", ["few"])
    refused(capsys, ["--seq-length"], prepare(few, overwrite=True))
    shutil.rmtree(tmp_path / "out.parts")
    assert {path: path.read_bytes() for path in tmp_path.glob("out.*")} == before


@pytest.mark.parametrize(("limit", "parts"), [(3000, 0), (30000, 6)])
def test_what_cannot_be_written_leaves_nothing_half(
    limit, parts, prepare, documents, tmp_path, capsys
):
    """As on a full disk, here by a limit to the size of files: of a part's, or only the dataset's."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    size = given.stat().st_size
    assert size > 32000
    prepare(given, output="warm", part_bytes=size // 5)  # what is imported may write files
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        status = prepare(given, part_bytes=size // 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    refused(capsys, ["cannot be written", "File too large"], status)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.parts"]
    assert len(list((tmp_path / "out.parts").glob("*.json"))) >= parts - 1
    assert not list(tmp_path.glob("out.parts/*.partial"))
    assert prepare(given, part_bytes=size // 5) == 0


def test_one_run_at_a_time(prepare, documents, tmp_path, capsys):
    import fcntl

    given = write_jsonl(tmp_path / "a.jsonl", documents)
    (tmp_path / "out.parts").mkdir()
    with open(tmp_path / "out.parts" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(capsys, ["out.parts", "in use"], prepare(given))
    assert prepare(given) == 0


# What is refused


def refused(capsys, named: list[str], status: int) -> None:
    """One error, on the last line, that names all this."""
    lines = capsys.readouterr().err.strip().splitlines()
    error = lines[-1] if lines else ""
    assert status == 2 and error.startswith("mtraining data: "), lines
    assert sum("mtraining data: " in line for line in lines) == 1
    for word in named:
        assert word in error, error


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
        (b'{"text": "a\xff"}', ["line 1", "not JSON"]),
        (b'{"input_ids": [1, 257]}', ["line 1", "257", "--tokenizer"]),
        (b'{"input_ids": [-1]}', ["line 1", "-1"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1]]}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 2], "indices": [[0, 1], [1]]}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 2], "indices": 5}', ["line 1", "indices", "2 tokens"]),
        (b'{"input_ids": [1, 99999999999999999999]}', ["line 1", "input_ids", "list"]),
        (b'{"text": "\\ud800"}', ["line 1", "cannot be tokenized"]),
        (b"", ["a.jsonl", "empty"]),
        (b'{"text": ""}\n', ["no documents", "1 are empty"]),
        (b'{"text": "few tokens"}\n', ["--seq-length is 256", "10 tokens"]),
    ],
    "a.jsonl.gz": [
        (b"no gzip", ["a.jsonl.gz"]),
        (gzip.compress(b'{"text": "abc"}\n' * 99)[:-9], ["a.jsonl.gz", "decompressed"]),
    ],
    "a.jsonl.zst": [(b"no zstd", ["a.jsonl.zst"])],
    "a.parquet": [(b"PAR1 not", ["a.parquet", "pyarrow"])],
    "a.txt": [(b"\xff\xfe", ["a.txt", "UTF-8", "byte 0"]), (b"", ["a.txt", "empty"])],
    "a.arrow": [(b"ARROW1", [".arrow", "convert"])],
    "a.json": [(b"{}", ["a.json", "--format"])],
    "a.jsonl.bz2": [(b"BZ", [".bz2", "gzip"])],
    "a.mds": [(b"\0\0\0\0", ["a.mds", "index.json"])],
}


@pytest.mark.parametrize(
    ("name", "data", "named"), [(name, *case) for name, cases in BROKEN.items() for case in cases]
)
def test_broken_input_is_named(name, data, named, prepare, tmp_path, capsys):
    for suffix, package in {".zst": "zstandard", ".parquet": "pyarrow"}.items():
        if name.endswith(suffix):
            pytest.importorskip(package)
    (tmp_path / name).write_bytes(data)
    refused(capsys, named, prepare(tmp_path / name))
    assert not list(tmp_path.glob("out.[bij]*"))


def test_broken_shards_are_named(prepare, tmp_path, capsys):
    rows = [{"text": "abc" * 200}, {"text": "d" * 500}]
    folder = write_mds(tmp_path / "books", rows, {"text": "str"})
    shard, index = folder / "shard.00000.mds", folder / "index.json"
    good, about = shard.read_bytes(), json.loads(index.read_text())
    assert prepare(folder) == 0
    shard.write_bytes(good[:-1])
    refused(capsys, ["shard.00000.mds", "bytes"], prepare(folder, output="b"))
    shard.write_bytes(good[:4] + b"\xff\xff" + good[6:])
    refused(capsys, ["shard.00000.mds", "broken"], prepare(folder, output="b"))
    shard.write_bytes(good)
    changes = {
        "column_encodings": (["pkl"], ["sample 0", "text encoded as pkl"]),
        "samples": (3, ["broken"]),
        "column_sizes": ([], ["version 2"]),
        "version": (1, ["version 2"]),
    }
    for name, (value, words) in changes.items():
        wrong = {**about["shards"][0], name: value}
        index.write_text(json.dumps({"shards": [wrong]}))
        refused(capsys, ["shard.00000.mds", *words], prepare(folder, output="b"))


OPTIONS = [
    ({"seq_length": 1}, ["--seq-length is 1"]),
    ({"workers": 0}, ["--workers is 0"]),
    ({"output": "no/where"}, ["--output", "does not exist"]),
    ({"output": "a.bin"}, ["--output", ".bin"]),
    ({"tokenizer": "/nowhere"}, ["--tokenizer is /nowhere"]),
    ({"tokenizer": __file__}, ["--tokenizer is", ".gguf"]),
    ({"eod": "<none>"}, ["--eod is <none>"]),
    ({"pack": "as-is", "long_only": 5}, ["--long-only", "as-is"]),
    ({"join": True}, ["--join"]),
    ({"text_field": "body"}, ["line 1", "no body", "id, text"]),
]


@pytest.mark.parametrize(("wrong", "named"), OPTIONS)
def test_bad_options(wrong, named, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    refused(capsys, named, prepare(given, **wrong))


def test_bad_inputs(prepare, documents, tokenizer, tmp_path, capsys, monkeypatch):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    refused(capsys, ["nothing.jsonl", "does not exist"], prepare(tmp_path / "nothing.jsonl"))
    (tmp_path / "empty").mkdir()
    refused(capsys, ["empty", "without files"], prepare(tmp_path / "empty"))
    refused(capsys, ["a.jsonl twice"], prepare(given, given))
    bare = save_tokenizer(tmp_path / "bare", pad_token="<eod>")
    refused(capsys, ["bare", "end-of-document", "--eod"], prepare(given, tokenizer=bare))
    monkeypatch.setattr("megatron_mtraining.data.options.find_spec", lambda name: None)
    refused(capsys, ["tqdm", "megatron-mtraining[data]"], prepare(given))
    assert not list(tmp_path.glob("out*"))


def test_error_of_a_worker_process_is_the_same(
    prepare, sentencepiece_model, documents, tmp_path, capsys
):
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    path.write_text(path.read_text() + "broken\n")
    status = prepare(path, workers=2, part_bytes=9000, tokenizer=sentencepiece_model)
    refused(capsys, [f"line {len(documents) + 1} ", "not JSON"], status)
    assert os.listdir(tmp_path / "out.parts")
