# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Digests of files: what changes them, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_mtraining.tools.common.digests import LENGTH, digest_of_files


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts" / "weights").write_text("1")
    return folder


def test_files_count_and_folders_do_not(model):
    before = digest_of_files(model)
    assert len(before) == LENGTH
    os.utime(model / "parts", (1, 1))
    (model / "empty").mkdir()
    assert digest_of_files(model) == before
    (model / "parts" / "weights").write_text("12")
    assert digest_of_files(model) != before


def test_a_run_s_output_in_the_folder_is_left_out(model, monkeypatch):
    """By whatever path the folder and the output are named."""
    monkeypatch.chdir(model)
    here, out = Path("."), Path("out")
    before = digest_of_files(here, [out])
    (out / "samples").mkdir(parents=True)
    (out / "samples" / "one.jsonl").write_text("{}\n")
    for name in (out, model / "out", Path("parts/../out")):
        assert digest_of_files(here, [name]) == before
    assert digest_of_files(here) != before
    assert digest_of_files(here, [out / "samples" / "one.jsonl"]) == before
    (model / "config.json").write_text("{ }")
    assert digest_of_files(here, [out]) != before


def test_an_output_around_the_folder_leaves_nothing_out(model):
    for around in (model, model.parent):
        before = digest_of_files(model, [around])
        assert before == digest_of_files(model)
        (model / "config.json").write_text((model / "config.json").read_text() + " ")
        assert digest_of_files(model, [around]) != before


def test_where_the_files_are_does_not_count(model, monkeypatch):
    file = model / "config.json"
    before = digest_of_files(model), digest_of_files(file)
    monkeypatch.chdir(model.parent)
    assert (digest_of_files(Path("model")), digest_of_files(Path("model/config.json"))) == before
    file.rename(model / "other.json")
    assert digest_of_files(model) != before[0]
    assert digest_of_files(model / "other.json") != before[1]
