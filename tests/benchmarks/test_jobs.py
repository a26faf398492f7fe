# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/lib/jobs.py: jobs of a script, their rows, and the time they have."""

from __future__ import annotations

import pytest

from benchmarks.lib import jobs


def job(name: str) -> dict | None:
    if name == "bad":
        raise RuntimeError("it cannot be done")
    return None if name == "none" else {"name": name}


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_jobs_leave_rows_and_failures_do_not_end_others(tmp_path, capsys, count):
    output, deadline = tmp_path / "rows.jsonl", jobs.Deadline(None, 1.0)
    left = jobs.run_jobs(["a", "bad", "none", "b"], job, output, count, deadline)
    assert left == 0 and {row["name"] for row in jobs.read(output)} == {"a", "b"}
    assert "job bad has failed: it cannot be done" in capsys.readouterr().out


def test_a_job_that_would_not_end_in_time_is_not_begun(tmp_path, monkeypatch):
    now = [jobs.STARTED]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])

    def slow(name):
        now[0] += 20
        return {"name": name}

    # 60 seconds: two of 20, then 22 more would end after 62.
    assert jobs.run_jobs(list("abcd"), slow, tmp_path / "rows", 1, jobs.Deadline(1.0, 5.0)) == 2
