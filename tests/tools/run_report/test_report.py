# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining report``: what it reads of each kind of log, its page, and its errors."""

from __future__ import annotations

import errno
import json
import os
import re
from html.parser import HTMLParser

import pytest

from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.run_report.sources import read, step_times

pytest.importorskip("matplotlib")
STEP = (
    " [2026-11-28 21:53:33] iteration {step:8d}/     100 | consumed samples: {step:12d} | elapsed time per "
    "iteration (ms): {ms} | learning rate: 1.000000E-03 | global batch size:     1 | lm loss: {loss:E} | "
    "loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 |\n"
)
OURS = (
    " [mtraining] iteration {step} | density {density} (lowest head 0.1, highest 0.9) | recall 0.95 (lowest "
    "head 0.9) | heads at a cap 12.5% | price 0.31 | search 12.5 ms, attention 1.5e+03 ms (max/mean 1.250, "
    "exposed communication 3 ms), loss 50 ms\n"
)
WARNING = " [mtraining] warning: density is 0.9990: price 0.31 keeps <nearly> all pairs\n"


def log(steps: range) -> str:
    text = "some other line\n" + 2 * WARNING
    for step in steps:
        text += STEP.format(step=step, ms=100 + step, loss=3 - step / 100)
        text += OURS.format(step=step, density=0.2 + step / 1000)
    return text


def test_megatrons_log_of_a_run_that_went_on(tmp_path):
    (tmp_path / "a.log").write_text(log(range(1, 61)))
    (tmp_path / "b.log").write_text(log(range(51, 101)) + STEP.format(step=101, ms=1, loss=9)[:-30])
    found = read(tmp_path)
    assert sorted(found.series["loss"]) == list(range(1, 101)), "the last line is cut off"
    assert found.series["loss"][100] == 2 and found.series["step_s"][7] == pytest.approx(0.107)
    assert found.series["density"][50] == 0.25 and found.series["recall"][1] == 0.95
    named = ("capped", "search_ms", "attention_ms", "imbalance", "exposed_ms", "loss_ms")
    assert [found.series[name][7] for name in named] == [0.125, 12.5, 1500, 1.25, 3, 50]
    assert found.series["price"] == dict.fromkeys(range(1, 101), 0.31)
    assert found.warnings == [WARNING.split("] ")[1].strip()]


def test_the_second_line_of_times_is_a_mean(tmp_path):
    """Megatron's timer starts with a process, and goes on after its first line."""
    assert step_times({7: 50.0, 8: 30.0, 9: 12.0}) == {7: 50.0, 8: 10.0, 9: 12.0}
    assert step_times({1: 50.0, 5: 18.0, 9: 9.0}) == {1: 50.0, 5: 10.0, 9: 9.0}
    assert step_times({4: 9.5}) == {4: 9.5}
    times = {1: 5000, 2: 3000, 3: 1000}
    text = "".join(STEP.format(step=step, ms=ms, loss=3) for step, ms in times.items())
    (tmp_path / "run.log").write_text(text)
    assert read(tmp_path).series["step_s"] == {1: 5, 2: 1, 3: 1}
    (tmp_path / "run.log").write_text(text[text.index(" [2026", 9) :])  # cut off
    assert read(tmp_path).series["step_s"] == {2: 3, 3: 1}


def test_the_page_loads_nothing_and_has_both_themes(tmp_path):
    (tmp_path / "run.log").write_text(log(range(1, 61)))
    words = ["report", str(tmp_path / "run.log"), "--output", str(tmp_path / "page" / "run.html")]
    assert main([*words, "--png", str(tmp_path / "png"), "--title", "A <run>"]) == 0
    text = (tmp_path / "page" / "run.html").read_text(encoding="utf-8")
    HTMLParser().feed(text)
    assert (
        not re.findall(r"(?:src|href)=\"(?!#)", text)
        and "<script" not in text
        and "url(h" not in text
    )
    assert text.count('<div class="light"') == text.count('<div class="dark"') == 10
    for theme, colour in (("light", "#222222"), ("dark", "#dddddd")):
        parts = re.findall(rf'<div class="{theme}".*?</div>', text, re.DOTALL)
        assert all(colour in each for each in parts), theme
    assert "A &lt;run&gt;" in text and "keeps &lt;nearly&gt; all" in text
    assert "<th>training loss</th><td>2.9900</td><td>2.4000</td><td>2.4950</td>" in text
    assert {file.stem for file in (tmp_path / "png").iterdir()} >= {
        "loss",
        "density",
        "recall",
        "price",
    }


