# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval needle``: where the needle is, how answers are scored, what is kept and goes on."""

from __future__ import annotations

import json
import signal
from argparse import Namespace

import pytest

from tests.support.eval_cases import QUIET, SPARSE, refused, results, run, samples, tokenizer

NEEDLE = ("--lengths", "384", "--depths", "2", *QUIET)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("of_text", [False, True])
def test_documents(of_text, chat, words):
    """The needle is there once, at its depth, and the prompt is nearly as long as asked."""
    from megatron_mtraining.tools.eval import needle

    own = tokenizer()
    options = Namespace(
        depths=(0.0, 25.0, 100.0), samples=2, lengths=(512, 1024), chat=chat,
        text=(words,) if of_text else (),
    )  # fmt: skip
    for planned in needle.planned(options, own):
        documents = planned.task.dataset["test"]
        assert [each["depth"] for each in documents] == [0, 25, 100] * 2
        assert len({each["outputs"][0] for each in documents}) == 6
        for each in documents:
            found = needle.NEEDLE.format(
                key=each["gen_prefix"].split()[5], value=each["outputs"][0]
            )
            context = each["input"].split("\n", 1)[1].rsplit("\n", 1)[0]
            assert context.count(found) == 1
            before, after = context.split(found)
            depth = len(before) / (len(before) + len(after))
            assert abs(depth - each["depth"] / 100) < 0.15, (depth, each["depth"])
            used = len(own(f"{each['input']} {each['gen_prefix']}")["input_ids"])
            room = planned.length - needle.ANSWER_TOKENS - (needle.TEMPLATE_TOKENS if chat else 0)
            assert room - 120 < used <= room
            assert planned.target(each) == " " + each["outputs"][0]


def test_scores(llama, tmp_path, lm):
    """By hand: right answers at depth 0, wrong ones at depth 100."""

    def answer(request):
        right = request.doc["outputs"][0]
        return f"it is {right}." if request.doc["depth"] == 0 else right[:-1]

    lm(answer)
    out = tmp_path / "out"
    assert run("needle", llama, "--output", out, "--samples", 3, *NEEDLE, *SPARSE) == 0
    found = json.loads((out / "needle.json").read_text())
    for attention in ("dense", "mtraining"):
        grid = found["grid"][attention]
        assert grid["scores"] == [[1.0], [0.0]] and grid["depths"] == [0, 100]
    for row in found["rows"]:
        assert row["score"]["mean"] == 0.5 and row["samples"] == 6
        assert row["score"]["low"] <= 0.5 <= row["score"]["high"] and row["score"]["low"] < 0.4
    assert found["differences"][0]["score"] == {"mean": 0, "low": 0, "high": 0, "samples": 6}
    assert (out / "needle.png").stat().st_size > 5000


