# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: several processes, going on, and what is left of a run that fails."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_mtraining.tools.data import packing
from megatron_mtraining.tools.data import prepare as prepare_module
from tests.support.data_cases import (
    IN_ORDER,
    SEQ,
    ids,
    ids_of,
    in_order,
    make_documents,
    refused,
    write_jsonl,
)

pytest.importorskip("transformers")


def command(given, tokenizer, prefix, *more) -> list[str]:
    words = ["data", "prepare", given, "--tokenizer", tokenizer, "--output", prefix]
    words += ["--seq-length", SEQ, "--part-bytes", 20000, *more]
    return [sys.executable, "-m", "megatron_mtraining", *map(str, words)]


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Its worker processes, as they are started by ``spawn``."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return found


@pytest.mark.slow
def test_killed_run_goes_on_and_gives_the_same(prepare, tokenizer, tmp_path, capsys):
    texts = make_documents(4000)
    given = write_jsonl(tmp_path / "a.jsonl", texts)
    prefix = tmp_path / "out"
    running = subprocess.Popen(
        command(given, tokenizer, prefix, "--workers", 2),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    parts, deadline = tmp_path / "out.parts", time.monotonic() + 60
    while len(list(parts.glob("*.part"))) < 3:
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    # Stopped first: else it may end before the signal that kills it.
    running.send_signal(signal.SIGSTOP)
    workers = workers_of(psutil.Process(running.pid))
    assert len(workers) == 2
    running.kill()
    running.wait()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert not list(tmp_path.glob("out.bin*")) and not list(tmp_path.glob("out.idx*"))
    done = len(list(parts.glob("*.part")))
    assert prepare(given, part_bytes=20000) == 0
    assert f"going on: {done} of " in capsys.readouterr().err
    assert not parts.exists()
    assert prepare(given, part_bytes=20000, output="alone") == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"{prefix}{suffix}").read_bytes() == (tmp_path / f"alone{suffix}").read_bytes()


