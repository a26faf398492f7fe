# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks.tools.ruler_agreement``: both commands on a small model, and samples that differ."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from benchmarks.tools import ruler_agreement as benchmark
from tests.support.eval_cases import ruler_data, save_model


@pytest.mark.slow
@pytest.mark.repeated  # what it runs, tests/tools/eval/test_ruler_agreement.py runs
def test_rows_of_both_commands(tmp_path):
    """All is the same; then lm-eval's samples are changed, and the counts say so."""
    for name in ("lm_eval", "punkt"):
        if find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")
    model, data = save_model(tmp_path / "model"), ruler_data(tmp_path / "data")
    output, folder = tmp_path / "rows.jsonl", tmp_path / "runs"
    words = [
        "--model",
        model,
        "--data",
        data,
        "--tasks",
        "qa_squad",
        "--length",
        1024,
        "--samples",
        2,
    ]
    words = [str(word) for word in (*words, "--folder", folder, "--output", output)]
    assert benchmark.main(words) == 0
    [file] = folder.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples[0]["resps"][0][0] += "!"
    samples[0]["1024"] = 0.5
    samples[1]["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"] += 1
    file.write_text("\n".join(map(json.dumps, samples)))
    assert benchmark.main(words) == 1  # both sides go on from the samples that are there
    row, changed = map(json.loads, output.read_text().splitlines())
    counts = [
        [each[f"same_{name}"] for name in ("prompts", "answers", "scores")]
        for each in (row, changed)
    ]
    assert counts == [[2, 2, 2], [1, 1, 1]]
    assert row["samples"] == 2 and row["score"] == row["score_lm_eval"]


def test_line_and_verdict():
    row = {"task": "vt", "samples": 3, "same_prompts": 3, "same_answers": 3, "same_scores": 3}
    row |= {"score": 0.2, "score_lm_eval": 0.2}
    assert benchmark.agrees(row) and not benchmark.agrees({**row, "score_lm_eval": 0.3})
    assert not benchmark.agrees({**row, "same_answers": 2})
    assert "3 prompts, 2 answers, 3 scores" in benchmark.line({**row, "same_answers": 2})


def test_means_are_compared_to_six_digits(monkeypatch):
    """The two sides do not add scores in the same order."""
    from megatron_mtraining.tools.common.digests import digest_of_value

    theirs = {"doc_id": 0, "doc": {"outputs": ["A"]}, "resps": [["a"]], "4096": 0.2}
    theirs["arguments"] = {"gen_args_0": {"arg_0": "prompt", "arg_1": {}}}
    prompt = digest_of_value(["prompt", {}, " A"])
    ours = {"id": 0, "prompt": prompt, "answer": "a", "score": 0.2, "tokens": 9}
    options = benchmark.parse(["--model", "model", "--folder", "folder"])
    monkeypatch.setattr(benchmark, "of_lm_eval", lambda *_: ([theirs], 0.2, 1.0))
    for mean, same in ((0.1 + 0.2 - 0.1, True), (0.2 + 1e-5, False)):
        monkeypatch.setattr(benchmark, "of_mtraining", lambda *_, mean=mean: ([ours], mean, 1.0))
        assert benchmark.agrees(benchmark.compared(options, "vt")) is same


def test_tasks_without_data():
    options = benchmark.parse(["--model", "model", "--folder", "folder"])
    assert "vt" in options.tasks and "qa_squad" not in options.tasks
