# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval longbench`` and ``infinitebench``: files as they are published, scored by lm-eval."""

from __future__ import annotations

import json

import pytest

from tests.support.eval_cases import QUIET, refused, run


@pytest.fixture(autouse=True)
def answers(lm):
    """The model answers with a wrong word and then the right one."""

    def answer(request):
        right = request.doc.get("answers") or request.doc["answer"]
        return right[0] if request.doc_id else "something else"

    lm(answer)


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def scores(out, benchmark):
    rows = json.loads((out / f"{benchmark}.json").read_text())["rows"]
    return {row["task"]: (row["score"]["mean"], row["samples"]) for row in rows}


def test_longbench(llama, tmp_path):
    """With the authors' name of a field, which lm-eval calls otherwise."""
    for name in ("jieba", "fuzzywuzzy", "rouge"):
        pytest.importorskip(name)
    rows = [
        {"input": f"Who {n}?", "context": "Ann is here. " * 20, "answers": ["Ann"], "all_classes": None,
         "length": 80, "dataset": "hotpotqa", "language": "en", "_id": str(n)}
        for n in range(4)
    ]  # fmt: skip
    write(tmp_path / "data", "hotpotqa", rows)
    write(tmp_path / "data", "qasper", rows[:1])
    words = ("--data", tmp_path / "data", "--attention", "dense", *QUIET)
    out = tmp_path / "out"
    assert run("longbench", llama, "--output", out, "--samples", 3, *words) == 0
    assert scores(out, "longbench") == {
        "hotpotqa": (pytest.approx(2 / 3, abs=1e-6), 3), "qasper": (0, 1)
    }  # fmt: skip


def test_infinitebench(llama, tmp_path, capsys):
    rows = [
        {"id": n, "context": "The pass key is 71432.", "input": "What is it?", "answer": ["71432"],
         "options": []}
        for n in range(2)
    ]  # fmt: skip
    write(tmp_path / "data", "passkey", rows)
    words = ("--data", tmp_path / "data", "--attention", "dense", *QUIET)
    out = tmp_path / "out"
    assert run("infinitebench", llama, "--output", out, *words) == 0
    assert scores(out, "infinitebench") == {"passkey": (0.5, 2)}
    asked = ("infinitebench", llama, "--output", tmp_path / "other", *words)
    refused(capsys, ["math_find.jsonl is missing"], *asked, "--tasks", "math_find")
    for line, named in (
        ("[1]", "line 3 is no JSON object"),
        ("[" * 100_000, "line 3 is no JSON object"),
        ('{"id": 5}', "line 3 has no 'context'"),
        (json.dumps({**rows[0], "input": "\ud800"}), "line 3 is no text: \\ud800"),
    ):
        write(tmp_path / "data", "passkey", rows)
        with (tmp_path / "data" / "passkey.jsonl").open("a") as file:
            file.write(line + "\n")
        refused(capsys, ["passkey.jsonl", named], *asked)
    (tmp_path / "data" / "passkey.jsonl").write_text("\n")
    refused(capsys, ["no samples"], *asked)
