# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan``: careless numbers and files of flags are refused in one line."""

from __future__ import annotations

import json
import os

import pytest

from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.plan.options import flags_of_megatron
from tests.support.plan_cases import SMALL

BAD = [
    "--slack nan", "--slack -1", "--slack 1e300", "--overhead-gib inf", "--gpu-memory-gib nan",
    "--gpu-memory-gib inf --find seq-length", "--gpu-memory-gib 1e300 --find context-parallel-size",
    "--gpu-memory-gib 0", f"--world-size {10**30}", "--world-size 0", f"--num-layers {10**18}",
    f"--seq-length {512 * 10**30} --max-position-embeddings {512 * 10**30}",
    "--kv-channels 0", f"--context-parallel-size {10**18}", "--hierarchical-context-parallel-sizes 0 0",
    "--mtraining-price nan", f"--mtraining-gathered-ranks {10**20}", f"--mtraining-window {10**25}",
    f"--mtraining-loss-chunk {10**20}", f"--seq-length {'9' * 5000}", "--seq-length 512.0",
    "--padded-vocab-size 999", "--num-layers 1000000 --pipeline-model-parallel-size 1000000",
    "--hidden-dropout nan", "--hidden-dropout 2", "--mtraining-prize 1",
]  # fmt: skip


def refused(capsys, words) -> str:
    try:
        status = main(["plan", "memory", *map(str, words)])
    except SystemExit as end:  # argparse's, which prints the same
        status = end.code
    said = capsys.readouterr()
    assert status == 2 and not said.out, (status, said.out)
    last = said.err.splitlines()[-1]
    assert "Traceback" not in said.err and last.startswith("mtraining plan") and len(last) < 2100
    return last


@pytest.mark.parametrize("words", BAD, ids=lambda words: words[:50])
def test_numbers(words, capsys):
    last = refused(capsys, [*SMALL.split(), *words.split()])
    assert any(word in last for word in words.split() if word.startswith("--")), last


@pytest.mark.parametrize("name", ["bytes", "quote", "", "none"])
def test_files_of_flags(name, tmp_path, capsys):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "quote").write_text('--num-layers "4')
    assert "--flags-file" in refused(capsys, ["--flags-file", tmp_path / name])


def test_flags_by_a_pipe_of_the_shell(capsys):
    """``--flags-file <(command)``."""
    read, write = os.pipe()
    os.write(write, SMALL.encode())
    os.close(write)
    try:
        assert main(["plan", "memory", "--flags-file", f"/dev/fd/{read}"]) == 0
    finally:
        os.close(read)


@pytest.mark.parametrize("number", ["0", "-4", "9" * 20])
def test_numbers_of_processes(number, capsys):
    words = ["torchrun", f"--nproc-per-node={number}", "pretrain_gpt.py", *SMALL.split()]
    assert "--nproc-per-node is" in refused(capsys, words)


@pytest.mark.parametrize("nodes", ["\u00b2", "0", "1:4"])
def test_numbers_of_nodes(nodes, capsys):
    words = ["torchrun", "--nproc-per-node", "4", "--nnodes", nodes, "pretrain_gpt.py"]
    said = refused(capsys, ["--world-size", "4", "--", *words, *SMALL.split()])
    assert "--nnodes is" in said and "--world-size" not in said  # which is given, and does not help


def test_an_environment_of_something_else(monkeypatch, capsys):
    """A Megatron-LM that is importable takes defaults from it."""
    flags_of_megatron.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "all")
    try:
        assert main(["plan", "memory", *SMALL.split(), "--json"]) == 0
    finally:
        flags_of_megatron.cache_clear()
    assert os.environ["WORLD_SIZE"] == "all"
    assert json.loads(capsys.readouterr().out)["stages"]
