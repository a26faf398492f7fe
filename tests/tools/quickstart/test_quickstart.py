# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The quickstart from its command line to its pictures, small; and its parts."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.tools import cli
from megatron_mtraining.tools.common.atomic_output import atomic_files
from megatron_mtraining.tools.quickstart import command, text, trained_heads
from megatron_mtraining.tools.quickstart.options import add_arguments, options_from
from megatron_mtraining.tools.quickstart.results import FILES, summary
from megatron_mtraining.tools.report import pictures

STEPS = 4
SMALL = {
    "--device": "cpu",
    "--steps": STEPS,
    "--seq-length": 512,
    "--layers": 2,
    "--heads": 2,
    "--vertical": 16,
}


def run_quickstart(folder, *more, code=None):
    """Run it in ``folder``; ``code`` is Python that the training processes import first."""
    environment = dict(os.environ)
    if code is not None:
        (folder / "sitecustomize.py").write_text(code)
        paths = [str(folder), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    options = [str(word) for pair in SMALL.items() for word in pair]
    return subprocess.run(
        [sys.executable, "-m", "megatron_mtraining", "quickstart", *options, *more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = run_quickstart(folder, "--output", "out")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "out", done.stdout


@pytest.mark.slow
def test_writes_table_and_pictures(finished):
    output, printed = finished
    assert (output / "table.txt").read_text() in printed
    assert str(output.resolve()) in printed.splitlines()[-1]
    for name in ("loss.png", "pattern.png", "patterns.png", "trained.png", "work.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG"), name
    for label in ("loss, held-out text", "density", "recall", "tokens/s", "work of rank 1"):
        assert label in printed


@pytest.mark.slow
def test_losses_are_sane(finished):
    runs = json.loads((finished[0] / "runs.json").read_text())
    for run in runs.values():
        assert len(run["losses"]) == STEPS
        assert all(math.isfinite(loss) for loss in [*run["losses"], run["held_out"]])
        # Untrained, every token is about as likely as any other; then it learns.
        assert run["losses"][0] == pytest.approx(math.log(text.VOCABULARY), abs=0.5)
        assert run["losses"][-1] < run["losses"][0]
    # The same weights and the same text, seen through different attention: close, not the same.
    first = [run["losses"][0] for run in runs.values()]
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], abs=0.2)


@pytest.mark.slow
def test_dense_is_dense_and_sparse_is_sparse(finished):
    runs = json.loads((finished[0] / "runs.json").read_text())
    assert runs["dense"]["density"] == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert all(0.05 < density < 0.95 for density in runs["sparse"]["density"])
    work = {name: np.array(run["work"]) for name, run in runs.items()}
    assert work["dense"].shape == work["sparse"].shape == (2, 1)  # ranks, rounds
    pairs = 512 * 513 / 2 * 2 * 2  # causal pairs x heads x layers
    assert work["dense"].sum() == pairs
    assert work["sparse"].sum() / pairs == pytest.approx(runs["sparse"]["density"][-1], abs=1e-4)
    assert (work["sparse"] <= work["dense"]).all()


@pytest.mark.slow
def test_compares_dense_with_megatrons_own_attention(finished):
    agreed = re.findall(
        r"(\w+) model, dense: loss over 2 ranks .* agree to (\S+)$", finished[1], re.MULTILINE
    )
    assert [which for which, _ in agreed] == ["untrained", "trained"]
    assert all(float(difference) <= 1e-4 for _, difference in agreed)


@pytest.mark.slow
def test_one_failing_rank_stops_all_with_its_reason(tmp_path):
    # Rank 1 fails after it has joined the others; rank 0 would wait for it in the ring.
    code = """
import sys
if any("spawn_main" in word for word in sys.argv) or "multiprocessing.spawn" in str(sys.orig_argv):
    import megatron_mtraining.tools.quickstart.train as train
    original = train.compare_runs
    def fail(rank, options, folder):
        if rank == 1:
            raise RuntimeError("the cable is loose")
        original(rank, options, folder)
    train.compare_runs = fail
"""
    done = run_quickstart(tmp_path, code=code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "mtraining quickstart: process 1 failed: RuntimeError: the cable is loose"
    assert not (tmp_path / "quickstart-out").exists()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_ended(tmp_path):
    """The others wait for it as long as --timeout says, and no longer."""
    code = """
import sys
if "multiprocessing.spawn" in str(sys.orig_argv):
    import os, signal
    import megatron_mtraining.tools.quickstart.train as train
    original = train.train
    def stop(rank, *args):
        if rank == 1:
            open("stopped", "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(rank, *args)
    train.train = stop
"""
    done = run_quickstart(tmp_path, "--timeout", "3", code=code)
    stopped = (tmp_path / "stopped").read_text()
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("mtraining quickstart: --timeout is 3.0 s")
    assert f"process 1 (PID {stopped}) did not answer process 0" in last
    assert "Traceback" not in done.stderr
    assert not os.path.exists(f"/proc/{stopped}")
    assert not (tmp_path / "quickstart-out").exists()


def small(*more) -> int:
    return cli.main(["quickstart", *(str(word) for pair in SMALL.items() for word in pair), *more])


@pytest.mark.slow
def test_results_that_are_there_are_not_replaced(finished, capsys):
    """Said before training; and a second run at the same time is refused."""
    output = finished[0]
    before = {path: path.read_bytes() for path in output.iterdir()}
    assert small("--output", str(output)) == 2
    error = capsys.readouterr().err
    assert "table.txt, which exists" in error and "--overwrite" in error
    with atomic_files(output):
        assert small("--output", str(output), "--overwrite") == 2
    assert "in use by another run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.usefixtures("unrendered")
def test_results_appear_whole_or_not_at_all(tmp_path, capsys, monkeypatch):
    """With those of the run before, until then; and in no file that a link leads to."""

    def train(options, folder):
        run = dict(losses=[2.0] * STEPS, seconds=[1.0] * STEPS, held_out=1.5)
        run |= dict(density=[1.0] * STEPS, recall=[1.0] * STEPS, work=[[5, 5], [5, 5]])
        (folder / "runs.json").write_text(json.dumps({"dense": run, "sparse": run}))
        np.save(folder / "patterns.npy", np.ones((2, 2, 4, 4), np.float32))

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(text, "write_sequences", lambda *_: None)
    out, other = tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.write_text("other")
    for name in ("table.txt", "loss.png"):
        (out / name).symlink_to(other)
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "work", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        assert small("--output", str(out), "--overwrite") == 2
    assert "cannot be written: full" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "table.txt"]
    assert small("--output", str(out), "--overwrite") == 0
    assert other.read_text() == "other" and not (out / "table.txt").is_symlink()
    assert {path.name for path in out.iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--seq-length", "1000"], ["--seq-length", "1000", "128"]),
        (["--seq-length", "128"], ["--seq-length", "a multiple of 128, 256 for example"]),
        (["--seq-length", "256", "--processes", "3"], ["a multiple of 192, 384 for example"]),
        (["--vertical", "2"], ["--vertical is 2: use 4 or more"]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--output", __file__], ["--output", __file__]),
        (["--vertical", "9999"], ["--vertical", "9999"]),
        (["--timeout", "nan"], ["--timeout", "nan"]),
        (["--output", ""], ["--output", "name a folder"]),
    ],
    ids=lambda words: " ".join(words).replace(__file__, "FILE"),
)
def test_bad_values_end_in_one_error(wrong, named, capsys):
    status = cli.main(["quickstart", "--device", "cpu", *wrong])
    error = capsys.readouterr().err
    assert status == 2 and len(error.strip().splitlines()) == 1
    for word in named:
        assert word in error


def test_tokenizer_keeps_every_character(tmp_path, monkeypatch):
    import sentencepiece

    monkeypatch.setattr(text, "TOKENIZER_CHARACTERS", 50_000)
    files, held_out = text.split(text.source_files())
    assert files and held_out and not set(files) & set(held_out)
    model = text.train_tokenizer(files, 512, tmp_path / "tokenizer")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    sample = "def f(x):\n    # caf\u00e9 \U0001f600\n\n\treturn {x  : 1}\n"
    assert processor.decode(processor.encode(sample)) == sample
    sequences = text.tokenize(files, model, 3, 64)
    assert sequences.shape == (3, 65) and sequences.dtype == np.int32
    assert (sequences[1:, 0] == sequences[:-1, -1]).all()  # one stream, cut
    assert 0 <= sequences.min() and sequences.max() < 512
    with pytest.raises(ConfigError, match="lower --steps"):
        text.tokenize(files[:1], model, 10_000, 64)


def test_summary_counts_work_against_dense():
    class Some:
        steps, seq_length, processes, device = 2, 100, 2, "cpu"

    run = dict(losses=[2.0, 1.0], seconds=[9.0, 0.5], held_out=1.5)
    runs = {
        "dense": run | dict(density=[1.0, 1.0], recall=[1.0, 1.0], work=[[30, 20], [25, 25]]),
        "sparse": run | dict(density=[0.2, 0.4], recall=[0.5, 0.7], work=[[5, 5], [10, 0]]),
    }
    lines = summary(Some(), runs).splitlines()
    found = {label: values for label, *values in (re.split(r"  +", line) for line in lines[2:9])}
    assert found["density"] == ["100.0%", "30.0%"]
    assert found["recall, last step"] == ["100.0%", "70.0%"]
    assert found["tokens/s"] == ["200", "200"]
    assert found["work of rank 0"] == ["50.0%", "10.0%"]


def test_recorded_heads_differ_and_show_slashes():
    record = trained_heads.read()
    assert {"model", "text", "price", "commit", "command"} <= record.keys()
    heads = record["heads"]
    drawn = trained_heads.pictures(record)
    assert len(drawn) == len(heads) == 8
    pairs = record["tokens"] * (record["tokens"] + 1) / 2
    for head, picture in zip(heads, drawn.values()):
        found = picture.sum() * trained_heads.CELL**2 / pairs
        assert found == pytest.approx(head["density"], abs=1e-4)
    densities = [head["density"] for head in heads]
    assert max(densities) > 5 * min(densities)
    window = {0, 1}  # its own block and the one before
    assert sum(bool(set(head["slashes"]) - window) for head in heads) >= 4


@pytest.mark.parametrize("processes", [1, 3, 6])
def test_the_default_length_fits_any_number_of_processes(processes, tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--device", "cpu", "--processes", str(processes), "--output", str(tmp_path / "out")]
    options = options_from(parser.parse_args(words))
    assert 2048 <= options.seq_length < 2048 + 64 * processes
    options.sparse.check_sequence(options.seq_length, processes)


@pytest.mark.gpu
def test_on_gpus(tmp_path):
    pytest.importorskip("megatron.core", reason="the quick start trains by megatron-core")
    done = run_quickstart(tmp_path, "--device", "cuda", "--output", "out")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "out" / "pattern.png").exists()
    assert "GPUs, NCCL" in done.stdout
