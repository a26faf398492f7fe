# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The commands that README and docs show: their options exist, and those that need no GPU run as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining.tools.cli import _parser
from tests.support.page_commands import (
    PAGES,
    PROGRAMS,
    as_run,
    commands,
    reason_not_to_run,
    stage,
)

SHOWN = [
    (page, command)
    for page in PAGES
    for command in commands(page)
    if command.startswith("mtraining ")
]
RUN = {page: [each for each in commands(page) if not reason_not_to_run(each)] for page in PAGES}
MADE_BEFORE = {"docs/serving.md": "run", "README.md": "run"}
"""A trained checkpoint that a page takes as given."""


def test_commands_are_found():
    assert len(SHOWN) >= 10 and {page.name for page, _ in SHOWN} >= {"README.md", "checkpoints.md"}


@pytest.mark.parametrize("page, command", SHOWN, ids=lambda value: str(value)[:60])
def test_options_exist(page, command, capsys):
    words = [word.replace("...", "") for word in shlex.split(command, comments=True)[1:]]
    words = ["1024" if word == "N" else word for word in words]
    if words[0] == "plan":
        pytest.skip("takes Megatron's flags, which tests/tools/plan reads from the recipes")
    parser, _ = _parser(words)
    try:
        parser.parse_args([word for word in words if word])
    except SystemExit:
        pytest.fail(f"{page}: {command}\n{capsys.readouterr().err}")


def test_programs_begin_commands():
    for line in ("mtraining x", "RECALL=0.95 examples/run.sh x", "export A=b", "torchrun ..."):
        assert PROGRAMS.match(line)
    for line in ("--rotary-base 1", "k <= i", "[mtraining] x", "# a comment", '{"price": 1}'):
        assert not PROGRAMS.match(line)
    assert as_run("a --seq-length N --output N.x /path/to/Megatron-LM/pretrain_gpt.py") == (
        "a --seq-length 1024 --output N.x Megatron-LM/pretrain_gpt.py"
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found], ids=str)
def test_commands_run_as_printed(page, tmp_path):
    """All commands of a page that need no GPU, in one shell, in order; see tests/support/page_commands.py."""
    pytest.importorskip("transformers")
    pytest.importorskip("backports.zstd")
    environment = stage(tmp_path)
    script = ["set -eo pipefail"]
    if str(page) in MADE_BEFORE:
        script.append(f"mtraining convert hf-to-megatron MODEL {MADE_BEFORE[str(page)]}")
    for command in RUN[page]:
        script += [f"echo {shlex.quote('$ ' + command)}", as_run(command)]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("\n$ ") + done.stdout.startswith("$ ") == len(RUN[page])
    for command in RUN[page]:
        if command.startswith("mtraining convert verify"):
            assert "PASS" in done.stdout


@pytest.mark.slow
def test_training_on_a_cpu_as_docs_show_it(tmp_path):
    """The command of docs/megatron.md, in a copy of the first checkout that MEGATRON_LM_PATH names."""
    import shutil

    paths = os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep)
    if not paths[0]:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout")
    pytest.importorskip("pybind11")
    shutil.copytree(paths[0], tmp_path / "meg", ignore=shutil.ignore_patterns(".git", "*.so"))
    [command] = [each for each in commands(Path("docs/megatron.md")) if " --cpu " in each]
    words = shlex.split(command.replace("/path/to/Megatron-LM", str(tmp_path / "meg")))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(re.findall("lm loss: ", done.stdout)) == 5
