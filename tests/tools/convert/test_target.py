# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: the folder it leaves, whole or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from megatron_mtraining.tools.convert import target
from megatron_mtraining.tools.convert.hf_folder import Shards
from tests.support.convert_cases import convert, plain_pair, refused


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_pair(tmp_path_factory.mktemp("plain"))


def test_targets(plain, tmp_path, capsys, monkeypatch):
    words = ("hf-to-megatron", plain[0], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    refused(capsys, tmp_path / "out", words, [tmp_path / "out", "exists", "--overwrite"])
    refused(capsys, tmp_path / "out", (*words, "--overwrite"), ["mine", "--overwrite"])
    (tmp_path / "out" / "mine").unlink()
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(target.shutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
        refused(capsys, tmp_path / "out", words, ["free", "GiB", tmp_path / "out"])
        deep = tmp_path / "new" / "folders" / "out"
        refused(capsys, tmp_path / "new", (*words[:2], deep), ["free", "GiB", deep])
    assert convert(*words) == 0  # an empty folder is none
    refused(capsys, tmp_path / "out", words, ["exists"])
    (tmp_path / "out" / "megatron_args.sh").write_text("stale")
    assert convert(*words, "--overwrite") == 0
    assert "--num-layers" in (tmp_path / "out" / "megatron_args.sh").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # What goes wrong later leaves the old one.
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


@pytest.mark.parametrize("way", ["hf-to-megatron", "megatron-to-hf"])
def test_a_file_that_cannot_be_written_to_the_end(way, plain, tmp_path, capsys):
    """The system's error, of the real writers: a limit on files' size in place of a full disk."""
    words = (way, plain[way == "megatron-to-hf"], tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (3000, 200_000, 700_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            refused(capsys, tmp_path / "out", words, [tmp_path / "out", "File too large"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_target_that_is_read(plain, tmp_path, capsys, monkeypatch):
    """Or is in what is read, or has it inside: it would be lost, or written into."""
    folder, checkpoint = tmp_path / "hf", tmp_path / "meg"
    shutil.copytree(plain[0], folder)
    shutil.copytree(plain[1], checkpoint)
    (tmp_path / "link").symlink_to(folder)
    back = ("megatron-to-hf", checkpoint)
    for words in (
        ("hf-to-megatron", folder, folder),
        ("hf-to-megatron", folder, folder / "meg"),
        ("hf-to-megatron", checkpoint / "hf", checkpoint),
        ("hf-to-megatron", tmp_path / "link", folder),
        (*back, checkpoint),
        (*back, checkpoint / "hf"),
        ("megatron-to-hf", checkpoint / "release", checkpoint),
        ("megatron-to-hf", checkpoint / "release", checkpoint / "hf"),  # where its config.json is
        (*back, folder, "--like", folder),
    ):
        refused(capsys, words[2], (*words, "--overwrite"), [words[2], "is read"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "inner")
    for there in (".", "..", tmp_path / "empty"):
        refused(capsys, tmp_path / "out", (*back, there), [there, "current directory"])
    refused(capsys, tmp_path / "out", (*back, "/"), ["mount point"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "link", "meg"]


def test_only_what_a_conversion_leaves_is_replaced(plain, tmp_path, capsys):
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
        (folder, "optimizer.safetensors"),
        (checkpoint, "iter_0000100/common.pt"),  # a run's own, saved to where it began
        (checkpoint, "hf/README.md"),
    ):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text("")
        refused(capsys, made, ways[made], [made, name])
        (made / name).unlink()
    # A model is no checkpoint, whatever it is called.
    words = ("hf-to-megatron", plain[0], folder, "--overwrite")
    refused(capsys, folder, words, [folder, "checkpoint"])
    for words in ways.values():
        assert convert(*words) == 0


PAUSED = """
import signal, sys, time
# Ignored, if the tests run in a script's background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from megatron_mtraining import cli
from megatron_mtraining.tools.convert import leftovers, torch_dist
def pause():
    print("paused", flush=True)
    time.sleep(60)
where = sys.argv.pop(1)
if where == "written":
    write = torch_dist.write
    torch_dist.write = lambda *args: (write(*args), pause())
elif where == "writing":
    # In the middle of a tensor, inside torch's own writer.
    init = torch_dist._Noting.__init__
    class Slow:
        count = 0
        def __init__(self, stream):
            self.stream = stream
        def write(self, data):
            self.count += 1
            if self.count == 30:
                pause()
            return self.stream.write(data)
        def __getattr__(self, name):
            return getattr(self.stream, name)
    torch_dist._Noting.__init__ = lambda self, stream, files: init(self, Slow(stream), files)
else:  # between taking the old target away and giving the new one its name
    rename = leftovers.Path.rename
    def slow(self, to):
        if ".partial-" in self.name and ".partial-" not in to.name:
            pause()
        return rename(self, to)
    leftovers.Path.rename = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def killed(how, where: str, words, folder) -> int:
    """The exit status of a conversion that gets a signal at some point."""
    words = ["convert", *map(str, words)]
    run = subprocess.Popen(
        [sys.executable, "-c", PAUSED, where, *words], stdout=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stdout.readline() == "paused\n"
    run.send_signal(how)
    return run.wait(30)


ENDED = [
    (signal.SIGINT, "written"),
    (signal.SIGHUP, "written"),
    (signal.SIGINT, "writing"),
    (signal.SIGTERM, "writing"),
]


@pytest.mark.parametrize(("how", "where"), ENDED)
def test_a_run_that_is_ended_leaves_nothing(how, where, plain, tmp_path):
    words = ("hf-to-megatron", plain[0], tmp_path / "new" / "out")
    assert killed(how, where, words, tmp_path) == 128 + how
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_between_taking_away_and_replacing(how, plain, tmp_path, capsys):
    """What was there is there again: at once, or for the next run."""
    out = tmp_path / "out"
    shutil.copytree(plain[1], out)
    (out / "megatron_args.sh").write_text("of before")
    words = ("hf-to-megatron", plain[0], out)
    assert killed(how, "renaming", (*words, "--overwrite"), tmp_path) in (128 + how, -how)
    if how == signal.SIGKILL:
        assert not out.exists()
        assert len(list(tmp_path.iterdir())) == 2
        assert convert(*words) == 2  # it exists
        told = capsys.readouterr().err
        assert f"put back {out}" in told and "removed" in told
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "megatron_args.sh").read_text() == "of before"


def test_what_killed_runs_leave_goes_with_the_next(plain, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("hf-to-megatron", plain[0], out)
    assert killed(signal.SIGKILL, "written", words, tmp_path) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    # Of a run that goes on, of another host, of another target: these are not touched.
    _, _, rest = left.name.partition(".partial-")
    process, _, rest = rest.partition("-")
    others = [
        f".out.partial-{os.getpid()}-{rest}",
        f".out.partial-{process}-{rest}.elsewhere",
        f".out2.partial-{process}-{rest}",
        f".out.partial-{process}",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    assert convert(*words) == 0
    told = capsys.readouterr().err
    assert f"removed {left}" in told
    for name in others[:2]:
        assert f"rm -r {tmp_path / name}" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "out"])
    # What was replaced, and not yet removed.
    (tmp_path / f".out.old-{process}-{rest}").mkdir()
    assert convert(*words, "--overwrite") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "out"])
