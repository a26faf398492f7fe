# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: its own files are no input, and nobody else's are lost."""

from __future__ import annotations

import contextlib
import os

import pytest

from megatron_mtraining.tools.data import output as output_module
from megatron_mtraining.tools.data import prepare as prepare_module
from tests.support.data_cases import IN_ORDER, ids, interrupted, refused, report, write_jsonl

pytest.importorskip("transformers")


@pytest.fixture
def folder(documents, tmp_path):
    """Of text files, in which the output is, too."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number, text in enumerate(documents):
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return folder


def test_output_inside_of_input_is_not_read(prepare, folder, tmp_path, monkeypatch):
    assert prepare(folder, output="beside", **IN_ORDER) == 0
    expected = ids(tmp_path / "beside")
    inside = {"output": "data/books", "part_bytes": 2000, **IN_ORDER}
    interrupted(prepare, monkeypatch, folder, **{**inside, "output": "data/others"})
    interrupted(prepare, monkeypatch, folder, **inside)
    assert len(list((folder / "books.parts").glob("*.part"))) > 3
    assert prepare(folder, **inside) == 0
    assert ids(folder / "books") == expected
    about = report(folder / "books")
    assert (about["files"], about["left_out_in_folders"]) == (200, 1)  # the folder others.parts
    # The dataset, and what Megatron keeps of it: text, too
    kept = folder / "books" / "cache" / "GPTDataset_indices"
    kept.mkdir(parents=True)
    (kept / "abc-GPTDataset-train-description.txt").write_text("kept")
    assert prepare(folder, overwrite=True, **inside) == 0
    assert ids(folder / "books") == expected and not (folder / "books").exists()


def test_input_is_never_overwritten(prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "books.json", documents)
    link = tmp_path / "link.jsonl"
    link.symlink_to(given)
    before = given.read_bytes()
    for overwrite in ({}, {"overwrite": True}):
        for name in (given, link, tmp_path):
            status = prepare(name, format="jsonl", output="books", **overwrite)
            refused(capsys, ["books.json"], status)
            assert given.read_bytes() == before
    # Files that only have the names: with --overwrite they would go, but not while they are read.
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.bin").write_text("text " * 200)
    (folder / "b.idx").write_text("text " * 200)
    for output, file in {"a": "a.bin", "b": "b.idx"}.items():
        more = {"format": "text", "output": f"in/{output}"}
        refused(capsys, [file, "--overwrite"], prepare(folder, **more))
        for given in (folder, folder / file):
            status = prepare(given, overwrite=True, **more)
            refused(capsys, [str(folder / file), "no report", "another prefix"], status)
        assert (folder / file).read_text() == "text " * 200


@pytest.mark.parametrize("text", ['{"books": 5}', "[" * 200000])
def test_files_of_others_are_not_overwritten(text, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    (tmp_path / "out.json").write_text(text)
    refused(capsys, ["out.json", "--overwrite"], prepare(given))
    refused(capsys, ["out.json", "report", "another"], prepare(given, overwrite=True))
    assert (tmp_path / "out.json").read_text() == text


@pytest.mark.parametrize("kind", ["file", "folder of another"])
def test_parts_of_others_are_not_removed(kind, prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    parts = tmp_path / "out.parts"
    mine = parts if kind == "file" else parts / "a.part"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    refused(capsys, ["out.parts"], prepare(given, overwrite=True))
    assert mine.read_text() == "mine"


def test_files_and_folders_of_others_stay(prepare, documents, tmp_path, monkeypatch):
    """What comes into PREFIX.parts meanwhile, and what is not Megatron's where it keeps its indices."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    cache = tmp_path / "out" / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    mine, kept = tmp_path / "out.parts" / "mine.txt", prepare_module._kept

    def slow(*args):
        mine.write_text("mine")
        return kept(*args)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_kept", slow)
        assert prepare(given) == 0
    assert list(mine.parent.iterdir()) == [mine] and cache.exists()
    mine.unlink()
    (cache / "mine.txt").write_text("mine")
    (cache / "abc-GPTDataset-train-description.txt").write_text("kept")
    assert prepare(given, overwrite=True) == 0
    assert [path.name for path in cache.iterdir()] == ["mine.txt"]
    # Not through a link, either
    cache.rename(tmp_path / "other")
    cache.symlink_to(tmp_path / "other")
    (tmp_path / "other" / "0-GPTDataset-train-shuffle_index.npy").write_text("of another dataset")
    assert prepare(given, overwrite=True) == 0
    assert len(list((tmp_path / "other").iterdir())) == 2