@pytest.mark.usefixtures("unrendered")
def test_both_attentions_and_what_they_keep(llama, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("--lengths", 1024, "--depths", 1, "--samples", 2, *QUIET, *SPARSE)
    assert run("needle", llama, "--output", out, *words) == 0
    dense, sparse = samples(out)["needle-1024-dense"], samples(out)["needle-1024-mtraining"]
    assert [row["prompt"] for row in dense] == [row["prompt"] for row in sparse]
    assert "density" not in dense[0] and 0.02 < sparse[0]["density"] < 0.9
    assert dense[0]["loss"] != sparse[0]["loss"] and dense[0]["answer_tokens"] > 1
    assert "needle" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["needle.json", "needle.png", "samples"]


@pytest.mark.usefixtures("unrendered")
def test_price_0_is_dense(llama, tmp_path):
    out = tmp_path / "out"
    words = ("--samples", 2, *NEEDLE, "--mtraining-price", 0)
    assert run("needle", llama, "--output", out, *words) == 0
    dense, sparse = samples(out)["needle-384-dense"], samples(out)["needle-384-mtraining"]
    for one, other in zip(dense, sparse, strict=True):
        assert one["answer"] == other["answer"] and other["density"] == 1
        assert abs(one["loss"] - other["loss"]) < 1e-4


@pytest.mark.usefixtures("unrendered")
def test_resumed_and_enlarged(llama, tmp_path, monkeypatch, capsys):
    """A run that is ended goes on; a larger run adds to a smaller one; both give what one run gives."""
    from megatron_mtraining.tools.eval import harness

    more = (*NEEDLE, "--attention", "dense")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("needle", llama, "--output", whole, "--samples", 2, *more) == 0
    measured, done = harness.KeptLM._measured, []

    def ends(self, request):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(request.doc_id)
        return measured(self, request)

    monkeypatch.setattr(harness.KeptLM, "_measured", ends)
    assert run("needle", llama, "--output", parts, "--samples", 1, *more) == 128 + signal.SIGINT
    assert "1 samples are kept" in capsys.readouterr().err.splitlines()[-1]
    assert not (parts / "needle.json").exists()
    file = parts / "samples" / "needle-384-dense.jsonl"
    with file.open("a") as torn:
        torn.write('{"id": 1, "prom')

    def counted(self, request):
        done.append(request.doc_id)
        return measured(self, request)

    monkeypatch.setattr(harness.KeptLM, "_measured", counted)
    assert run("needle", llama, "--output", parts, "--samples", 1, *more) == 0
    assert run("needle", llama, "--output", parts, "--samples", 2, *more) == 0
    assert done == [0, 1, 2, 3]
    assert samples(parts) == samples(whole)
    assert results(parts, "needle") == results(whole, "needle")


@pytest.mark.usefixtures("unrendered")
def test_another_run(llama, tmp_path, lm, capsys):
    """Samples of other options are refused by name, and replaced only when told so."""
    lm(lambda request: "1")
    out = tmp_path / "out"
    words = ("needle", llama, "--output", out, "--samples", 1, *NEEDLE)
    assert run(*words, "--mtraining-price", 1) == 0
    named = [
        "--output is",
        "2 samples of a run that differs in --mtraining-price (1.0 there, 2.0 now): ",
    ]
    refused(capsys, named, *words, "--mtraining-price", 2)
    refused(capsys, ["--depths (2 there, 3 now)"], *words, "--mtraining-price", 1, "--depths", 3)
    assert run(*words, "--mtraining-price", 2, "--overwrite") == 0
    assert results(out, "needle")["settings"]["price"] == 2
    file = out / "samples" / "needle-384-dense.jsonl"
    file.write_text(file.read_text().replace('"id": 1', '"id": nothing'))
    refused(capsys, [file.name, "damaged"], *words, "--mtraining-price", 2)
    assert run(*words, "--mtraining-price", 2, "--overwrite") == 0


@pytest.mark.usefixtures("unrendered")
def test_a_length_is_added(llama, tmp_path, lm):
    """The prompts of a length in a text do not depend on the other lengths."""
    asked = lm(lambda request: "1")
    text, out = tmp_path / "book.txt", tmp_path / "out"
    text.write_text(
        " ".join(f"Sentence {n} tells of day {7 * n} by the river." for n in range(2000))
    )
    words = (
        "needle",
        llama,
        "--output",
        out,
        "--text",
        text,
        "--samples",
        1,
        "--depths",
        1,
        *QUIET,
    )
    words += ("--attention", "dense")
    assert run(*words, "--lengths", 384) == 0
    assert run(*words, "--lengths", 384, 512) == 0
    assert len(asked) == 2 and len(asked[0].args[0]) < len(asked[1].args[0])


@pytest.mark.usefixtures("unrendered")
def test_changed_prompts_are_refused(llama, tmp_path, lm, capsys):
    lm(lambda request: "1")
    out = tmp_path / "out"
    words = ("needle", llama, "--output", out, "--samples", 1, *NEEDLE, "--attention", "dense")
    assert run(*words) == 0
    file = out / "samples" / "needle-384-dense.jsonl"
    row = json.loads(file.read_text().splitlines()[2])
    file.write_text(file.read_text().replace(row["prompt"], "0" * 16))
    refused(capsys, ["sample 1 with another prompt"], *words)
