# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks/sparsebalance/simulate.py``: drawn patterns, the schedules, and the rows of small runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.sparsebalance import modes, schedule, sets, simulate
from benchmarks.sparsebalance.windows import Windows, sample_curves


def recorded(kind, seq, window, density, recall, document=0):
    return dict(
        model="m", kind=kind, seq=seq, document=document, window=window, prices=[0.1, 0.4],
        density=density, recall=recall, commit="c",
    )  # fmt: skip


@pytest.fixture
def windows(tmp_path):
    rows = [
        recorded("code", 1024, 0, [0.4, 0.2], [0.99, 0.96]),
        recorded("code", 1024, 1, [0.8, 0.4], [0.97, 0.90]),
        recorded("code", 4096, 0, [0.1, 0.05], [0.99, 0.96]),
        recorded("code", 4096, 1, [0.2, 0.1], [0.99, 0.96]),
        recorded("c", 1024, 0, [0.5, 0.3], [0.98, 0.95]),
    ]
    path = tmp_path / "patterns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Windows(path)


def test_documents_are_between_the_recorded_windows(windows):
    assert windows.kinds == ("code", "c")
    lengths, ranks = np.array([1024, 1024, 2048, 8192, 100]), np.array([0, 1, 0, 0, 0.5])
    density, recall = windows.curves("code", lengths, ranks)
    assert density[:, 0] == pytest.approx([0.4, 0.8, 0.2, 0.05, 0.32**0.5])
    assert recall[0] == pytest.approx([0.99, 0.96])
    # Half-way between two prices, in logarithms.
    at = windows.at_price(density[:1], np.array([0.2]), left=False)
    assert at == pytest.approx([(0.4 * 0.2) ** 0.5])
    at = windows.at_price(recall[:1], np.array([0.2]), left=True)
    assert 1 - at == pytest.approx([(0.01 * 0.04) ** 0.5])
    # Beyond the recorded prices the last numbers hold.
    assert windows.at_price(density[:1], np.array([9.0]), left=False) == pytest.approx([0.2])
    one, _ = windows.curves("c", np.array([4096]), np.array([0.3]))
    assert one[0] == pytest.approx([0.5, 0.3])


def test_packing_changes_what_it_changed_in_recorded_windows(tmp_path):
    rows = [
        recorded("code", 1024, 0, [0.4, 0.2], [0.99, 0.96]),
        recorded("code", 4096, 0, [0.32, 0.18], [0.98, 0.94], document=1024),
    ]
    path = tmp_path / "patterns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Windows(path)
    assert found.packed_over_single[0] == pytest.approx([0.8, 0.9])
    assert found.packed_over_single[1] == pytest.approx([2, 1.5])
    packed = sets.PackedSet(
        2048, np.array([0, 0], np.int32), [np.array([2048]), np.array([1024, 1024])]
    )
    density, recall = sample_curves(found, packed, 0)
    assert density[0] == pytest.approx([0.4, 0.2]) and density[1] == pytest.approx([0.32, 0.18])
    assert recall[1] == pytest.approx([0.98, 0.94])


def test_ends_of_schedules():
    forward, backward = np.array([[1.0, 2], [3, 1]]), np.array([[2.0, 4], [6, 2]])
    assert schedule.ends(forward, backward, "step").tolist() == [12, 9]
    assert schedule.ends(forward, backward, "microbatch").tolist() == [15, 15]
    assert schedule.ends(forward, backward, "pipeline", 1).tolist() == [12, 9]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_equal_micro_batches_take_what_1f1b_is_known_to(stages, count):
    forward, backward = np.full((count, 2), 1.0), np.full((count, 2), 2.0)
    ends = schedule.ends(forward * stages, backward * stages, "pipeline", stages)
    assert ends == pytest.approx((count + stages - 1) * 3.0)


