# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval perplexity``: the model's own loss, by position; LongPPL is the package's."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.support.eval_cases import (
    QUIET,
    SPARSE,
    results,
    run,
    samples,
    save_model,
    text,
    tokenizer,
)

WORDS = ("--lengths", 256, 512, "--samples", 2, *QUIET)


def model_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_loss_of_transformers(llama, words, tmp_path):
    out = tmp_path / "out"
    assert run("perplexity", llama, "--text", words, "--output", out, *WORDS, *SPARSE) == 0
    ids = torch.tensor(tokenizer()(text(), verbose=False)["input_ids"])
    model, found = model_of(llama), samples(out)
    for row, part in zip(found["perplexity-512-dense"], ids.split(512), strict=False):
        with torch.no_grad():
            loss = model(input_ids=part[None], labels=part[None]).loss.item()
        assert row["loss"] == pytest.approx(loss, abs=1e-5) and row["tokens"] == 511
        assert sum(row["loss_by_position"]) / 16 == pytest.approx(loss, abs=0.05)
    assert len(found["perplexity-512-dense"]) == 2
    sparse = found["perplexity-512-mtraining"][0]
    assert sparse["loss"] != found["perplexity-512-dense"][0]["loss"] and sparse["density"] < 0.95
    numbers = results(out, "perplexity")
    row = numbers["rows"][0]
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]["mean"]))
    apart = numbers["differences"][0]["loss"]["mean"]
    assert apart == pytest.approx(
        numbers["rows"][1]["loss"]["mean"] - row["loss"]["mean"], abs=1e-6
    )
    assert (out / "perplexity.png").stat().st_size > 5000


def test_price_0_is_dense(llama, words, tmp_path):
    out = tmp_path / "out"
    more = (*WORDS, "--mtraining-price", 0)
    assert run("perplexity", llama, "--text", words, "--output", out, *more) == 0
    found = samples(out)
    for name in ("perplexity-256", "perplexity-512"):
        for one, other in zip(found[f"{name}-dense"], found[f"{name}-mtraining"], strict=True):
            assert other["density"] == 1 and one["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.parametrize("evaluator", [False, True])
def test_longppl_is_the_package_s(evaluator, tmp_path, capsys):
    """With the evaluated model or another one to find the key tokens."""
    from longppl.longppl import compute_longppl

    # Key tokens are predicted well. So these are by chance: there are four tokens, and the models are sure.
    # Python's version decides which numbers the tokens have (text()): the models have the same rows for them.
    models = [save_model(tmp_path / name) for name in ("one", "other")]
    own, generator = tokenizer(), random.Random(0)
    four = (" grass", " blue", " green", " yellow")
    story = "".join(generator.choice(four) for _ in range(900))
    numbers = torch.tensor([own(word)["input_ids"] for word in four])[:, 0]
    for folder, scale in zip(models, (30, 45)):
        model = model_of(folder)
        embedding = model.get_input_embeddings().weight.data
        head = model.get_output_embeddings().weight.data
        embedding[numbers], kept = embedding[400:404].clone(), scale * head[400:404]
        head.zero_()[numbers] = kept
        model.save_pretrained(folder)
    out, words = tmp_path / "out", tmp_path / "story.txt"
    words.write_text(story)
    more = ["--longppl", 64, "--evaluator", models[1]] if evaluator else ["--longppl", 64]
    more += ["--lengths", 512, "--samples", 1, "--attention", "dense", *QUIET]
    assert run("perplexity", models[0], "--text", words, "--output", out, *more) == 0
    row = samples(out)["perplexity-512-dense"][0]
    ids = own(story, verbose=False)["input_ids"][:512]
    part = own.decode(ids)
    assert own(part)["input_ids"] == ids
    theirs = compute_longppl(
        part, model_of(models[0]), model_of(models[1 if evaluator else 0]), own, own, trunc_len=64,
        sliding_window=16,
    )  # fmt: skip
    assert row["key_tokens"] == theirs["n_key_token"] > 5
    assert row["key_loss"] == pytest.approx(math.log(theirs["longppl"]), rel=1e-4)
    assert row["loss"] == pytest.approx(math.log(theirs["ppl"]), rel=1e-4)
    assert "longppl" in capsys.readouterr().out


def test_goes_on(llama, words, tmp_path, monkeypatch):
    from megatron_mtraining.tools.eval import perplexity

    more = ("--text", words, "--lengths", 256, *QUIET, "--attention", "dense")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("perplexity", llama, "--output", whole, "--samples", 3, *more) == 0
    calls, call = [], perplexity.Losses.__call__

    def ends(self, ids):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return call(self, ids)

    monkeypatch.setattr(perplexity.Losses, "__call__", ends)
    assert run("perplexity", llama, "--output", parts, "--samples", 3, *more) == 130
    assert run("perplexity", llama, "--output", parts, "--samples", 3, *more) == 0
    assert len(calls) == 4
    assert samples(whole) == samples(parts)
    assert results(whole, "perplexity") == results(parts, "perplexity")
