# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``python -m megatron_mtraining.launch`` runs a script as Python would, with the backend registered."""

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

from megatron_mtraining import launch as launch_module
from megatron_mtraining.checkout import python_mismatch, read_version
from megatron_mtraining.megatron import cpu
from tests.support.ranks import run_alone, run_ranks

SCRIPT = """
import json, sys
from megatron.core.transformer.enums import AttnBackend
from megatron.core.tensor_parallel.random import checkpoint
import beside
print(json.dumps([__name__, sys.argv, sys.path[0], "mtraining" in AttnBackend.__members__,
                  getattr(checkpoint, "_mtraining_wrapper", False), beside.HERE]))
if "--fail" in sys.argv:
    sys.exit(7)
"""


def launched(words):
    """What ``python -m`` does, in a process that has torch already, and forgets Megatron."""
    for name in list(sys.modules):
        if name.startswith(("megatron.", "megatron_mtraining.")) or name == "megatron":
            del sys.modules[name]
    sys.argv[1:] = words
    runpy.run_module("megatron_mtraining.launch", run_name="__main__", alter_sys=True)


def launch(*words):
    return run_alone(launched, list(map(str, words)))


def stopped(run, *words):
    assert run.returncode != 0 and "Traceback" not in run.stdout, run.stdout
    assert all(word in run.stdout for word in words), run.stdout


@pytest.mark.slow
def test_script_runs_as_main_with_its_folder_first(tmp_path):
    (tmp_path / "beside.py").write_text("HERE = True\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = launch(script, "--lr", "1e-3")
    assert run.returncode == 0, run.stdout
    expected = ["__main__", [str(script), "--lr", "1e-3"], str(tmp_path), True, True, True]
    assert json.loads(run.stdout.splitlines()[-1]) == expected
    assert launch(script, "--fail").returncode == 7


@pytest.mark.parametrize(
    "text, said",
    [
        ("print(1)", None),
        ("import sys; assert sys.stderr.fileno() == 2", None),  # Megatron-LM 0.16's faulthandler
        ("raise AssertionError('4 ranks\\nof 3')", "AssertionError: 4 ranks"),
        ("raise SystemExit('error: a\\nb')", "error: a\nb"),
        (
            "import argparse; argparse.ArgumentParser('a').parse_args(['--b'])",
            "a: error: unrecognized arguments: --b",
        ),
    ],
)
def test_a_check_says_what_is_wrong_alone(text, said, monkeypatch, capsys):
    """Nothing of what the script prints; of argparse's usage, the error."""
    monkeypatch.setattr(launch_module, "_run", lambda argv, check: exec(f"print(argv); {text}"))
    if said is None:
        launch_module.main(["--check", "script.py"])
    else:
        with pytest.raises(SystemExit) as error:
            launch_module.main(["--check", "script.py"])
        assert error.value.code == said
    assert capsys.readouterr() == ("", "")


def test_a_check_quotes_an_assertion_without_words(monkeypatch):
    def refuses(argv, check):
        raise AssertionError

    monkeypatch.setattr(launch_module, "_run", refuses)
    with pytest.raises(SystemExit, match="^AssertionError: raise AssertionError$"):
        launch_module.main(["--check", "script.py"])


def test_missing_script(tmp_path):
    stopped(launch(), "name the training script")
    stopped(launch(tmp_path / "none.py"), str(tmp_path / "none.py"), "no training script")


def test_megatron_that_is_not_there(tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").write_text("")
    (tmp_path / "script.py").write_text("")
    stopped(launch(tmp_path / "script.py"), "Megatron is not importable", "megatron.core")


def fake_core(tmp_path, text):
    """A Megatron-Core of one file, and a script beside it."""
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    (tmp_path / "megatron/__init__.py").write_text("")
    (core / "__init__.py").write_text(text)
    (tmp_path / "script.py").write_text("")
    return core


def test_megatron_that_is_too_old(tmp_path):
    core = fake_core(tmp_path, "__version__ = '0.15.3'\n")
    stopped(launch(tmp_path / "script.py"), "0.15.3", "0.16", str(core))


def test_an_error_in_megatron_itself_is_not_hidden(tmp_path):
    fake_core(tmp_path, "import a_module_that_is_missing\n")
    run = launch(tmp_path / "script.py")
    assert run.returncode != 0 and "a_module_that_is_missing" in run.stdout


def test_a_python_that_this_megatron_does_not_support(tmp_path):
    core = fake_core(tmp_path, "raise SyntaxError\n")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 0\n")
    here = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info >= (3, 12):
        assert python_mismatch(read_version(tmp_path)) == ""
    else:
        stopped(
            launch(tmp_path / "script.py"),
            f"Megatron-LM 0.17 and later need Python 3.12; this is {here}",
        )


@pytest.mark.parametrize(
    "version, python, expected",
    [
        ((0, 17), (3, 12), ""),
        ((1, 0), (3, 10), "Megatron-LM 0.17 and later need Python 3.12; this is 3.10"),
        ((0, 16), (3, 10), ""),
        ((0, 15), (3, 9), ""),  # refused by register(), which names the version
    ],
)
def test_python_by_megatron_version(tmp_path, version, python, expected):
    core = fake_core(tmp_path, "")
    (core / "package_info.py").write_text("MAJOR = {}\nMINOR = {}\n".format(*version))
    assert python_mismatch(read_version(tmp_path), python) == expected


def test_missing_pybind11_is_named_before_megatron_compiles(tmp_path):
    """By ``python -m`` itself."""
    core = fake_core(tmp_path, "__version__ = '0.19.0'\n")
    (core / "datasets").mkdir()
    (core / "datasets/Makefile").write_text("")
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'pybind11' else find(name, *more)\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "megatron_mtraining.launch", str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": f"{hide}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    stopped(run, "pip install pybind11")


def test_cpu_has_streams_that_have_finished():
    """Megatron's dispatcher of experts' tokens waits for an event that its stream records."""
    cpu.Stream().record_event().synchronize()
    assert cpu.Stream().record_event(event := cpu.Stream()) is event


def emptied(rank, world):
    """What the other rank gets of a tensor that is emptied before anyone receives it."""
    cpu.install_torch()
    tensor = torch.full([1 << 14], 1.0 - rank)
    sent = None
    if rank == 0:
        sent = torch.distributed.isend(tensor, 1)
        tensor.data = torch.empty(1)
        memory = [torch.full([1 << 14], -1.0) for _ in range(4)]
    torch.distributed.barrier()
    if rank == 1:
        torch.distributed.recv(tensor, 0)
        return tensor.unique().tolist()
    sent.wait()
    return len(memory)


def test_cpu_sends_what_a_pipeline_empties_meanwhile():
    assert run_ranks(2, emptied) == [4, [1.0]]


def test_cpu_refuses_arguments_that_need_a_gpu(tmp_path):
    fake_core(tmp_path, "__version__ = '0.19.0'\n")
    script = tmp_path / "script.py"
    stopped(launch("--cpu"), "name the training script")
    stopped(launch("--cpu", script, "--fp8-format", "hybrid"), "--fp8-format needs a GPU")
    wrong = launch("--cpu", script, "--transformer-impl=transformer_engine")
    stopped(wrong, "--transformer-impl is transformer_engine", "--transformer-impl local")


def test_cpu_adds_only_what_is_not_given():
    given = ["--lr", "1", "--distributed-backend", "gloo", "--no-rope-fusion"]
    added = cpu.arguments(given)
    assert "--no-rope-fusion" not in added and "--distributed-backend" not in added
    assert added[:2] == ["--transformer-impl", "local"]
