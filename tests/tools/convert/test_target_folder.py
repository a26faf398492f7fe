# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: where it may write, what it may replace, and that it writes all or nothing."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import time

import pytest

pytest.importorskip("transformers")

from megatron_mtraining.tools import cli
from megatron_mtraining.tools.convert import target_folder, torch_dist
from megatron_mtraining.tools.convert.hf_folder import Shards
from tests.support.convert_cases import convert, refused
from tests.support.ranks import FORKS


def test_existing_target_and_full_disk(plain, tmp_path, capsys, monkeypatch):
    words = ("hf-to-megatron", plain[0], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    refused(capsys, tmp_path / "out", words, [tmp_path / "out", "exists", "--overwrite"])
    refused(capsys, tmp_path / "out", (*words, "--overwrite"), ["mine", "--overwrite"])
    (tmp_path / "out" / "mine").unlink()
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            target_folder.shutil, "disk_usage", lambda path: usage._replace(free=64 << 20)
        )
        refused(capsys, tmp_path / "out", words, ["free", "GiB", tmp_path / "out"])
        deep = tmp_path / "new" / "folders" / "out"
        refused(capsys, tmp_path / "new", (*words[:2], deep), ["free", "GiB", deep])
    assert convert(*words) == 0  # an empty folder may be replaced
    refused(capsys, tmp_path / "out", words, ["exists"])
    (tmp_path / "out" / "megatron_args.sh").write_text("stale")
    assert convert(*words, "--overwrite") == 0
    assert "--num-layers" in (tmp_path / "out" / "megatron_args.sh").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # An error in writing leaves the old folder.
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError(28, "No space left on device")

        patch.setattr(Shards, "read", full)
        refused(
            capsys, tmp_path / "out", (*words, "--overwrite"), ["No space left", tmp_path / "out"]
        )
        refused(capsys, tmp_path / "new", (*words[:2], deep), ["No space left", deep])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "release" / ".metadata").is_file()


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_file_that_cannot_be_written_completely(direction, plain, tmp_path, capsys):
    """The system's error is reported, from the real writers: a limit on file sizes simulates a full disk."""
    words = (direction, plain[direction == "megatron-to-hf"], tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (3000, 700_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            refused(capsys, tmp_path / "out", words, [tmp_path / "out", "File too large"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_target_that_is_read(plain, tmp_path, capsys):
    """DST may not be a folder that is read, contain one, or lie in one."""
    folder, checkpoint = tmp_path / "hf", tmp_path / "meg"
    shutil.copytree(plain[0], folder)
    shutil.copytree(plain[1], checkpoint)
    (tmp_path / "link").symlink_to(folder)
    back = ("megatron-to-hf", checkpoint)
    for words in (
        ("hf-to-megatron", folder, folder),
        ("hf-to-megatron", folder, folder / "meg"),
        ("hf-to-megatron", tmp_path / "link", folder),
        (*back, checkpoint),
        ("megatron-to-hf", checkpoint / "release", checkpoint / "hf"),  # has its config.json
        (*back, folder, "--like", folder),
    ):
        refused(capsys, words[2], (*words, "--overwrite"), [words[2], "is read"])


def test_overwrite_replaces_only_conversions(plain, tmp_path, capsys):
    """--overwrite refuses a folder with any other file."""
    folder, checkpoint = tmp_path / "hf", tmp_path / "meg"
    shutil.copytree(plain[0], folder)
    shutil.copytree(plain[1], checkpoint)
    ways = {
        folder: ("megatron-to-hf", plain[1], folder, "--overwrite"),
        checkpoint: ("hf-to-megatron", plain[0], checkpoint, "--overwrite"),
    }
    for made, name in (
        (folder, "thesis.tex"),
        (folder, "src/main.py"),
        (checkpoint, "iter_0000100/common.pt"),  # saved by a run that began there
    ):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text("")
        refused(capsys, made, ways[made], [made, name])
        (made / name).unlink()
    # A model is not a checkpoint.
    words = ("hf-to-megatron", plain[0], folder, "--overwrite")
    refused(capsys, folder, words, [folder, "checkpoint"])
    for words in ways.values():
        assert convert(*words) == 0


def paused(where: str, words, folder, ready) -> None:
    """Convert, and wait while or after the tensors are written."""
    os.chdir(folder)
    # A script's background jobs ignore these.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def pause():
        ready.set()
        time.sleep(60)

    class Slow(io.FileIO):  # in the middle of a tensor, inside torch's own writer
        count = 0

        def write(self, data):
            Slow.count += 1
            if Slow.count == 30:
                pause()
            return super().write(data)

    if where == "written":
        write = torch_dist.write
        torch_dist.write = lambda *args: (write(*args), pause())
    else:
        torch_dist._File.__bases__ = (Slow,)
    sys.exit(cli.main(["convert", *map(str, words)]))


def killed(how, where: str, words, folder) -> int:
    """The exit status of a conversion that gets a signal while or after it writes the tensors."""
    ready = FORKS.Event()
    run = FORKS.Process(target=paused, args=(where, words, folder, ready))
    run.start()
    assert ready.wait(60)
    os.kill(run.pid, how)
    run.join(30)
    return run.exitcode


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (signal.SIGHUP, "written"),
        (signal.SIGINT, "writing"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ended_run_leaves_nothing(how, where, plain, tmp_path):
    words = ("hf-to-megatron", plain[0], tmp_path / "new" / "out")
    assert killed(how, where, words, tmp_path) == 128 + how
    assert not list(tmp_path.iterdir())


def test_next_run_removes_what_a_killed_run_left(plain, tmp_path):
    """See tests/tools/common for a run that is killed while it replaces a folder."""
    out = tmp_path / "out"
    words = ("hf-to-megatron", plain[0], out)
    assert killed(signal.SIGKILL, "written", words, tmp_path) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert convert(*words) == 0
    assert list(tmp_path.iterdir()) == [out]
