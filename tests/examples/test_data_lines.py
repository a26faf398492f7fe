# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The pages' commands for long documents keep books as they are, and code, whose files are short."""

from __future__ import annotations

import glob
import json
import shlex
import shutil

import pytest

from megatron_mtraining.tools.cli import main
from tests.support.page_commands import MODELS, PAGES, as_run, commands

LINES = [(page, line) for page in PAGES for line in commands(page) if " --long-only " in line]


def test_all_recipes_have_one():
    assert len([page for page, _ in LINES if page.parts[0] == "examples"]) == 4


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A tokenizer of bytes under every name, two books, and two repositories of files below --long-only."""
    pytest.importorskip("transformers")
    from tests.support.data_cases import save_tokenizer

    folder = tmp_path_factory.mktemp("staged")
    save_tokenizer(folder / MODELS[0])
    for name in MODELS[1:]:
        shutil.copytree(folder / MODELS[0], folder / name)
    texts = {f"books/{name}.txt": "words " * 50_000 for name in "ab"}
    texts |= {f"repos/{name}/{number}.py": "x = 1\n" * 700 for name in "cd" for number in range(8)}
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    return folder


@pytest.mark.parametrize("page, line", LINES, ids=lambda value: str(value)[:40])
def test_no_document_is_dropped(page, line, staged, monkeypatch, capsys):
    monkeypatch.chdir(staged)
    words = shlex.split(as_run(line))
    words = [
        each for word in words for each in (sorted(glob.glob(word)) if "*" in word else [word])
    ]
    assert main([*words[1:], "--workers", "1", "--overwrite"]) == 0
    report = json.loads(
        (staged / words[words.index("--output") + 1]).with_suffix(".json").read_text()
    )
    assert (report["documents"]["read"], report["documents"]["short"]) == (4, 0)
    assert "warning" not in capsys.readouterr().err