def test_a_worker_that_dies_ends_the_run_with_one_error(
    prepare, sentencepiece_model, tmp_path, capsys
):
    given = write_jsonl(tmp_path / "a.jsonl", make_documents(4000))
    options = {"tokenizer": sentencepiece_model, "part_bytes": 20000}
    before, killed = workers_of(psutil.Process()), []

    def kill_one():
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            # Not a process of an earlier test: a Manager's lives as long as something refers to it.
            for worker in [one for one in workers_of(psutil.Process()) if one not in before][:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
                    killed.append(worker)
            time.sleep(0.002)

    killer = threading.Thread(target=kill_one)
    killer.start()
    status = prepare(given, workers=2, **options)
    killer.join()
    assert killed
    refused(capsys, ["worker", "--workers"], status)
    assert not (tmp_path / "out.idx").exists()
    assert prepare(given, **options) == 0


def test_parts_of_other_input_or_half_ones_are_not_used(prepare, documents, tmp_path, capsys):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    assert prepare(given, keep_parts=True, part_bytes=5000, **IN_ORDER) == 0
    first = ids(tmp_path / "out")
    again = {"keep_parts": True, "part_bytes": 5000, "overwrite": True, **IN_ORDER}
    tokens = list((tmp_path / "out.parts").glob("*.part"))
    (tmp_path / "out.parts" / f"{tokens[1].name}.partial").write_text("half")
    tokens[1].unlink()
    capsys.readouterr()
    assert prepare(given, **again) == 0
    assert f"going on: {len(tokens) - 1} of {len(tokens)}" in capsys.readouterr().err
    assert ids(tmp_path / "out") == first
    # Packed in another way, from the same parts
    assert prepare(given, **{**again, "seq_length": 100}) == 0
    assert f"going on: {len(tokens)} of {len(tokens)}" in capsys.readouterr().err
    assert ids(tmp_path / "out", 100) == in_order([ids_of(text) for text in documents], 100)
    # Another file, read before: its parts are new, those of the first are not.
    other = write_jsonl(tmp_path / "b.jsonl", documents[::-1])
    assert prepare(other, given, **again) == 0
    assert f"going on: {len(tokens)} of {2 * len(tokens)}" in capsys.readouterr().err
    both = [ids_of(text) for text in documents[::-1] + documents]
    assert ids(tmp_path / "out") == in_order(both, SEQ)
    write_jsonl(given, documents[::-1])
    assert prepare(given, **again) == 0
    assert "going on" not in capsys.readouterr().err
    assert ids(tmp_path / "out") == in_order([ids_of(text) for text in documents[::-1]], SEQ)
    assert {path.suffix for path in (tmp_path / "out.parts").iterdir()} == {"", ".part"}
    assert len(list((tmp_path / "out.parts").glob("*.part"))) == len(tokens)


def test_interrupted_run_says_how_to_go_on(prepare, documents, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_shuffled", interrupt)
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    assert prepare(given) == 130
    assert "goes on" in capsys.readouterr().err
    assert sorted(path.suffix for path in tmp_path.glob("out.*")) == [".parts"]
    assert not list(tmp_path.glob("out.parts/new*"))


def test_a_dataset_stays_until_there_is_another(prepare, documents, tmp_path, capsys):
    assert prepare(write_jsonl(tmp_path / "a.jsonl", documents)) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("out.*")}
    refused(capsys, ["out.idx", "--overwrite"], prepare(tmp_path / "a.jsonl", seed=5))
    few = write_jsonl(tmp_path / "b.jsonl", ["few"])
    refused(capsys, ["--seq-length"], prepare(few, overwrite=True))
    shutil.rmtree(tmp_path / "out.parts")
    assert {path: path.read_bytes() for path in tmp_path.glob("out.*")} == before
    assert prepare(tmp_path / "a.jsonl", seed=5, overwrite=True) == 0
    assert (tmp_path / "out.bin").read_bytes() != before[tmp_path / "out.bin"]


@pytest.mark.parametrize(("limit", "parts"), [(3000, 0), (30000, 6)])
def test_what_cannot_be_written_leaves_nothing_half(
    limit, parts, prepare, documents, tmp_path, capsys
):
    """As on a full disk, here by a limit to the size of files: of a part's, or only the dataset's."""
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    size = given.stat().st_size
    assert size > 32000
    prepare(given, output="warm", part_bytes=size // 5)  # what is imported may write files
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        status = prepare(given, part_bytes=size // 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    refused(capsys, ["cannot be written", "File too large"], status)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.parts"] * bool(parts)
    assert len(list((tmp_path / "out.parts").glob("*.part"))) >= parts - 1
    assert not list(tmp_path.glob("out.parts/*.partial"))
    assert prepare(given, part_bytes=size // 5) == 0


STORM = """
import os, random, sys, time
from megatron_mtraining.tools import cli
seed, *words = sys.argv[1:]
import numpy, tqdm, megatron.core.datasets.indexed_dataset
from megatron_mtraining.tools.data import indexed, prepare
from megatron_mtraining.models.tokenizer import open_tokenizer
for number in range(10):
    child = os.fork()
    if not child:
        os._exit(cli.main(words))
    time.sleep(random.Random(f"{seed}{number}").random() * 0.4)
    os.kill(child, 9)
    os.waitpid(child, 0)
    left = {end for end in (".bin", ".json", ".idx") if os.path.exists("out" + end)}
    print(number, sorted(left), flush=True)
    assert ".idx" not in left or len(left) == 3, left
sys.exit(cli.main([*words, "--overwrite"]))
"""


@pytest.mark.slow
def test_killed_at_any_time_it_is_whole_or_absent(sentencepiece_model, prepare, tmp_path):
    """With an index there is a whole dataset; and what is made in the end is that of a run alone."""
    given = write_jsonl(tmp_path / "a.jsonl", make_documents(4000))
    words = command(given, sentencepiece_model, "out", "--workers", 1)[3:]
    done = subprocess.run(
        [sys.executable, "-c", STORM, "7", *words], cwd=tmp_path, timeout=100, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    given_alone = {"tokenizer": sentencepiece_model, "part_bytes": 20000, "output": "alone"}
    assert prepare(given, **given_alone) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"alone{suffix}"
        ).read_bytes()
    assert not list(tmp_path.glob("out.parts"))


@pytest.mark.slow
def test_of_two_runs_at_once_one_is_refused(sentencepiece_model, tmp_path):
    """Whichever: there is one dataset, and no run has replaced it."""
    given = write_jsonl(tmp_path / "a.jsonl", make_documents(500))
    words = command(given, sentencepiece_model, "out", "--workers", 1)
    runs = [
        subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    errors = [run.communicate(timeout=100)[1].decode().splitlines()[-1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2]
    (error,) = [error for run, error in zip(runs, errors) if run.returncode]
    assert "is in use by another run" in error or "exists: name another prefix" in error


@pytest.mark.parametrize("how", ["grown", "gone"])
def test_a_file_that_changes_while_it_is_read(
    how, prepare, documents, tmp_path, capsys, monkeypatch
):
    given = write_jsonl(tmp_path / "a.jsonl", documents)
    data, tokenize = given.read_bytes(), prepare_module._tokenize

    def changed(*args):
        given.write_bytes(data + b'{"text": "more"}\n')
        if how == "gone":
            given.unlink()
        tokenize(*args)

    monkeypatch.setattr(prepare_module, "_tokenize", changed)
    named = "cannot be read" if how == "gone" else "changed while it was read"
    refused(capsys, [str(given), named], prepare(given))
    assert not list(tmp_path.glob("out.[bij]*"))