def test_links_are_not_followed(prepare, documents, tmp_path, capsys):
    """Neither in place of the folder that is written into, nor of what a run would write in it."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "out.parts").symlink_to(other)
    refused(capsys, ["out.parts", "is a link"], prepare(given))
    assert not list(other.iterdir())
    (tmp_path / "out.parts").unlink()
    (other / "kept").write_text("kept")
    for name in ("out.bin", "out.bin.partial", "out.json.partial"):
        (tmp_path / name).symlink_to(other / "kept")
    refused(capsys, ["out.bin exists"], prepare(given))
    refused(capsys, ["out.bin has no report"], prepare(given, overwrite=True))
    (tmp_path / "out.bin").unlink()
    assert prepare(given) == 0
    (tmp_path / "out.bin").unlink()
    (tmp_path / "out.bin").symlink_to(other / "kept")
    assert prepare(given, overwrite=True) == 0
    assert (other / "kept").read_text() == "kept" and not (tmp_path / "out.bin").is_symlink()


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_a_dataset_that_appears_meanwhile_stays(
    suffix, prepare, documents, tmp_path, capsys, monkeypatch
):
    """While a run waits for the lock (.idx), or of a program that does not ask for it (.bin)."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    theirs = tmp_path / f"out.{suffix}"
    locked, kept = output_module.locked_folder, prepare_module._kept

    @contextlib.contextmanager
    def late(*args):
        with locked(*args):
            theirs.write_text("another's")
            yield

    def slow(*args):
        theirs.write_text("another's")
        return kept(*args)

    if suffix == "idx":
        monkeypatch.setattr(output_module, "locked_folder", late)
    else:
        monkeypatch.setattr(prepare_module, "_kept", slow)
    refused(capsys, [f"out.{suffix} exists", "--overwrite"], prepare(given))
    assert theirs.read_text() == "another's"
    left = {path.name for path in tmp_path.iterdir()} - {"out.parts"}
    assert left == {"a.jsonl", theirs.name}


@pytest.mark.parametrize("moved", [1, 2], ids=["bin", "bin-json"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemError], ids=["interrupted", "killed"])
def test_a_run_that_ends_while_the_dataset_is_moved(
    moved, how, prepare, documents, tmp_path, capsys, monkeypatch
):
    """Without an index nothing of it stays, and the same command goes on."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    replace, calls = os.replace, []

    def stop(source, target):
        if source.parent.name == "out.parts" and source.stem == "new":
            calls.append(target)
            if len(calls) > moved:
                raise how
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(output_module.os, "replace", stop)
        if how is KeyboardInterrupt:
            assert prepare(given) == 130
            assert [path.name for path in tmp_path.glob("out*")] == ["out.parts"]
        else:  # and nothing is cleaned up
            patch.setattr(output_module.Output, "_remove_unfinished", lambda self: None)
            with pytest.raises(SystemError):
                prepare(given)
            assert len(list(tmp_path.glob("out*"))) == 1 + moved
    assert prepare(given) == 0
    assert prepare(given, output="other") == 0
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "other.bin").read_bytes()


@pytest.mark.parametrize("output", ["", "..", "data/"])
def test_a_folder_is_no_prefix(output, documents, tokenizer, tmp_path, capsys, monkeypatch):
    from megatron_mtraining.tools import cli

    given = write_jsonl(tmp_path / "a.jsonl", documents)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    words = ["data", "prepare", str(given), "--tokenizer", str(tokenizer), "--seq-length", "256"]
    refused(capsys, ["--output", "prefix of files"], cli.main([*words, "--output", output]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "data"]
    assert not list((tmp_path / "data").iterdir())
