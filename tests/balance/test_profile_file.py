# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Latency profiles as files: written and read back, found for a GPU, and refused where damaged."""

from __future__ import annotations

import json
import os

import pytest

from megatron_mtraining.balance import KINDS, Latency, LatencyModel
from megatron_mtraining.balance.profile_file import DEFAULT, FOLDER, as_text, slug
from megatron_mtraining.balance.terms import Entry, Error
from megatron_mtraining.errors import ConfigError

ENTRY = Entry(
    "dense",
    64,
    {"search": {}, "forward": {"pairs": 0.5}, "backward": {"rows": 2.0}},
    Latency(1, 2, 3),
)
MODEL = LatencyModel(
    gpu="Test GPU",
    processors=78,
    entries=(ENTRY,),
    errors={"total": Error(0.01, 0.05, 7)},
    versions={"torch": "2.11"},
    commit="1234567",
    command="mtraining profile",
    seconds=60.0,
    points={"columns": ["tokens", "ms"], "rows": [[4096, 0.5], [8192, 1.0]]},
    left_out=("a shape: out of memory",),
)


def test_round_trip(tmp_path):
    file = tmp_path / "profile.json"
    MODEL.save(file)
    assert LatencyModel.load(file) == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert "   [4096, 0.5],\n   [8192, 1.0]\n" in file.read_text()  # a measurement a line
    assert json.loads(file.read_text())["points"] == MODEL.points


def test_without_measurements(tmp_path):
    plain = LatencyModel("Test GPU", (ENTRY,))
    plain.save(tmp_path / "plain.json")
    assert LatencyModel.load(tmp_path / "plain.json") == plain


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "profile.json"
    file.write_text("before")

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        MODEL.save(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_the_package_has_the_default():
    found = LatencyModel.for_gpu(DEFAULT)
    assert found.gpu == DEFAULT and found.warning == ""
    kinds = {(entry.kind, entry.head_dim) for entry in found.entries}
    assert kinds == {(kind, head_dim) for kind in KINDS for head_dim in (64, 128)}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_committed_profiles_have_the_names_of_their_gpus(path):
    assert path.stem == slug(LatencyModel.load(path).gpu)


def test_another_gpu():
    found = LatencyModel.for_gpu("NVIDIA T4")
    assert found.gpu == DEFAULT
    assert found.warning == (
        "no latency profile for GPU NVIDIA T4: relative times of the NVIDIA H200 are used; run mtraining "
        "profile and give --mtraining-profile FILE"
    )
    assert LatencyModel.for_gpu("").warning  # the slug of no name is no file's
    assert LatencyModel.for_gpu("../../config").gpu == DEFAULT


def test_a_profile_of_the_user(tmp_path):
    file = tmp_path / "own.json"
    MODEL.save(file)
    assert LatencyModel.for_gpu("Test GPU", file) == MODEL
    other = LatencyModel.for_gpu("NVIDIA H200", file)
    assert other.gpu == "Test GPU"
    assert f"{file} is of GPU Test GPU, and this one is NVIDIA H200" in other.warning


def changed(**changes) -> dict:
    return {**json.loads(as_text(vars(MODEL))), **changes}


def entry(**changes) -> dict:
    return {"entries": [{**json.loads(as_text(vars(MODEL)))["entries"][0], **changes}]}


@pytest.mark.parametrize(
    "content, message",
    [
        ([], "is not a JSON object"),
        ({}, "is no latency profile: give a file that mtraining profile wrote"),
        (changed(version=2), "of version 2, and this is for version 1: measure it again"),
        (changed(version=None), "of version None"),
        (changed(entries=[]), "it has no entries"),
        (changed(entries={}), "'entries' is {}, and not a list"),
        (changed(entries=[3]), "there is 3 in place of an object with 'kind'"),
        (changed(gpu=7), "'gpu' is 7, and not a text"),
        (changed(processors=0), "'processors' is 0, and not a GPU's multiprocessors"),
        (changed(processors=None), "'processors' is None, and not a whole number"),
        (changed(errors=[]), "'errors' is [], and not an object"),
        (changed(errors={"total": {"median": 0.1}}), "'worst' is None"),
        (changed(errors={"total": 0.1}), "there is 0.1 in place of an object with 'median'"),
        (changed(seconds=-1), "'seconds' is -1, and not a finite number of 0 or more"),
        (changed(entries=entry()["entries"] * 2), "two entries of one kind and head dim"),
        (changed(points={"columns": ["a"], "rows": [[1, 2]]}), "a measurement has more or fewer"),
        (changed(**entry(kind="sparse")), "an entry is of kind 'sparse'"),
        (changed(**entry(head_dim=True)), "'head_dim' is True"),
        (changed(**entry(forward={"pairs": float("nan")})), "'pairs' is nan"),
        (changed(**entry(forward={"pairs": float("inf")})), "'pairs' is inf"),
        (changed(**entry(forward={"pairs": 10**400})), "and not a finite number of 0 or more"),
        (changed(**entry(forward={"pairs": -0.5})), "'pairs' is -0.5"),
        (changed(**entry(forward={"pairs": "0.5"})), "'pairs' is '0.5'"),
        (changed(**entry(forward={"colour": 1})), "'forward' has a term 'colour'"),
        (changed(**entry(forward={})), "'forward' of dense and head dim 64 takes no time"),
        (changed(**entry(host={"search": 1, "forward": 1})), "'backward' is None"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        LatencyModel.load(file)
    assert message in str(refused.value) and str(file) in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigError, match="latency profile .*none.json cannot be read: No such file"
    ):
        LatencyModel.load(tmp_path / "none.json")
