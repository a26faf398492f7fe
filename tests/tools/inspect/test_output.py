# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The settings file."""

from __future__ import annotations

import json

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.inspect.output import write_settings


def test_settings_as_json_and_yaml(tmp_path):
    settings = {"slash": 3, "layers": {"0": {"dense": True}}}
    write_settings(tmp_path / "s.json", settings)
    assert json.loads((tmp_path / "s.json").read_text()) == settings
    yaml = pytest.importorskip("yaml")
    write_settings(tmp_path / "s.yaml", settings)
    assert yaml.safe_load((tmp_path / "s.yaml").read_text()) == settings
    write_settings(tmp_path / "s.json", {})  # replaced
    assert json.loads((tmp_path / "s.json").read_text()) == {}
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ConfigError, match="--settings"):
        write_settings(tmp_path / "s.json" / "s.json", settings)
