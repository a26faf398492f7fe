# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The console command: how it ends when its streams or its imports fail, or a key is pressed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from functools import partial

import pytest

from megatron_mtraining import __version__

MODULE = """
import os, sys, time


def add_arguments(parser):
    pass


def when_ended(args):
    return "nothing was written"


def run(args):
    {body}
    return 0
"""


@pytest.fixture
def command(tmp_path):
    """Start ``mtraining plan`` with another body."""
    (tmp_path / "start.py").write_text(
        "import dataclasses, sys\n"
        "from megatron_mtraining.tools import cli\n"
        "commands = (dataclasses.replace(cli.COMMANDS[4], module='body'),)\n"
        "assert commands[0].name == 'plan'\n"
        "cli.COMMANDS = commands\n"
        "sys.argv[1:] = ['plan']\n"
        "sys.exit(cli.main())\n"
    )

    def start(body: str, top: str = "", **streams) -> subprocess.Popen:
        text = MODULE.replace("{body}", textwrap.indent(textwrap.dedent(body), "    ").strip())
        (tmp_path / "body.py").write_text(top + text)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        words = [sys.executable, str(tmp_path / "start.py")]
        # A shell that runs the tests in the background has them ignore Ctrl-C.
        usual = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(words, **streams, text=True, cwd=tmp_path, preexec_fn=usual)

    return start


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """The exit status and standard error of a process."""
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def test_a_reader_that_has_read_enough(command):
    """As of ``mtraining ... | head -1``: no error, and the status of a program that SIGPIPE ends."""
    process = command("for line in range(100000): print(line)")
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("lines", [1, 100000])
def test_standard_output_is_full(lines, command):
    """Also if it is found only when the little there is is written at the end."""
    with open("/dev/full", "w") as full:
        status, error = ended(command(f"for line in range({lines}): print(line)", stdout=full))
    assert status == 2
    assert error.splitlines() == [
        "mtraining plan: standard output or another open file cannot be written: No space left on device; "
        "nothing was written"
    ]


def test_help_that_cannot_be_written():
    words = [sys.executable, "-m", "megatron_mtraining", "plan", "memory", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "standard output" in done.stderr and len(done.stderr.splitlines()) == 1


def test_standard_error_is_full(command):
    with open("/dev/full", "w") as full:
        process = command("raise OSError(28, 'No space left on device')", stderr=full)
    assert ended(process)[0] == 2


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_is_closed(closed, command, tmp_path):
    code = f"import os; os.close({dict(stdout=1, stderr=2)[closed]})"
    command("print('told'); print('told', file=sys.stderr)").wait()
    words = f"{code}; os.execv('{sys.executable}', ['{sys.executable}', '{tmp_path / 'start.py'}'])"
    assert subprocess.run([sys.executable, "-c", words], cwd=tmp_path, timeout=60).returncode == 0


@pytest.mark.parametrize("where", ["top", "body"])
def test_interrupted(where, command):
    """Ctrl-C, also while the command's module is imported: one line, and the status of that signal."""
    wait = "import time\nprint('waits', flush=True)\ntime.sleep(60)\n"
    process = command(wait if where == "body" else "pass", wait if where == "top" else "")
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    status, error = ended(process)
    assert status == 130 and len(error.splitlines()) == 1 and "interrupted" in error


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from megatron_mtraining import __version__
from megatron_mtraining.tools import cli
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", "plan memory --num-layers 1"),
        ("megatron", "quickstart --steps 1"),
        ("numpy", "data prepare /nowhere --tokenizer /nowhere --seq-length 8 --output out"),
        ("torch", "convert verify /nowhere /nowhere"),
        ("torch", "inspect /nowhere --text /nowhere"),
        ("numpy", "quickstart --steps 0"),
    ],
    ids=lambda words: words.partition(" ")[0],
)
def test_a_package_that_is_not_installed(package, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, package, *words.split()],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    named = "megatron-core" if package == "megatron" else package
    assert named in last and "not installed" in last and "pip install " in last


def test_a_module_of_our_own_that_is_missing_is_a_fault(command):
    status, error = ended(command("import megatron_mtraining.no_such_module"))
    assert status == 1 and "ModuleNotFoundError" in error


def test_an_error_is_one_line_whatever_is_named_in_it(command):
    body = (
        "from megatron_mtraining import ConfigError\nraise ConfigError('a\\n\\x1b[2J\\udcff\u00e9')"
    )
    status, error = ended(command(body))
    assert (status, error) == (2, "mtraining plan: a \\x1b[2J\\udcff\u00e9\n")


def test_names_that_standard_output_cannot_encode(command):
    process = command("print('\\udcff')")
    assert process.communicate(timeout=60)[0] == "\\udcff\n" and process.returncode == 0


def test_version():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_mtraining", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert (
        done.stdout.startswith(f"mtraining {__version__} (Python ")
        and "megatron-core" in done.stdout
    )


@pytest.mark.parametrize(
    "words", ["", "quickstart", "inspect", "data prepare", "convert verify", "plan memory", "patch"]
)
def test_help_needs_neither_torch_nor_megatron(words):
    """Which take seconds to import."""
    code = (
        "import sys\n"
        "from megatron_mtraining.tools.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    loaded = [name for name in ('torch', 'megatron', 'transformers') if name in sys.modules]\n"
        "    sys.exit(str(loaded) if loaded else end.code)\n"
    )
    command = [sys.executable, "-c", code, *words.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: mtraining" in done.stdout
