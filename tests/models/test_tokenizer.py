# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One opener for tokenizers of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mtraining import ConfigError, requirements
from megatron_mtraining.models.tokenizer import open_tokenizer
from tests.support.inspect_cases import byte_tokenizer


def sentencepiece_model(path: Path) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for line in Path(__file__).read_text().splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path.with_suffix("")), vocab_size=120,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return path


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_a_folder_and_its_files_are_the_same_tokenizer(name, tmp_path):
    pytest.importorskip("transformers")
    tmp_path /= name
    expected = byte_tokenizer()
    expected.add_special_tokens({"eos_token": "<end>"})
    expected.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"):
        found = open_tokenizer(path)
        assert found.encode("def f(): pass") == expected("def f(): pass").input_ids
        assert (found.vocab_size, found.eos) == (257, 256)
        assert found.id_of("<end>") == 256 and found.id_of("<start>") is None


def test_a_sentencepiece_model(tmp_path):
    import sentencepiece

    path = sentencepiece_model(tmp_path / "a.model")
    expected = sentencepiece.SentencePieceProcessor(model_file=str(path))
    found = open_tokenizer(path)
    assert found.encode("def open") == expected.encode("def open")
    assert (found.vocab_size, found.eos) == (expected.get_piece_size(), expected.eos_id())
    assert found.id_of("</s>") == found.eos and found.id_of("nothing like it") is None


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("missing", None, "does not exist: give a Hugging Face folder"),
        ("a.txt", "", "give a Hugging Face folder"),
        ("a.model", "no model", "which sentencepiece cannot read"),
        ("tokenizer.json", "{", "which transformers cannot read"),
    ],
    ids=["missing", "other-kind", "broken-sentencepiece", "broken-json"],
)
def test_what_cannot_be_opened_is_named(name, content, named, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--tokenizer is .*" + named):
        open_tokenizer(path)


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"transformers not installed: pip install 'transformers"):
        open_tokenizer(tmp_path, extra="data")