def test_a_slow_micro_batch_delays_all_stages():
    forward, backward = np.ones((4, 1)), 2 * np.ones((4, 1))
    even = schedule.ends(forward, backward, "pipeline", 4)
    forward[1], backward[1] = 3, 6
    slow = schedule.ends(forward, backward, "pipeline", 4)
    # A stage's part of it takes 1.5 longer; a pipeline pays for more than that.
    assert slow[0] > even[0] + 1.5


def small(tmp_path, *words):
    output = tmp_path / "rows.jsonl"
    few = ["--samples", "60", "--steps", "6", "--learn", "6", "--output", str(output)]
    simulate.main([*few, *words])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_rows_of_a_small_run(tmp_path, capsys):
    words = [
        "--set",
        "bimodal",
        "--gpus",
        "8",
        "--waits",
        "step",
        "microbatch",
        "--others-gpus",
        "8",
    ]
    rows = small(tmp_path, *words)
    by_name = {(row["waits"], row["mode"]): row for row in rows}
    assert len(by_name) == len(rows) == 10
    for row in rows:
        assert row["source"] == "simulated" and row["gpus"] == row["dp"] * row["cp"] * row["pp"]
        assert row["step_ms"] > row["attention_ms"] >= row["mean_attention_ms"] > 0
        assert row["max_over_mean"] >= 1 and 0 <= row["step_idle_share"] < row["idle_share"] + 1e-6
        assert 0.5 < row["recall"] < 1 and 0 < row["density"] < 1
    off, length, cost, tuning, both = (by_name["step", name] for name in modes.MODES)
    assert off["max_over_mean"] > max(length["max_over_mean"], cost["max_over_mean"])
    assert off["mean_attention_ms"] == pytest.approx(cost["mean_attention_ms"], rel=0.02)
    assert off["recall"] == pytest.approx(cost["recall"], abs=1e-5)  # the same samples
    assert tuning["max_over_mean"] < off["max_over_mean"]
    assert both["attention_ms"] < off["attention_ms"] and both["mass_moved"] <= 0.01
    assert by_name["microbatch", "off"]["step_ms"] > off["step_ms"] * 8 / 4 * 0.9
    assert small(tmp_path, *words) == rows  # what has a row is left out
    assert capsys.readouterr().out.count("\n") == 10


def test_a_run_gives_the_same_rows_again(tmp_path):
    words = ["--set", "8K-72K", "--gpus", "8", "--waits", "step", "--mode", "both"]
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first, second = (small(tmp_path / name, *words) for name in "ab")
    for row in (*first, *second):
        row.pop("tune_ms")
    assert first == second


def test_a_pipeline_s_rows(tmp_path):
    words = [
        "--set",
        "bimodal",
        "--waits",
        "pipeline",
        "--others-gpus",
        "32",
        "--mode",
        "off",
        "both",
    ]
    off, both = small(tmp_path, *words)
    assert off["pp"] == 4 and off["dp"] == 4 and off["microbatches"] == 8
    assert both["step_ms"] < off["step_ms"]


def test_context_parallel_ranks_leave_four_replicas():
    case = simulate.Case("to 256K", 4, "step", "off", 0.25, 1, 4, 4)
    assert (case.cp, case.dp) == (1, 4)
    case = case._replace(gpus=1024, waits="pipeline")
    assert (case.cp, case.pp, case.dp) == (8, 4, 32)


def test_the_rest_of_a_step_is_that_of_a_measured_row():
    rest = simulate.Rest.measured()
    parts = rest.row["breakdown"]
    tokens = rest.row["seq"] / rest.row["world"]
    assert rest.token * tokens == pytest.approx(parts["layers"] + parts["loss"])
    assert 0.02 < rest.token < 0.08  # ms


def test_an_unknown_gpu_is_refused():
    with pytest.raises(SystemExit, match="simulate.py: .*profile"):
        simulate.main(["--gpu", "NVIDIA T4", "--set", "bimodal"])