@pytest.mark.usefixtures("unrendered")
def test_a_page_that_exists_is_replaced_only_on_request(tmp_path, capsys):
    (tmp_path / "run.log").write_text(log(range(1, 5)))
    page = tmp_path / "run.html"
    page.write_text("mine")
    words = ["report", str(tmp_path / "run.log"), "--output", str(page)]
    assert main(words) == 2 and "exists: give --overwrite" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert main([*words, "--overwrite"]) == 0 and "</svg>" in page.read_text()


@pytest.mark.usefixtures("unrendered")
def test_pictures_that_exist_are_replaced_only_on_request(tmp_path, capsys):
    (tmp_path / "run.log").write_text(log(range(1, 5)))
    page, pictures = tmp_path / "run.html", tmp_path / "png"
    words = ["report", str(tmp_path / "run.log"), "--output", str(page), "--png", str(pictures)]
    pictures.write_text("a file")
    assert main(words) == 2 and "--png" in capsys.readouterr().err
    assert not page.exists(), "the same command, corrected, must work"
    pictures.unlink()
    pictures.mkdir()
    (pictures / "loss.png").write_text("mine")
    assert main(words) == 2 and "loss.png exists: give --overwrite" in capsys.readouterr().err
    assert not page.exists() and (pictures / "loss.png").read_text() == "mine"
    assert main([*words, "--overwrite"]) == 0 and page.exists()
    assert (pictures / "loss.png").read_bytes() != b"mine"


@pytest.mark.usefixtures("unrendered")
def test_what_is_read_is_not_replaced_and_a_page_is_written_whole(tmp_path, capsys, monkeypatch):
    log_file, page = tmp_path / "run.log", tmp_path / "run.html"
    log_file.write_text(log(range(1, 5)))
    for run in (log_file, tmp_path):
        assert main(["report", str(run), "--output", str(log_file), "--overwrite"]) == 2
        assert "run.log, which is read" in capsys.readouterr().err
    assert log_file.read_text() == log(range(1, 5))
    words = ["report", str(tmp_path), "--output", str(page), "--overwrite"]
    assert main(words) == main(words) == 0, "a page in the run's folder is replaced"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = page.read_bytes()
    assert main([*words, "--title", "another"]) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert page.read_bytes() == before and sorted(tmp_path.iterdir()) == [page, log_file]


def test_a_process_that_begins_earlier_replaces_what_came_after(tmp_path):
    """In one log, or one folder of TensorBoard's: a run that lost steps, or another run."""
    again = "".join(
        STEP.format(step=step, ms=ms, loss=1) for step, ms in ((31, 5000), (32, 3000), (33, 1000))
    )
    (tmp_path / "run.log").write_text(log(range(1, 61)) + again)
    found = read(tmp_path / "run.log")
    assert all(max(values) <= 33 for values in found.series.values())
    assert [found.series["step_s"][step] for step in (30, 31, 32, 33)] == [0.13, 5, 1, 1]
    assert found.series["loss"][30] == 2.7 and found.series["loss"][31] == 1
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for number, steps in enumerate((range(1, 7), range(1, 4))):
        folder = tmp_path / "tb"
        with tensorboard.SummaryWriter(str(folder), filename_suffix=f".{number}") as writer:
            for step in steps:
                writer.add_scalar("lm loss", 2.0 - number, step)
                writer.add_scalar("lm loss vs samples", 2.0 - number, 64 * step)
    first, second = sorted(folder.iterdir(), key=lambda file: file.suffix)
    assert read(folder).series == {"loss": {1: 1, 2: 1, 3: 1}}
    assert read(first).series == {"loss": dict.fromkeys(range(1, 7), 2.0)}
    assert read(second).source == str(second)


