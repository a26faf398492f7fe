# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/frontier.py, ablations.py, backward.py: settings, losses, and rows that are compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.lib.policies_at_density import at_density
from benchmarks.model import (
    ablations,
    backward,
    continuing,
    frontier,
    frontier_settings,
    real_operands,
    texts,
)
from benchmarks.model.material import material, training
from tests.support.frontier_cases import train_row
from tests.support.inspect_cases import save_model

SEQ = 512


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model, texts of two kinds, and sizes for a CPU."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder / "model")
    (folder / "book.txt").write_text(Path(json.__file__).read_text() * 4)
    (folder / "code.txt").write_text(Path(np.__file__).read_text()[:40000])
    return [
        "--model", str(model), "--device", "cpu", "--cache", str(folder / "tokens.npz"), "--tokens", "100000",
        "--text", f"book={folder / 'book.txt'}", f"code={folder / 'code.txt'}", "--kinds", "code", "book",
        "--seq", str(SEQ), "--block-size", "64", "--held-out", "2", "--needles", "2", "--jobs", "1",
    ]  # fmt: skip


def test_the_setting_at_a_density():
    asked = []

    def density_of(setting):
        asked.append(setting)
        return min(1.0, 0.03 + 0.04 / setting["price"])

    known = {}
    found = at_density("price", 0.15, 16384, 128, density_of, known)
    assert abs(found.density / 0.15 - 1) <= 0.04 and found.is_near(0.15) and not found.is_near(0.3)
    # What was tried is not measured again.
    before = len(asked)
    assert at_density("price", 0.15, 16384, 128, density_of, known) == found
    assert len(asked) == before
    # There is no such density, and a row says so.
    assert not at_density("price", 0.02, 16384, 128, density_of, known).is_near(0.02)


def test_learning_rates_decay_to_a_tenth():
    for decay, rates in {
        "constant": {0: 1, 0.5: 1, 1: 1},
        "cosine": {0: 1, 0.5: 0.55, 1: 0.1},
        "0.8-1": {0: 1, 0.8: 1, 0.9: 0.55, 1: 0.1},
    }.items():
        found = {share: continuing.decayed(decay, share) for share in rates}
        assert found == pytest.approx(rates), decay


def test_a_run_is_compared_with_the_dense_one_of_its_decay(words, tmp_path):
    output = tmp_path / "runs.jsonl"
    options = frontier.options_from(["train", *words, "--decay", "cosine", "--output", str(output)])
    row = train_row("dense", None, 1, 2.0, 2.0) | frontier_settings.about(options)
    row |= dict(lr=options.lr)
    output.write_text(json.dumps(row) + "\n")
    options.frontier = output
    assert frontier_settings.dense_run(options, 1) is None
    options.decay = "constant"
    assert frontier_settings.dense_run(options, 1) == row


def test_an_ablation_needs_its_dense_run(words, tmp_path):
    more = ["--frontier", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit, match=r"no dense run of 300 steps with seeds \[1\]"):
        ablations.main(["train", *words, *more])


def test_needles_and_training_texts(words):
    options = frontier.options_from(["zero", *words])
    given = material(options)
    for needle, answer in zip(given.needles, given.answers):
        tokens = needle.tolist()
        inside, end = tokens[:-answer], tokens[-answer:]
        assert any(inside[at : at + answer] == end for at in range(len(inside)))
    first, again, other = (training(given.tokens, 6, seed, options) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_loss_is_the_model_s_own(words):
    options = frontier.options_from(["zero", *words])
    model, _ = continuing.load(options)
    tokens = material(options).held_out["code"][0]
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, tokens[1:]).item()
    book = torch.stack([tokens, tokens.flip(0)])
    found = continuing.judged(model, {"code": tokens[None], "book": book})
    assert found["code"] == pytest.approx(expected, abs=1e-5)
    assert found["all"] == pytest.approx((found["code"] + 2 * found["book"]) / 3, abs=1e-5)


def test_dense_steps():
    assert [step for step in range(20) if ablations.is_dense("last", 0.1, step, 20)] == [18, 19]
    assert [step for step in range(20) if ablations.is_dense("every", 10, step, 20)] == [9, 19]


def test_errors_of_gradients():
    exact = {"qkv": torch.tensor([3.0, 0.0]), "rest": torch.tensor([0.0, 4.0])}
    row = backward.compared({**exact, "rest": torch.tensor([0.0, 2.0])}, exact)
    assert row["err_qkv"] == 0 and row["cos_rest"] == 1 and row["norm_rest"] == 0.5
    assert row["err_grad"] == pytest.approx(2 / 5)


def test_operands_are_of_the_model(words):
    more = [*words[: words.index("--kinds")], "--seq", str(SEQ), "--layers", "0"]
    options = real_operands.options_from(more)
    [(query, key, value, grad)] = real_operands.operands_of(options).values()
    assert query.shape == grad.shape and key.shape == value.shape
    tokens = torch.from_numpy(texts.read(options)["code"][-SEQ:].astype("int64"))
    first = (tokens == tokens[-1]).nonzero()[:, 0]
    assert len(first) > 1, "a token that comes again"
    # The first layer's values know neither position nor context.
    torch.testing.assert_close(value[first], value[-1:].expand(len(first), -1, -1, -1))
    file = Path(words[words.index("--cache") + 1]).with_name("operands")
    real_operands.main([*more, "--keep", str(file)])
    [(name, kept)] = torch.load(file).items()
    assert name.endswith("code layer 0") and torch.equal(kept[0], query)
