# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Atomic output: whole or absent after success, errors, signals and kills; one run at a time; no links."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.common import atomic_output
from megatron_mtraining.tools.common.atomic_output import (
    atomic_file,
    atomic_files,
    atomic_folder,
    refuse_to_replace_input,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_appears_at_the_end(tmp_path):
    path = tmp_path / "new" / "a.json"
    with atomic_file(path) as file:
        file.write(b"half")
        assert not path.exists() and names(tmp_path / "new") == [".a.json.partial"]
    assert path.read_bytes() == b"half" and names(tmp_path / "new") == ["a.json"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_folder_appears_at_the_end(tmp_path):
    path = tmp_path / "out"
    with atomic_folder(path) as folder:
        (folder / "a").write_text("new")
        assert not path.exists()
    assert names(path) == ["a"] and names(tmp_path) == ["out"]
    assert path.stat().st_mode & 0o777 == 0o777 & ~umask()
    with atomic_folder(path, overwrite=True) as folder:
        (folder / "b").write_text("newer")
        assert names(path) == ["a"]
    assert names(path) == ["b"] and names(tmp_path) == ["out"]


def test_files_join_those_of_a_folder(tmp_path):
    (tmp_path / "old").write_text("old")
    (tmp_path / "both").write_text("old")
    with atomic_files(tmp_path) as folder:
        (folder / "both").write_text("new")
        (folder / "new").write_text("new")
        assert (tmp_path / "both").read_text() == "old"
    assert names(tmp_path) == ["both", "new", "old"] and (tmp_path / "both").read_text() == "new"
    with pytest.raises(ConfigError, match="both, which exists"):
        with atomic_files(tmp_path, overwrite=False) as folder:
            (folder / "a").write_text("not moved")
            (folder / "both").write_text("newer")
    assert names(tmp_path) == ["both", "new", "old"]


def test_names_that_are_known_are_looked_for_before_writing(tmp_path):
    (tmp_path / "both").write_text("old")
    with pytest.raises(ConfigError, match="both, which exists"):
        with atomic_files(tmp_path, overwrite=False, names=["new", "both"]):
            raise AssertionError
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder, which is a folder"):
        with atomic_files(tmp_path, names=["folder"]):
            raise AssertionError
    assert names(tmp_path) == ["both", "folder"]


ALL = [atomic_file, atomic_folder, atomic_files]


@pytest.mark.parametrize("atomic", ALL)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_errors_leave_nothing(atomic, error, tmp_path):
    with pytest.raises(error), atomic(tmp_path / "new" / "folders" / "out"):
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("atomic", [atomic_file, atomic_folder])
def test_existing_target_is_refused_under_the_lock(atomic, tmp_path):
    """Also one that appears while the run is writing: a run of another program, say."""
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="out, which exists"), atomic(out):
        out.write_text("another's")
    assert out.read_text() == "another's"
    with pytest.raises(ConfigError, match="--data is .*out, which exists"):
        with atomic(out, option="--data"):
            raise AssertionError
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("atomic", ALL)
def test_a_second_run_is_refused(atomic, tmp_path):
    out = tmp_path / "out"
    with atomic(out), pytest.raises(ConfigError, match="in use by another run"), atomic(out):
        raise AssertionError
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "atomic, replace",
    [(atomic_file, dict(overwrite=True)), (atomic_folder, dict(check=lambda path: None))],
    ids=["file", "folder"],
)
def test_links_are_not_followed(atomic, replace, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    private = tmp_path / ".out.partial"
    private.symlink_to(other)
    with pytest.raises(ConfigError, match="is a link"), atomic(tmp_path / "out"):
        raise AssertionError
    assert names(other) == [] and private.is_symlink()
    private.unlink()
    private.mkdir()
    (private / "lock").write_bytes(atomic_output.MARK)
    (private / "new").symlink_to(other)
    (private / "old").symlink_to(other)
    (other / "kept").write_text("")
    (tmp_path / "out").symlink_to(other / "nowhere")
    with atomic(tmp_path / "out", **replace):
        pass
    assert not (tmp_path / "out").is_symlink() and names(other) == ["kept"]


@pytest.mark.parametrize("atomic", ALL)
@pytest.mark.parametrize("name", ["thesis.tex", "lock"])
def test_a_strangers_private_folder_stays(atomic, name, tmp_path):
    """Whatever is in it; the same folder of a killed run is removed, see below."""
    out = tmp_path / "out"
    private = out / ".partial" if atomic is atomic_files else tmp_path / ".out.partial"
    private.mkdir(parents=True, mode=0o750)
    (private / name).write_text("a stranger's")
    before = private.stat().st_mode
    with pytest.raises(ConfigError, match=f"partial is needed .* has {name}, which no run"):
        with atomic(out, overwrite=True):
            raise AssertionError
    assert names(private) == [name] and (private / name).read_text() == "a stranger's"
    assert private.stat().st_mode == before


def test_what_a_stranger_puts_into_the_private_folder_stays(tmp_path, capsys):
    with atomic_file(tmp_path / "out"):
        (tmp_path / ".out.partial" / "mine").write_text("")
    assert names(tmp_path / ".out.partial") == ["mine"] and (tmp_path / "out").exists()
    assert ".out.partial cannot be removed" in capsys.readouterr().err


def test_targets_of_the_wrong_kind(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a folder"):
        with atomic_file(tmp_path / "folder", overwrite=True):
            raise AssertionError
    with pytest.raises(ConfigError, match="is not a folder"):
        with atomic_folder(tmp_path / "file", overwrite=True):
            raise AssertionError
    with pytest.raises(ConfigError, match="cannot be written"), atomic_files(tmp_path / "file"):
        raise AssertionError
    with pytest.raises(ConfigError, match="too long"), atomic_file(tmp_path / ("a" * 300)):
        raise AssertionError


@pytest.mark.parametrize("atomic", ALL)
def test_what_errors_say(atomic, tmp_path):
    """Errors of writing name the target; those of files that are read, and of libraries, stay."""
    with pytest.raises(ConfigError, match="out, which cannot be written: No space left"):
        with atomic(tmp_path / "out"):
            raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError, match="nowhere"), atomic(tmp_path / "out"):
        open(tmp_path / "nowhere")
    with pytest.raises(OSError, match="^of a library$"), atomic(tmp_path / "out"):
        raise OSError("of a library")
    assert names(tmp_path) == []


KILLED = """
import os, sys, time
from pathlib import Path
from megatron_mtraining.tools import cli
from megatron_mtraining.tools.common import atomic_output

atomic = getattr(atomic_output, sys.argv[1])
rename = os.rename


def pause(*names):
    print("paused", flush=True)
    time.sleep(60)
    rename(*names)


class Command:
    def add_arguments(parser):
        pass
    def run(args):
        with atomic(Path("out"), overwrite=True) as made:
            if sys.argv[2] == "writing":
                pause()
            atomic_output.os.rename = lambda *names: (pause if names[0].name == "new" else rename)(*names)


cli.importlib.import_module = lambda name: Command
sys.exit(cli.main(["plan"]))
"""


def killed(how: int, atomic, where: str, folder: Path) -> int:
    """The exit status of a run that gets a signal, in ``folder``."""
    words = [sys.executable, "-c", KILLED, atomic.__name__, where]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=folder) as run:
        assert run.stdout.readline() == "paused\n"
        run.send_signal(how)
        return run.wait(30)


