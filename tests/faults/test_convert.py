# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert`` killed at any time, and on a full disk: what it writes is whole or absent.

For ``mtraining data`` see tests/tools/data/test_resume.py, for signals that can be handled
tests/tools/convert/test_target_folder.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.support.convert_cases import plain_pair, same, weights

STORM = """
import os, random, sys, time
from megatron_mtraining.tools import cli
import megatron.core.dist_checkpointing
from megatron_mtraining.tools.convert import to_hf, to_megatron

seed, *words = sys.argv[1:]
chance = random.Random(seed)
out, number, killed = words[3], 0, 0
while killed < 10 and number < 60:
    child = os.fork()
    if not child:
        os._exit(cli.main(words))
    started = time.monotonic()
    if number < 1:  # one run to its end: how long it takes
        assert os.waitpid(child, 0)[1] == 0
        took = time.monotonic() - started
        words.append("--overwrite")
        print("took", took, flush=True)
        number += 1
        continue
    time.sleep(chance.random() * took)
    os.kill(child, 9)
    _, status = os.waitpid(child, 0)
    there = sorted(os.listdir("."))
    # The old folder is there, or for a moment in the private one, from where the next run brings it back.
    assert out in there or "." + out + ".partial" in there, there
    assert set(there) <= {out, "." + out + ".partial"}, there
    print(number, "killed" if status else "ended", there, flush=True)
    number += 1
    if status:
        killed += 1
    else:  # it is faster than the first one
        took *= 0.8
    if out in there:
        print("files", sorted(p for _, _, files in os.walk(out) for p in files))
sys.exit(cli.main(words))
"""
"""Conversions over each other's result, of which ten are killed, but not the first and the last."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_pair(tmp_path_factory.mktemp("plain"))


def storm(words: list, folder: Path) -> list[str]:
    """What the runs have printed."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", STORM, "5", "convert", *map(str, words)],
        cwd=folder, timeout=200, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    killed = [line for line in lines if " killed " in line]
    assert len(killed) >= 5, lines
    assert len({line for line in lines if line.startswith("files ")}) == 1, lines
    assert [path.name for path in folder.iterdir()] == ["out"]
    return lines


@pytest.mark.slow
def test_hf_to_megatron_killed_at_any_time(plain, tmp_path):
    """The next run makes what a run alone makes, and no run has left a folder with a part of the files."""
    storm(["hf-to-megatron", plain[0], "out"], tmp_path / "storm")
    assert _files(tmp_path / "storm/out") == _files(plain[1])


@pytest.mark.slow
def test_megatron_to_hf_killed_at_any_time(plain, tmp_path):
    storm(["megatron-to-hf", plain[1], "out"], tmp_path / "storm")
    same(weights(plain[0]), weights(tmp_path / "storm/out"))


def _files(folder: Path) -> dict[str, bytes]:
    """Contents, but of what names the time or the place of its writing."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("integrity.json", ".metadata", "megatron_args.sh")
    }
