# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The output folder of ``mtraining eval``: what a failed run removes there, and whose files stay."""

from __future__ import annotations

import shutil

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.eval.kept_samples import KeptSamples, samples_folder
from tests.support.eval_cases import QUIET, refused, run

pytestmark = pytest.mark.usefixtures("unrendered")


def no_model(tmp_path, out):
    """A command that is refused as soon as it opens the model."""
    (tmp_path / "text.txt").write_text("words")
    text = ("--text", tmp_path / "text.txt")
    return ("perplexity", tmp_path / "nowhere", *text, "--output", out, *QUIET)


@pytest.mark.parametrize("linked", [False, True])
def test_files_of_the_user_stay(linked, tmp_path, capsys):
    """``samples`` may be the user's own folder."""
    project = tmp_path / "project"
    own = tmp_path / "elsewhere" if linked else project / "samples"
    own.mkdir(parents=True)
    project.mkdir(exist_ok=True)
    (own / "song.wav").write_bytes(b"sound")
    (own / "list.jsonl").write_text('{"song": 1}\n')
    if linked:
        (project / "samples").symlink_to(own)
    refused(capsys, [project / "samples", "--output"], *no_model(tmp_path, project))
    assert sorted(path.name for path in own.iterdir()) == ["list.jsonl", "song.wav"]
    assert (project / "samples").is_symlink() == linked


def test_a_refused_second_run_leaves_the_first_alone(tmp_path, capsys):
    out = tmp_path / "out"
    with samples_folder(out) as samples:
        refused(capsys, ["in use by another run"], *no_model(tmp_path, out))
        KeptSamples(samples / "one.jsonl", {}, overwrite=False).add({"id": 0, "prompt": ""})
    assert sorted(path.name for path in samples.iterdir()) == ["lock", "one.jsonl"]


def test_a_failed_run_removes_what_it_made(tmp_path):
    out, own = tmp_path / "out", tmp_path / "own"
    (own / "samples").mkdir(parents=True)

    def fails(output, *, sample=False):
        with pytest.raises(ZeroDivisionError), samples_folder(output) as samples:
            kept = KeptSamples(samples / "one.jsonl", {"run": 1}, overwrite=False)
            if sample:
                kept.add({"id": 0, "prompt": ""})
            raise ZeroDivisionError

    for output in (out, own):
        fails(output)
    assert not out.exists() and list(own.rglob("*")) == [own / "samples"]
    out.mkdir()
    (out / "notes.txt").write_text("own")
    fails(out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    fails(out, sample=True)
    fails(out)
    assert sorted(path.name for path in (out / "samples").iterdir()) == ["lock", "one.jsonl"]


@pytest.mark.parametrize("output", ["eval-out", "."])
def test_an_output_in_the_model_s_folder(output, llama, lm, tmp_path, monkeypatch):
    """What the run writes there is not a change of the model."""
    asked = lm(lambda request: "1")
    shutil.copytree(llama, tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    words = ("needle", ".", "--lengths", 384, "--depths", 1, "--attention", "dense", *QUIET)
    for samples in (1, 2):
        assert run(*words, "--samples", samples, "--output", output) == 0
    assert [request.doc_id for request in asked] == [0, 1]


def test_what_differs_is_named_with_both_values(tmp_path):
    file = tmp_path / "out" / "samples" / "one.jsonl"
    file.parent.mkdir(parents=True)
    before = {"MODEL": "/a", "--yarn": None, "--data": 0, "--depths": 2}
    KeptSamples(file, before, overwrite=False).add({"id": 0, "prompt": ""})
    now = {"MODEL": "/b", "--yarn": 2.0, "--depths": 2, "--chat": True}
    named = r"1 samples .*differs in MODEL \(/a there, /b now\), --yarn \(none there, 2.0 now\), "
    named += r"--data \(0 there, none now\), --chat \(none there, true now\): "
    with pytest.raises(ConfigError, match=named):
        KeptSamples(file, now, overwrite=False)
    assert KeptSamples(file, now, overwrite=True).rows == {}