def test_what_only_looks_like_a_number_is_left_out(tmp_path):
    """Two processes may write at once; a price may have an exponent."""
    text = log(range(1, 5)).replace("iteration 3 | density 0.203", "iteration 3 | density 0.2.203")
    text = text.replace("price 0.31 | search 12.5 ms", "price 1e+05 | search 12.5e ms", 3)
    (tmp_path / "run.log").write_text(text)
    found = read(tmp_path)
    assert sorted(found.series["density"]) == [1, 2, 4]
    assert found.series["price"] == {1: 1e5, 2: 1e5, 3: 1e5, 4: 0.31}
    assert found.series["search_ms"] == {4: 12.5} and found.series["loss_ms"][1] == 50


@pytest.mark.usefixtures("unrendered")
def test_losses_that_are_not_finite_are_told(tmp_path):
    """Megatron prints no loss where it is NaN, and INF where it is infinite."""
    lines = [STEP.format(step=step, ms=100, loss=3.0) for step in range(1, 9)]
    for step in (3, 4, 5):
        lines[step - 1] = lines[step - 1].replace(" lm loss: 3.000000E+00 |", "")
    lines[5] = lines[5].replace("3.000000E+00", "1.000000E+308")  # beyond float32
    lines[6] = lines[6].replace("3.000000E+00", "INF").replace("grad norm: 1.250", "grad norm: nan")
    (tmp_path / "run.log").write_text("".join(lines))
    found = read(tmp_path)
    assert sorted(found.series["loss"]) == [1, 2, 8]
    assert found.not_finite == {"loss": [3, 4, 5, 6, 7], "grad_norm": [7]}
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert "<li>training loss is NaN or infinite in steps 3 to 7: left out below</li>" in text
    assert "grad norm is NaN or infinite in step 7" in text


@pytest.mark.usefixtures("unrendered")
def test_a_run_whose_every_loss_is_nan_has_a_page(tmp_path):
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps(dict(log_history=[dict(loss=float("nan"), step=5)])))
    output = tmp_path / "report.html"
    assert main(["report", str(state), "--output", str(output)]) == 0
    assert "training loss is NaN or infinite in step 5" in output.read_text(encoding="utf-8")


@pytest.mark.usefixtures("unrendered")
def test_tensorboard_has_layers(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in range(1, 4):
            writer.add_scalar("lm loss", 3.0 - step, step)
            if step > 1:  # as Megatron 0.19, with the mean of the first two
                writer.add_scalar("iteration-time", 2.5 if step == 2 else 0.5, step)
            writer.add_scalar("mtraining-density/mean", 0.25, step)
            for layer in range(2):
                writer.add_scalar(f"mtraining-density-layers/{layer:02d}", 0.125 + layer, step)
    found = read(tmp_path)
    assert found.series["loss"] == {1: 2, 2: 1, 3: 0} and found.series["step_s"] == {3: 0.5}
    assert found.layers["density"][1] == {1: 1.125, 2: 1.125, 3: 1.125}
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "tb"), "--output", str(output)]) == 0
    assert "Density by layer" in output.read_text(encoding="utf-8")


def test_transformers_state(tmp_path):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    history = [
        dict(loss=2.0, step=1, mtraining_density=0.2, mtraining_recall=0.95, learning_rate=1e-5),
        dict(loss=1.5, step=2, mtraining_density=0.15, mtraining_recall=0.94, learning_rate=1e-5),
        dict(eval_loss=1.75, step=2),
    ]
    state = folder / "trainer_state.json"
    state.write_text(json.dumps(dict(log_history=history, global_step=2)))
    earlier = tmp_path / "checkpoint-1" / state.name
    earlier.parent.mkdir()
    earlier.write_text(json.dumps(dict(log_history=history[:1], global_step=1)))
    os.utime(state, (1, 1))  # of a copy
    found = read(tmp_path)
    assert found.series["loss"] == {1: 2, 2: 1.5} and found.series["eval_loss"] == {2: 1.75}
    assert found.series["density"] == {1: 0.2, 2: 0.15}


def test_refusals(tmp_path, capsys):
    def said(*words) -> str:
        assert main(["report", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "there is no" in said(tmp_path / "nothing")
    assert "has no metrics of a run: give Megatron's printed log" in said(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.log").write_text(log(range(1, 5)))
    assert "both begin at step 1: they are of two runs" in said(tmp_path)
    state = tmp_path / "trainer_state.json"
    for history in (None, [1], [dict(loss=1)], [dict(loss=1, step="x")], {"loss": 1}):
        state.write_text(json.dumps(dict(log_history=history)))
        assert "is not as transformers writes it" in said(state)
