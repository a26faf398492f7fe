# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers, as Megatron uses them: with the special tokens that they add by themselves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...config import ConfigError
from .options import require

KINDS = "a Hugging Face folder, a .gguf file or a sentencepiece .model"


@dataclass(frozen=True)
class Tokenizer:
    """
    Attributes:
        encode: text to token ids.
        eod: id of the end-of-document token.
        vocab_size: ids are below it.
    """

    encode: Callable[[str], list[int]]
    eod: int
    vocab_size: int

    @property
    def dtype(self) -> type[np.number]:
        """Of the ids in Megatron's dataset: that of its ``DType.optimal_dtype``."""
        return np.uint16 if self.vocab_size < 65500 else np.int32


def load(path: Path, eod: str | None) -> Tokenizer:
    """The tokenizer at ``path``, with the end-of-document token ``eod`` or, if None, its own.

    Raises:
        ConfigError: it cannot be read, or has no such token.
    """
    if not os.path.exists(path):  # unlike Path's, False for a name that is too long
        raise ConfigError(f"--tokenizer is {path}, which does not exist: give {KINDS}")
    if path.suffix == ".model":
        found = _sentencepiece(path, eod)
    elif path.is_dir():
        found = _hugging_face(path, path, {}, eod)
    elif path.suffix == ".gguf":
        require("gguf")
        found = _hugging_face(path, path.parent, {"gguf_file": path.name}, eod)
    elif path.name in ("tokenizer.json", "tokenizer_config.json"):
        found = _hugging_face(path, path.parent, {}, eod)
    else:
        raise ConfigError(f"--tokenizer is {path}: give {KINDS}")
    if not 0 <= found.eod < found.vocab_size <= np.iinfo(np.int32).max:
        raise ConfigError(
            f"--tokenizer is {path}, with {found.vocab_size} tokens and {found.eod} at the end of documents: "
            "ids have to fit into 32 bits, and below the number of tokens"
        )
    return found


def _sentencepiece(path: Path, eod: str | None) -> Tokenizer:
    require("sentencepiece")
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:
        raise ConfigError(
            f"--tokenizer is {path}, which sentencepiece cannot read: {error}"
        ) from None
    if eod is None:
        number = model.eos_id()
        if number < 0:
            raise _without_eod(path)
    else:
        number = model.piece_to_id(eod)
        if model.id_to_piece(number) != eod:
            raise _unknown_eod(path, eod)
    return Tokenizer(model.encode, number, model.get_piece_size())


def _hugging_face(path: Path, folder: Path, how: dict, eod: str | None) -> Tokenizer:
    require("transformers")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **how)
        size = len(tokenizer)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"--tokenizer is {path}, which transformers cannot read: {type(error).__name__}: {line}"
        ) from None
    if eod is None:
        number = tokenizer.eos_token_id
        if number is None:
            raise _without_eod(path)
    else:
        number = tokenizer.get_vocab().get(eod)
        if number is None:
            raise _unknown_eod(path, eod)
    # Without verbose, it warns of texts that are longer than some model's positions.
    return Tokenizer(lambda text: tokenizer(text, verbose=False)["input_ids"], number, size)


def _without_eod(path: Path) -> ConfigError:
    return ConfigError(
        f"--tokenizer is {path}, which has no end-of-document token (eos_token), and documents in a sample "
        "could not be told apart: name one of its tokens with --eod"
    )


def _unknown_eod(path: Path, eod: str) -> ConfigError:
    return ConfigError(
        f"--eod is {eod}, which is not a token of --tokenizer ({path}): name one that is"
    )


def fingerprint(path: Path) -> str:
    """Of the files that make the tokenizer: another one has another."""
    digest = hashlib.sha256()
    if path.is_file() and path.suffix in (".model", ".gguf"):
        about = path.stat()
        digest.update(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}".encode())
        return digest.hexdigest()
    folder = path if path.is_dir() else path.parent
    for file in sorted(folder.iterdir()):
        named = file.suffix in (".json", ".model", ".txt", ".tiktoken", ".py")
        # Not lists of a model's weights or of data, which may be large.
        if named and file.is_file() and not file.name.endswith(".index.json"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
