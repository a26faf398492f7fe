# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval perplexity``: the model's own loss, by position; LongPPL is the package's."""

from __future__ import annotations

import math
import random
from argparse import Namespace

import pytest
import torch

from tests.support.eval_cases import (
    QUIET,
    SPARSE,
    refused,
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


@pytest.fixture
def looked_at(monkeypatch):
    """The tokens that longppl has the model run over."""
    from megatron_mtraining.tools.eval import perplexity

    found, hidden = [], perplexity.Losses.hidden

    def recorded(self, ids):
        found.append(ids.tolist())
        return hidden(self, ids)

    monkeypatch.setattr(perplexity.Losses, "hidden", recorded)
    return found


def test_longppl_of_a_window_that_ends_inside_a_character(llama, tmp_path, looked_at):
    """Its tokens are the window's; its text, which has the whole character, has more."""
    from megatron_mtraining.tools.eval.perplexity import key_intervals, windows_of

    own, file = tokenizer(), tmp_path / "text.txt"
    file.write_text("天地玄黄宇宙洪荒日月盈昃辰宿列张。" * 60, encoding="utf-8")
    [window] = windows_of(Namespace(text=(file,), samples=1), own, 128)
    encoded = own(window.text)["input_ids"]
    assert len(encoded) == 129  # of which longppl would look at the last alone
    key_intervals(model_of(llama), None, window, 64)
    assert looked_at[0] == window.ids.tolist() == encoded[:-1]
    assert [len(ids) for ids in looked_at] == [128, 80, 80, 80, 80]


@pytest.mark.parametrize("evaluator", [False, True])
def test_longppl_of_lengths_that_leave_a_single_token(evaluator, llama, words, looked_at):
    """The last token is left out: longppl would fail."""
    from megatron_mtraining.tools.eval.perplexity import key_intervals, windows_of

    own, model = tokenizer(), model_of(llama)
    for length, last in ((129, 80), (130, 66), (65, None)):
        [window] = windows_of(Namespace(text=(words,), samples=1), own, length)
        looked_at.clear()
        key_intervals(model, own if evaluator else None, window, 64)
        left = length if length == 130 else length - 1
        assert looked_at[0] == window.ids.tolist()[:left]
        assert (len(looked_at[-1]) if len(looked_at) > 1 else None) == last


def test_losses_that_are_not_finite_are_refused(tmp_path, words, capsys):
    """Such as those of fp16: nothing is kept of them, and no key tokens are looked for in them."""
    folder = save_model(tmp_path / "model")
    model = model_of(folder)
    model.model.norm.weight.data.fill_(math.inf)
    model.save_pretrained(folder)
    more = ("--attention", "dense", "--samples", 1, "--output", tmp_path / "out", *QUIET)
    text = ("perplexity", folder, "--text", words, "--lengths", 256, *more)
    advice = ["not finite in float32", "--dtype float32"]
    refused(capsys, ["the losses of window 0 (perplexity 256 dense)", *advice], *text)
    refused(capsys, ["the hidden states of the model", *advice], *text, "--longppl", 64)
    needle = ("needle", folder, "--lengths", 384, "--depths", 1, *more)
    refused(capsys, ["the logits of sample 0 (needle-384 dense)", *advice], *needle)
    assert not (tmp_path / "out").exists()


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
