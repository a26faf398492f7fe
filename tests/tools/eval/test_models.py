# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval`` on the same weights in different forms, and with a settings file."""

from __future__ import annotations

import json

import pytest

from tests.support.convert_cases import to_megatron
from tests.support.eval_cases import QUIET, refused, run, samples, save_model

pytestmark = pytest.mark.usefixtures("unrendered")
WORDS = ("--samples", 1, "--lengths", 384, "--depths", 1, *QUIET, "--mtraining-price", 4)


def test_a_hugging_face_folder_and_its_megatron_form(tmp_path, capsys):
    """The same samples; the temporary folder goes."""
    pytest.importorskip("megatron.core")
    folder, checkpoint = save_model(tmp_path / "hf"), tmp_path / "megatron"
    assert to_megatron(folder, checkpoint) == 0
    assert run("needle", folder, "--output", tmp_path / "one", *WORDS) == 0
    assert run("needle", checkpoint, "--output", tmp_path / "other", *WORDS) == 0
    one, other = samples(tmp_path / "one"), samples(tmp_path / "other")
    assert one == other and len(one) == 2
    names = sorted(path.name for path in (tmp_path / "other").iterdir())
    assert names == ["needle.json", "needle.png", "samples"]
    found = json.loads((tmp_path / "other" / "needle.json").read_text())
    assert found["model"] == f"Megatron checkpoint, {checkpoint / 'release'}"
    refused(
        capsys, ["--lengths has 4096", "2048 positions"],
        "needle", checkpoint, "--output", tmp_path / "long", "--lengths", 4096, *QUIET,
    )  # fmt: skip


def test_a_megatron_checkpoint_without_a_configuration(tmp_path, capsys):
    import shutil

    pytest.importorskip("megatron.core")
    folder, checkpoint = save_model(tmp_path / "hf"), tmp_path / "megatron"
    assert to_megatron(folder, checkpoint) == 0
    shutil.rmtree(checkpoint / "hf")
    words = ("needle", checkpoint, "--output", tmp_path / "out", *WORDS)
    refused(capsys, ["MODEL is", "--like"], *words)
    assert not (tmp_path / "out").exists()
    assert run(*words, "--like", folder) == 0


def test_a_settings_file(llama, tmp_path, capsys):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"price": 4, "layers": {"0": {"dense": True}}}))
    words = (*WORDS[:-2], "--attention", "mtraining")
    out = tmp_path / "out"
    assert run("needle", llama, "--output", out, *words, "--settings", file) == 0
    one = samples(out)["needle-384-mtraining"][0]
    plain = tmp_path / "plain"
    assert run("needle", llama, "--output", plain, *words, "--mtraining-price", 4) == 0
    assert one["density"] > samples(plain)["needle-384-mtraining"][0]["density"]
    file.write_text(json.dumps({"price": 4, "layers": {"0": {"dense": True}, "1": {"price": 1}}}))
    more = ("needle", llama, "--output", out, *words, "--settings", file)
    refused(capsys, ["differs in the file of --settings ("], *more)
    file.write_text(json.dumps({"layers": {"9": {"dense": True}}}))
    refused(capsys, [file, "9"], *more, "--overwrite")
