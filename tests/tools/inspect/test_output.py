# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of ``mtraining inspect``: settings, and what they may replace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_mtraining.tools.common.settings_bytes import settings_bytes
from megatron_mtraining.tools.inspect import collect
from tests.support.inspect_cases import inspect, quick, refused


def test_settings_as_json_and_yaml():
    settings = {"slash": 3, "layers": {"0": {"dense": True}}}
    assert json.loads(settings_bytes(Path("s.json"), settings)) == settings
    yaml = pytest.importorskip("yaml")
    written = settings_bytes(Path("s.yaml"), settings)
    assert yaml.safe_load(written) == settings and not written.startswith(b"{")


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    "name", ["results.json", "settings.json", "head_layer1_head2.png", "mine.json"]
)
def test_files_that_exist_are_replaced_only_on_request(
    name, llama, words, tmp_path, capsys, monkeypatch
):
    """Known before the model runs."""
    file = tmp_path / name
    file.write_text("mine")
    more = ["--head", "1:2", *(["--settings", file] if name == "mine.json" else [])]
    command = (llama, *quick(words, tmp_path, "--rows", 64, "--policy", "fixed", *more))
    with monkeypatch.context() as patch:
        patch.setattr(collect.Collector, "__init__", None)
        option = "--settings" if name == "mine.json" else "--output"
        refused(capsys, [option, str(file), "exists", "--overwrite"], *command)
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    if name in ("results.json", "mine.json"):
        assert inspect(*command, "--overwrite") == 0
        assert isinstance(json.loads(file.read_text()), dict)


def test_settings_among_the_other_files(llama, words, tmp_path, capsys):
    named = ["--settings", "summary.txt", "name another"]
    out = tmp_path / "out"
    out.mkdir()
    refused(capsys, named, llama, *quick(words, out, "--settings", out / "summary.txt"))
