# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``python -m megatron_mtraining.launch`` runs a script as Python would, with the backend registered."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_batch_on_this_cp_rank
import beside
print(json.dumps([__name__, sys.argv, sys.path[0], "mtraining" in AttnBackend.__members__,
                  getattr(get_batch_on_this_cp_rank, "_mtraining_wrapper", False), beside.HERE]))
if "--fail" in sys.argv:
    sys.exit(7)
"""


def launch(*words, rank="0", **others):
    return subprocess.run(
        [sys.executable, "-m", "megatron_mtraining.launch", *map(str, words)],
        env={**os.environ, "LOCAL_RANK": rank, **others},
        capture_output=True,
        text=True,
        timeout=120,
    )


def stopped(run, *words):
    assert run.returncode != 0 and "Traceback" not in run.stderr, run.stderr
    assert all(word in run.stderr for word in words), run.stderr


@pytest.mark.slow
def test_script_runs_as_main_with_its_folder_first(tmp_path):
    (tmp_path / "beside.py").write_text("HERE = True\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = launch(script, "--lr", "1e-3")
    assert run.returncode == 0, run.stderr
    expected = ["__main__", [str(script), "--lr", "1e-3"], str(tmp_path), True, True, True]
    assert json.loads(run.stdout.splitlines()[-1]) == expected
    assert launch(script, "--fail").returncode == 7


def test_missing_script(tmp_path):
    stopped(launch(), "name the training script")
    stopped(launch(tmp_path / "none.py"), str(tmp_path / "none.py"), "no training script")
    quiet = launch(tmp_path / "none.py", rank="1")
    assert quiet.returncode != 0 and quiet.stderr == "", "one message on each node"


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
    assert run.returncode != 0 and "a_module_that_is_missing" in run.stderr
