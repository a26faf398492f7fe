# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining doctor``: what it says of a machine, and that its self-test can fail."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from megatron_mtraining import attention
from megatron_mtraining.tools import cli
from megatron_mtraining.tools.doctor import machine, megatron, selftest
from megatron_mtraining.tools.doctor.machine import ABSENT, FAILS, OK, Line

EXACT = {"dense dQ": 1e-7}
GPU = namedtuple("GPU", "name total_memory major minor")


@pytest.fixture
def quick(monkeypatch):
    """Lines without other processes: each that is asked imports what it is to, and ranks agree."""
    done = subprocess.CompletedProcess([], 0, '{"version": "0.19.0", "folder": "core", "count": 9, '
                                       '"missing": [], "training": ""}', "")  # fmt: skip
    monkeypatch.setattr(machine, "ask", lambda *words: done)
    monkeypatch.setattr(megatron, "ask", lambda *words: done)
    monkeypatch.setattr(selftest, "run_ranks", lambda world, device: EXACT)


def states(lines) -> dict[str, str]:
    return {line.what.partition(" (")[0]: line.state for line in lines}


def test_all_that_is_needed_works(quick, capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for text in (
        "ok             torch: ",
        "Megatron-Core: 0.19.0",
        "all 9 functions",
        "Train with",
    ):
        assert text in said


@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_wrong_results_fail(quick, monkeypatch, capsys, error):
    monkeypatch.setattr(selftest, "TOLERANCES", {"cpu": 1e-5, "cuda": 1e-5})
    monkeypatch.setattr(selftest, "run_ranks", lambda *given: {**EXACT, "sparse dK": error})
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.count("will not work  self-test") == 2 and "sparse dK by" in said
    assert "Will not work until this is mended: self-test of kernels" in said


def test_a_rank_that_fails_is_named(quick, monkeypatch):
    def fails(world, device):
        raise RuntimeError("rank 1 ends with status 1: OSError: no port")

    monkeypatch.setattr(selftest, "run_ranks", fails)
    assert all(line.state == FAILS and "no port" in line.said for line in selftest.examine(None))


def test_what_is_no_checkout_is_refused(tmp_path, capsys):
    for root in (tmp_path, tmp_path / "nothing"):
        assert cli.main(["doctor", "--megatron", str(root)]) == 2
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1 and str(root) in err


def test_a_checkout_of_another_python(quick, tmp_path):
    info = tmp_path / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    found = states(megatron.examine(tmp_path))
    assert found["patch"] == FAILS  # enums.py is not there
    if sys.version_info < (3, 12):
        info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\n")
        (line,) = megatron.examine(tmp_path)
        assert line.state == FAILS and line.needed and "Python 3.12" in line.said


def test_commands_can_be_pasted(quick, monkeypatch, tmp_path, capsys):
    root = tmp_path / "Megatron LM"
    info = root / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    monkeypatch.setattr(megatron, "is_applied", lambda *given: False)
    monkeypatch.setattr(megatron, "find_spec", lambda name: name)
    assert cli.main(["doctor", "--megatron", str(root)]) == 0
    said = capsys.readouterr().out
    assert f"mtraining patch apply '{root}'" in said and f"'{root}/pretrain_gpt.py' ..." in said


@pytest.mark.slow
def test_the_installed_megatron():
    """Whatever this environment has: all that is replaced is there."""
    lines = {line.what: line for line in megatron.examine(None)}
    assert lines["Megatron-Core"].state == OK, lines
    assert lines["Megatron-LM"].state in (OK, ABSENT), lines


def test_a_function_that_has_moved_is_named(monkeypatch):
    from megatron_mtraining.megatron import registration

    rows = registration.live_changes()
    gone = rows[3]._replace(name="gone")
    monkeypatch.setattr(registration, "live_changes", lambda: (*rows, gone))
    found = megatron.probe()
    (said,) = found["missing"]
    assert "LanguageModule.gone" in said


def test_packages(monkeypatch):
    versions = {"torch": "2.5.1", "triton": "not installed", "apex": "0.1", "accelerate": "1.15"}
    monkeypatch.setattr(machine, "installed", lambda name: versions.get(name, "not installed"))
    monkeypatch.setattr(
        "megatron_mtraining.requirements.installed", lambda name: versions.get(name, "")
    )
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: amp_C.so: no symbol\n")
    monkeypatch.setattr(machine, "ask", lambda *words: broken)
    lines = {line.what: line for line in machine.examine(None)}
    assert lines["torch"].said.startswith("2.5.1 is too old: pip install ")
    assert lines["triton"] == Line(FAILS, "triton", "not installed: pip install triton")
    assert lines["apex"].state == FAILS and lines["apex"].needed
    assert "amp_C.so: no symbol" in lines["apex"].said
    assert lines["transformer-engine"].state == ABSENT and lines["accelerate"].state == OK


@pytest.mark.parametrize(
    ("capability", "triton", "state", "said"),
    [
        ((9, 0), "3.6.0", OK, "Hopper kernels, tested"),
        ((9, 0), "3.5.1", OK, "Hopper kernels need Triton 3.6 to 3.9"),
        ((8, 0), "3.6.0", OK, "portable kernels"),
        ((10, 0), "3.6.0", OK, "portable kernels"),
        ((7, 5), "3.6.0", FAILS, "8.0 and later"),
    ],
)
def test_gpus(monkeypatch, capability, triton, state, said):
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(machine, "installed", lambda name: triton)
    properties = GPU("a GPU", 80 * 2**30, *capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    (line,) = machine._gpus()
    assert line.state == state and said in line.said and "a GPU, 80 GiB" in line.said


def test_a_driver_without_a_torch_for_it(monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    monkeypatch.setattr(machine, "_driver", lambda: "535.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (line,) = machine._gpus()
    assert line.state == FAILS and line.needed and "535.1" in line.said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (line,) = machine._gpus()
    assert line.state == ABSENT and "hides" in line.said


def test_tested_releases_are_those_of_the_docs():
    page = Path(__file__).parents[2] / "docs/compatibility.md"
    rows = {
        cells[1].strip().lower().replace(" ", "-"): cells[2]
        for cells in (line.split("|") for line in page.read_text().splitlines())
        if len(cells) > 4
    }
    for name, releases in machine.TESTED.items():
        assert all(release in rows[name.lower()] for release in releases), name


def test_the_comparison_finds_a_wrong_gradient(monkeypatch):
    for seed in torch.randint(2**31, (20,)).tolist():
        assert max(selftest.relative_errors(0, 1, "cpu", seed).values()) < 1e-5, seed
    attend = attention.attend

    def wrong(query, key, value, **given):
        return attend(query, key * 1.001, value, **given)

    monkeypatch.setattr(attention, "attend", wrong)
    assert selftest.relative_errors(0, 1, "cpu", 1)["sparse dK"] > 1e-4


@pytest.mark.slow
def test_the_self_test_itself():
    """Its own processes, as a user runs it."""
    assert states(selftest.examine(None)) == {
        "self-test of kernels": OK,
        "self-test of a ring of two": OK,
    }
