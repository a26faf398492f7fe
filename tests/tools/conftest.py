# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of several commands."""

import io
from pathlib import Path

import pytest


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are made, and their files are there, but nothing is rendered, which takes seconds a page.

    For tests that do not look at pictures. Each command has one that does.
    """
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib")

    def save(self, file, **_):
        if isinstance(file, io.BytesIO):
            file.write(b"<svg></svg>")
        elif isinstance(file, io.StringIO):
            file.write("<svg></svg>")
        else:
            Path(file).write_text("<svg></svg>", encoding="utf-8")

    monkeypatch.setattr(figure.Figure, "savefig", save)