@pytest.mark.parametrize("atomic", ALL)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ended_and_killed_runs(atomic, how, tmp_path):
    """What a signal ends leaves nothing; what is killed leaves what the next run removes."""
    status = killed(how, atomic, "writing", tmp_path)
    assert status == (-how if how == signal.SIGKILL else 128 + how)
    assert bool(names(tmp_path)) == (how == signal.SIGKILL)
    with atomic(tmp_path / "out"):
        pass
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_between_moving_away_and_replacing(how, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    assert killed(how, atomic_folder, "renaming", tmp_path) in (-how, 128 + how)
    if how == signal.SIGKILL:
        assert names(tmp_path) == [".out.partial"]
        with pytest.raises(ConfigError, match="exists"), atomic_folder(tmp_path / "out"):
            raise AssertionError
        assert "out is back" in capsys.readouterr().err
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["old"]


@pytest.mark.parametrize("kind", ["pipe", "link to one"])
def test_what_is_no_file_is_not_replaced(kind, tmp_path):
    """A rename over /dev/null, as root, takes it from every program of the machine."""
    path = tmp_path / "there"
    os.mkfifo(path)
    if kind == "link to one":
        path = tmp_path / "link"
        path.symlink_to("there")
    before = os.lstat(path)
    with pytest.raises(ConfigError, match="a device, a pipe or a socket"):
        with atomic_file(path, overwrite=True) as file:
            file.write(b"new")
    assert os.lstat(path).st_ino == before.st_ino
    assert not list(tmp_path.glob(".*"))


def test_what_is_read_is_not_replaced(tmp_path):
    (tmp_path / "model").mkdir()
    weights, text = tmp_path / "model" / "weights", tmp_path / "text"
    weights.write_text("w")
    text.write_text("t")
    (tmp_path / "link").symlink_to(weights)
    for path in (weights, text, tmp_path / "link"):
        with pytest.raises(ConfigError, match="which is read"):
            refuse_to_replace_input("--output", path, [tmp_path / "model", text])
    refuse_to_replace_input("--output", tmp_path / "model" / "new", [tmp_path / "model", text])
