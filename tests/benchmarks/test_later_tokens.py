# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/later_tokens.py on the CPU: another future, and what it changes in a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.model import later_tokens
from tests.support.inspect_cases import save_model

SEQ, BLOCK = 1024, 64


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("later")
    text = folder / "book.txt"
    text.write_text("".join(f"Line {number}: {number**3 % 101}\n" for number in range(4000)))
    return [
        "--model", str(save_model(folder / "model")), "--no-code", "--text", f"book={text}",
        "--device", "cpu", "--tokens", "120000", "--cache", str(folder / "tokens.npz"), "--kinds", "book",
        "--seq", str(SEQ), "--block-size", str(BLOCK), "--held-out", "2", "--needles", "1", "--jobs", "1",
        "--lr", "1e-3", "--warm-up", "1", "--steps", "1", "--curve",
    ]  # fmt: skip


def test_what_is_replaced_comes_after_what_counts():
    windows = torch.arange(2 * (SEQ + 1)).view(2, -1)
    for pairs in (
        later_tokens.cuts(windows, windows.roll(1, 0), BLOCK),
        later_tokens.copies(windows, windows.roll(1, 0), BLOCK, 9),
    ):
        for own, other, tokens in pairs:
            same = own == other
            assert same[: tokens.stop + 1].all() and not same[tokens.stop + 1 :].any()
    for own, _, tokens in later_tokens.copies(windows, windows, BLOCK, 9):
        block = own[tokens.start : tokens.start + BLOCK]
        source = int((own == block[0]).nonzero()[0])
        assert torch.equal(block, own[source : source + BLOCK])
        assert 2 * BLOCK <= tokens.start - source <= later_tokens.FARTHEST * BLOCK


@pytest.mark.slow
def test_rows(words, tmp_path, monkeypatch):
    monkeypatch.setattr(later_tokens, "CUTS", 2)
    monkeypatch.setattr(later_tokens, "COPIES", 2)
    output = tmp_path / "rows.jsonl"
    runs = ["--run", "dense", "moba@0.5", "moba_previous@0.5"]
    for _ in range(2):  # the second time there is nothing left
        later_tokens.main([*words, *runs, "--output", str(output), "--frontier", str(output)])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["policy"] for row in rows] == ["dense", "moba", "moba_previous"]
    dense, ahead, previous = (
        {each["tokens"]: each["difference"] for each in row["measured"]} for row in rows
    )
    assert list(dense) == ["32 before the cut", "all before the cut", "copies"]
    for causal in (dense, previous):
        assert list(causal.values()) == pytest.approx([0, 0, 0], abs=1e-5)
    assert max(map(abs, ahead.values())) > 1e-5
    assert rows[1]["setting"]["block_lookahead"] and "block_lookahead" not in rows[2]["setting"]
