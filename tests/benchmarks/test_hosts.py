# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks.hosts.one_host`` and runs of training: rows that count, and what losses are compared with."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.hosts import one_host
from benchmarks.hosts.host_jobs import Job, jobs_of, slash_cap
from benchmarks.lib import jobs as lib_jobs
from benchmarks.model import layouts
from benchmarks.sparsebalance import ranks

HERE = dict(gpu="a GPU", commit="abc", torch="2", triton="3", command="python")


@pytest.fixture
def options(tmp_path):
    core = tmp_path / "Megatron-LM/megatron/core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    (tmp_path / "Megatron-LM/pretrain_gpt.py").touch()
    (tmp_path / "out").mkdir()
    words = ["--megatron", tmp_path / "Megatron-LM", "--output-folder", tmp_path / "out", "--list"]
    found = one_host.parse(list(map(str, words)))
    found.has_te, found.local = True, False
    return found


def test_jobs_have_names_of_their_own_and_come_after_what_they_need(options):
    names = [(job.stage, job.name) for job in jobs_of(options)]
    assert len(names) == len(set(names)) > 40
    for at, job in enumerate(jobs_of(options)):
        assert job.needs is None or (job.stage, job.needs) in names[:at]
    options.gpus = 8
    eight = {job.name for job in jobs_of(options)}
    assert {"2048K, side by side", "512K, two hosts of 4", "7B, 256K, output kept"} <= eight
    assert not any(name.startswith("128K") for name in eight)
    options.gpus, options.job = 4, ["512K, dense"]
    assert [job.name for job in jobs_of(options)] == ["data", "512K, dense"]


def test_random_weights_get_the_frontier_s_density_from_a_cap():
    for seq in (131072, 1048576):
        blocks, cap = seq // 128, slash_cap(seq)
        kept = sum(blocks - distance for distance in range(cap))
        assert kept / (blocks * (blocks + 1) / 2) == pytest.approx(0.145, abs=0.002)


def test_it_goes_on_after_a_failure_and_in_the_next_call(options, capsys):
    def fake(name, code, seconds=1.0, **more):
        return Job("layer", name, seconds, ["-c", code], "rows.jsonl", **more)

    row = json.dumps(dict(name="a row")) + "\n"
    writes = f"open({str(options.output_folder / 'rows.jsonl')!r}, 'a').write({row!r})"
    states = one_host.States(options, HERE)
    todo = [
        fake("good", writes),
        fake("bad", "raise ValueError('no such thing')"),
        fake("late", writes, 1000),
        fake("after", writes, needs="bad"),
        fake("no row", ""),
        fake("next", writes, needs="good"),
    ]
    deadline = lib_jobs.Deadline(None, 1.0)
    deadline.end = time.monotonic() + 300
    one_host.run_all(todo, states, deadline)
    found = [states.status(job) for job in todo]
    assert found == ["done", "failed", "missing", "missing", "failed", "done"]
    why = [states.of(todo[at])[-1]["why"] for at in (1, 4)]
    assert why == ["ValueError: no such thing", "it ended without a row"]
    # The next call has more time; what has failed is not run again.
    capsys.readouterr()
    deadline.end = time.monotonic() + 3000
    one_host.run_all(todo, states, deadline)
    assert capsys.readouterr().out.count("layer: ") == 1 and states.status(todo[2]) == "done"
    assert one_host.show(todo, states, True) == 1
    # What another GPU or commit has done does not count, unless it is said to.
    assert one_host.States(options, dict(HERE, gpu="another")).status(todo[0]) == "missing"
    later = one_host.States(options, dict(HERE, commit="later"))
    assert later.status(todo[0]) == "missing"
    options.commit = ["abc"]
    assert later.status(todo[0]) == "done"


def test_a_job_that_does_not_end_is_stopped(options):
    states = one_host.States(options, HERE)
    job = Job("layer", "long", 1.0, ["-c", "import time; time.sleep(60)"], "")
    one_host.run([job], states, time.monotonic() + 1)
    assert states.status(job) == "missing" and states.of(job)[-1]["status"] == "stopped"
    assert states.seconds(job) == pytest.approx(1.5 * states.of(job)[-1]["seconds"])


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


def test_losses_are_compared_with_the_layout_they_should_have(options, monkeypatch, capsys):
    output = options.output_folder / "layouts.jsonl"
    monkeypatch.setenv("MTRAINING_COMMIT", "abc")
    words = [
        str(options.megatron),
        "--folder",
        str(options.scratch),
        "--output",
        str(output),
        "--layout",
    ]
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
