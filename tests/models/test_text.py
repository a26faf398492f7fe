# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tokens to run over: whole blocks of a text or of token ids, and texts that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.models.text import read_text, tokens_for
from megatron_mtraining.models.tokenizer import Tokenizer


def tokenizer_of(encode):
    return lambda: Tokenizer(encode, 256, None, lambda token: None)


characters = tokenizer_of(lambda words: [ord(c) % 256 for c in words])


def tokens(path, seq=None, positions=1024, tokenizer=characters):
    return tokens_for([path], seq, positions, 128, tokenizer, "--yarn")


def test_line_breaks(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"a\r\nb\rc\n")
    assert read_text([tmp_path / "t.txt"]) == "a\nb\nc\n"


def test_tokens_are_whole_blocks_of_the_text(tmp_path):
    path = tmp_path / "text"
    path.write_text("ab" * 300)
    assert tokens(path).shape == (512,) and tokens(path).dtype == torch.int64
    assert tokens(path, seq=256).tolist() == [97, 98] * 128
    assert tokens(path, positions=300).shape == (256,)
    seen = []

    def ten_characters_each(words):
        seen.append(len(words))
        return [1] * (len(words) // 10)

    path.write_text("ab" * 100_000)
    assert tokens(path, seq=1024, tokenizer=tokenizer_of(ten_characters_each)).shape == (1024,)
    assert seen == [8192, 16384]  # not all of it
    np.save(tmp_path / "ids.npy", np.arange(600, dtype=np.uint16).reshape(2, 300))
    assert tokens(tmp_path / "ids.npy", tokenizer=None).tolist() == list(range(512))


def test_texts_that_do_not_fit(tmp_path):
    path = tmp_path / "text"
    path.write_text("a" * 300)
    for seq, words in {
        384: ["--seq is 384", "300 tokens", "--seq 256"],
        200: ["--seq is 200", "128"],
        2048: ["--seq is 2048", "1024 positions", "--yarn"],
    }.items():
        with pytest.raises(ConfigError) as refused:
            tokens(path, seq=seq)
        assert all(word in str(refused.value) for word in words), refused.value
    path.write_text("a" * 100)
    with pytest.raises(ConfigError, match="has 100 tokens"):
        tokens(path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="no text in it"):
        tokens(path)
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        tokens(path)
    np.save(tmp_path / "ids.npy", np.ones(600))
    with pytest.raises(ConfigError, match="float64"):
        tokens(tmp_path / "ids.npy")
    (tmp_path / "bad.npy").write_text("no array")
    with pytest.raises(ConfigError, match="numpy cannot read"):
        tokens(tmp_path / "bad.npy")
