# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/real_operands.py on the CPU: operands are the model's own, a row a layer and setting."""

import json

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.model import real_operands, texts
from tests.support.inspect_cases import save_model

SEQ = 512


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    text = folder / "book.txt"
    text.write_text("".join(f"Line {number}: {number**3 % 101}\n" for number in range(2000)))
    return [
        "--model", str(save_model(folder / "model")), "--no-code", "--text", f"book={text}",
        "--device", "cpu", "--tokens", "20000", "--cache", str(folder / "tokens.npz"), "--text-kind", "book",
        "--seq", str(SEQ), "--layers", "1", "--block-size", "64",
    ]  # fmt: skip


def test_a_row_for_each_setting(words, tmp_path):
    rows = tmp_path / "rows.jsonl"
    real_operands.main([*words, "--settings", "0.31", "0:3", "--output", str(rows)])
    sparse, dense = (json.loads(line) for line in rows.read_text().splitlines())
    assert (sparse["layer"], sparse["text"], sparse["seq"]) == (1, "book", SEQ)
    assert sparse["price"] == 0.31 and sparse["backward_density"] == sparse["density"] <= 1
    assert dense["density"] == 1 > dense["backward_density"] > 0
    assert dense["dense_forward_ms"] == sparse["dense_forward_ms"] > 0
    assert dense["fa4_forward_ms"] is None, "only on a GPU"


def test_operands_are_of_the_model(words):
    options = real_operands.options_from([*words, "--layers", "0"])
    [(query, key, value, grad)] = real_operands.operands_of(options).values()
    assert query.shape == grad.shape and key.shape == value.shape
    tokens = torch.from_numpy(texts.read(options)["book"][-SEQ:].astype("int64"))
    first = (tokens == tokens[-1]).nonzero()[:, 0]
    assert len(first) > 1, "a token that comes again"
    # The first layer's values know neither position nor context.
    torch.testing.assert_close(value[first], value[-1:].expand(len(first), -1, -1, -1))


def test_a_short_text_is_refused(words):
    with pytest.raises(SystemExit, match="book has .* tokens: give 1048576 or more"):
        real_operands.main([*words, "--seq", "1048576"])
