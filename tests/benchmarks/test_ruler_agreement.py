# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks.tools.ruler_agreement``: what counts as the same."""

from __future__ import annotations

from benchmarks.tools import ruler_agreement as benchmark


def test_one_answer_that_differs_is_no_agreement():
    row = {"task": "vt", "samples": 3, "same_prompts": 3, "same_answers": 3, "same_scores": 3}
    row |= {"score": 0.2, "score_lm_eval": 0.2}
    assert benchmark.agrees(row) and not benchmark.agrees({**row, "score_lm_eval": 0.3})
    assert not benchmark.agrees({**row, "same_answers": 2})


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
