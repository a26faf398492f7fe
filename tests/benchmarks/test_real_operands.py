# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/real_operands.py on the CPU: operands are the model's own."""

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


def test_operands_are_of_the_model(words):
    options = real_operands.options_from([*words, "--layers", "0"])
    [(query, key, value, grad)] = real_operands.operands_of(options).values()
    assert query.shape == grad.shape and key.shape == value.shape
    tokens = torch.from_numpy(texts.read(options)["book"][-SEQ:].astype("int64"))
    first = (tokens == tokens[-1]).nonzero()[:, 0]
    assert len(first) > 1, "a token that comes again"
    # The first layer's values know neither position nor context.
    torch.testing.assert_close(value[first], value[-1:].expand(len(first), -1, -1, -1))
