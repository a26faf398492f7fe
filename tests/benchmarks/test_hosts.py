# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks.hosts.four`` and runs of training: rows that count, and what losses are compared with."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.hosts import four, host_runs
from benchmarks.hosts.host import FULL, Host, Job
from benchmarks.hosts.host_runs import States
from benchmarks.hosts.training_jobs import slash_cap
from benchmarks.lib import jobs as lib_jobs
from benchmarks.model import layouts
from benchmarks.sparsebalance import ranks

HERE = dict(gpu="a GPU", commit="abc", torch="2", triton="3", command="python")


@pytest.fixture
def host(tmp_path):
    core = tmp_path / "Megatron-LM/megatron/core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    (tmp_path / "Megatron-LM/pretrain_gpt.py").touch()
    (tmp_path / "out").mkdir()
    return Host(
        4, "cuda", FULL, tmp_path / "out", tmp_path / "scratch", tmp_path / "Megatron-LM", True
    )


def test_random_weights_get_the_frontier_s_density_from_a_cap():
    for seq in (131072, 1048576):
        blocks, cap = seq // 128, slash_cap(seq)
        kept = sum(blocks - distance for distance in range(cap))
        assert kept / (blocks * (blocks + 1) / 2) == pytest.approx(0.145, abs=0.002)


def test_it_goes_on_after_a_failure_and_in_the_next_call(host, capsys):
    def fake(name, code, seconds=1.0, **more):
        rows = (dict(name=name),)
        return Job("layer", name, seconds, ("-c", code), file="rows.jsonl", rows=rows, **more)

    def writes(name, commit="abc"):
        row = json.dumps(dict(name=name, gpu="a GPU", commit=commit)) + "\n"
        return f"open({str(host.folder / 'rows.jsonl')!r}, 'a').write({row!r})"

    states = States(host, HERE)
    todo = [
        fake("good", writes("good")),
        fake("bad", "raise ValueError('no such thing')"),
        fake("late", writes("late"), 1000),
        fake("after", writes("after"), needs=("bad",)),
        fake("other commit", writes("other commit", commit="xyz")),
        fake("next", writes("next")),
    ]
    deadline = lib_jobs.Deadline(None, 1.0)
    deadline.end = time.monotonic() + 300
    host_runs.run_all(todo, states, deadline)
    assert [job.name for job in todo if not states.missing(job)] == ["good", "next"]
    assert states.failure(todo[1]) == "ValueError: no such thing"
    assert "without 1 of its rows" in states.failure(todo[4])
    # The next call has more time; what has failed is not run again.
    capsys.readouterr()
    deadline.end = time.monotonic() + 3000
    host_runs.run_all(todo, states, deadline)
    assert capsys.readouterr().out.count("layer: ") == 1 and not states.missing(todo[2])
    assert four.show(todo, states, True, 9) == 1
    # Rows of another GPU or commit do not count, unless they are said to.
    assert States(host, dict(HERE, gpu="another")).missing(todo[0])
    assert States(host, dict(HERE, commit="later")).missing(todo[0])
    assert not States(host, dict(HERE, commit="later"), commits=["abc"]).missing(todo[0])


def test_figures_of_a_log_of_ranks():
    line = (
        " [mtraining] iteration {0} | attention of the slowest rank: measured {1} ms (max/mean 1.250, "
        "idle 20.0%)"
    )
    tuned = line + " | predicted 50 ms (max/mean 1.1, idle 9.1%) | price times 0.8 to 1.5"
    log = "\n".join([line.format(1, 900), tuned.format(2, 100), tuned.format(3, "1.2e+02")])
    found = ranks.figures(log, 1)
    assert (found["attention_ms"], found["max_over_mean"], found["idle_share"]) == (110, 1.25, 0.2)
    assert found["multipliers"] == [0.8, 1.5] and found["steps"] == 2
    assert found["predicted_over_measured"] == pytest.approx((0.5 + 50 / 120) / 2, abs=1e-5)
    with pytest.raises(ranks.ConfigError, match="no attention times of steps after 3"):
        ranks.figures(log, 3)


def test_losses_are_compared_with_the_layout_they_should_have(host, monkeypatch, capsys):
    output = host.folder / "layouts.jsonl"
    monkeypatch.setenv("MTRAINING_COMMIT", "abc")
    words = [str(host.megatron), "--folder", str(host.scratch), "--output", str(output), "--layout"]
    with pytest.raises(SystemExit):
        layouts.main([*words, "CP 2"])
    assert "is compared with 'CP 1', which has no row" in capsys.readouterr().err

    def run(name, losses):
        monkeypatch.setattr(layouts, "losses_of", lambda *given: losses)
        layouts.main([*words, name])

    run("CP 1", [4.0, 2.0])
    run("CP 2", [4.0, 2.004])
    with pytest.raises(SystemExit, match="losses of 'CP 2, again' are not those of 'CP 2'"):
        run("CP 2, again", [4.0, 2.003])
    with pytest.raises(SystemExit, match="losses of 'CP 4' differ by 1.00% from 'CP 1'"):
        run("CP 4", [4.0, 2.02])
    assert [row["within"] for row in lib_jobs.read(output)] == [None, True, True, False]
