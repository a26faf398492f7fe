# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The commands that README and docs show: their options exist, and those that need no GPU run as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_mtraining.tools.cli import _parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)


def commands(page: Path, start: str) -> list[str]:
    """The commands of a page's indented blocks that begin with ``start``, continued lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = []
    for block in BLOCK.findall(text):
        lines += textwrap.dedent(block).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(start)]


SHOWN = [(page, command) for page in PAGES for command in commands(page, "mtraining ")]


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


def run(command: str, folder: Path) -> str:
    """Run a shown command in a folder; returns what it prints."""
    words = [sys.executable, "-m", "megatron_mtraining", *shlex.split(command)[1:]]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_readme_from_weights_to_settings(tmp_path):
    """All commands of README's tools, as printed, with a tiny model under the names that it uses."""
    pytest.importorskip("transformers")
    from tests.support.convert_cases import save
    from tests.support.data_cases import save_tokenizer

    for name in ("Qwen2.5-0.5B", "Qwen2.5-3B"):
        save("qwen2 tied", tmp_path / name, vocab_size=512, max_position_embeddings=1024)
        save_tokenizer(tmp_path / name)
    (tmp_path / "INPUT").mkdir()
    source = Path(shlex.__file__).read_text(encoding="utf-8")
    (tmp_path / "INPUT/text.txt").write_text(source * 40, encoding="utf-8")
    (tmp_path / "FILE").write_text(source, encoding="utf-8")
    shown = [each.replace("INPUT...", "INPUT") for page, each in SHOWN if str(page) == "README.md"]
    by_name = {" ".join(each.split()[1:3]): each for each in shown}
    prepare = by_name.pop("data prepare").replace("131072", "8192")  # of less text than that
    assert "mix" in run(prepare, tmp_path) and (tmp_path / "mix.idx").is_file()
    run(by_name.pop("convert hf-to-megatron"), tmp_path)
    os.rename(tmp_path / "checkpoint", tmp_path / "run")  # in place of training
    run(by_name.pop("convert megatron-to-hf"), tmp_path)
    os.rename(tmp_path / "run", tmp_path / "checkpoint")
    verify = by_name.pop("convert verify") + " --seq 512 --device cpu"
    assert "PASS" in run(verify, tmp_path)
    inspect = by_name.pop("inspect MODEL").replace("MODEL", "Qwen2.5-0.5B")
    run(f"{inspect} --seq 1024 --device cpu --policy fixed", tmp_path)
    assert (tmp_path / "inspect-out/settings.json").is_file()
    assert set(by_name) == {"patch apply"}, "tried by tests/tools/test_patching.py"


@pytest.mark.slow
def test_training_on_a_cpu_as_docs_show_it(tmp_path):
    """The command of docs/megatron.md, in a copy of the first checkout that MEGATRON_LM_PATH names."""
    import shutil

    paths = os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep)
    if not paths[0]:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout")
    pytest.importorskip("pybind11")
    shutil.copytree(paths[0], tmp_path / "meg", ignore=shutil.ignore_patterns(".git", "*.so"))
    [command] = [each for each in commands(Path("docs/megatron.md"), "torchrun") if "--cpu" in each]
    words = shlex.split(command.replace("/path/to/Megatron-LM", str(tmp_path / "meg")))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(re.findall("lm loss: ", done.stdout)) == 5
