# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare`` when what it reads or has written was changed, between runs or during one."""

from __future__ import annotations

import os

import pytest

from megatron_mtraining.tools.data import inputs as inputs_module
from megatron_mtraining.tools.data import prepare as prepare_module
from megatron_mtraining.tools.data import store
from tests.support.data_cases import interrupted, refused, write_jsonl

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_hang")


def test_broken_parts_are_tokenized_again(prepare, documents, tmp_path, capsys, monkeypatch):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    options = {"part_bytes": 5000}
    assert prepare(given, output="whole", **options) == 0
    expected = (tmp_path / "whole.bin").read_bytes()
    interrupted(prepare, monkeypatch, given, **options)
    part = min((tmp_path / "out.parts").glob("*.part"))
    good = part.read_bytes()
    number = len(list(part.parent.glob("*.part")))
    broken = {"empty": b"", "short": good[-11:], "cut": good[:-2], "without a start": good[2:]}
    for at in (3, -50, -10, -1):  # tokens, counts, their size, the sum
        broken[f"byte {at}"] = bytearray(good)
        broken[f"byte {at}"][at] ^= 1
    for name, content in broken.items():
        part.write_bytes(content)
        capsys.readouterr()
        interrupted(prepare, monkeypatch, given, **options)
        error = capsys.readouterr().err
        assert f"a part of {given} is broken" in error, name
        assert f"going on: {number - 1} of {number}" in error, name
        assert part.read_bytes() == good, name
    assert prepare(given, **options) == 0
    assert (tmp_path / "out.bin").read_bytes() == expected


@pytest.mark.parametrize("place", ["head", "tail"])
def test_a_changed_file_is_named_and_read_again(
    place, prepare, documents, tmp_path, capsys, monkeypatch
):
    """Also one that has the size and the time that it had."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    same = write_jsonl(tmp_path / "b.jsonl", documents)
    interrupted(prepare, monkeypatch, given, same)
    about, data = given.stat(), bytearray(given.read_bytes())
    assert len(data) < inputs_module.ENDS
    at = data.index(b'"text": "') + 9 if place == "head" else len(data) - 4
    data[at : at + 1] = b"Z"
    given.write_bytes(data)
    os.utime(given, ns=(about.st_atime_ns, about.st_mtime_ns))
    capsys.readouterr()
    assert prepare(given, same) == 0
    error = capsys.readouterr().err
    assert f"{given} ({len(data)} bytes) has changed: it is tokenized again" in error
    assert f"{same} (" not in error and "going on: 1 of 2" in error
    assert prepare(given, same, output="b") == 0
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()


@pytest.mark.parametrize("how", ["grown", "cut", "gone"])
def test_a_file_that_changes_while_it_is_read(
    how, prepare, documents, tmp_path, capsys, monkeypatch
):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    data, tokenize = given.read_bytes(), prepare_module._tokenize

    def changed(*args):
        given.write_bytes(data + b'{"text": "more"}\n' if how == "grown" else data[:5000])
        if how == "gone":
            given.unlink()
        tokenize(*args)

    monkeypatch.setattr(prepare_module, "_tokenize", changed)
    named = "cannot be read" if how == "gone" else "changed while it was read"
    refused(capsys, [str(given), named], prepare(given))
    assert not list(tmp_path.glob("out.[bij]*"))


def test_links_among_the_parts_are_not_followed(prepare, documents, tmp_path, capsys, monkeypatch):
    """The folder is closed to others, and what is in it already has to be a file."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    interrupted(prepare, monkeypatch, given)
    parts = tmp_path / "out.parts"
    parts.chmod(0o777)
    part = next(parts.glob("*.part"))
    link = parts / f"{part.name}.partial"
    (tmp_path / "other").write_text("other")
    link.symlink_to(tmp_path / "other")
    capsys.readouterr()
    refused(capsys, [str(link)], prepare(given))
    assert (tmp_path / "other").read_text() == "other"
    link.unlink()
    interrupted(prepare, monkeypatch, given)
    assert parts.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        with store.Parts(parts, [])._written(parts / "new"):
            (parts / "new.partial").unlink()
            (parts / "new.partial").symlink_to(tmp_path / "other")
            with store.Parts(parts, [])._written(parts / "new"):
                raise AssertionError
    assert (tmp_path / "other").read_text() == "other"
