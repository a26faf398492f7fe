# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers: of Hugging Face folders, GGUF files and sentencepiece models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..requirements import require
from .pretrained import LOCAL, reason

KINDS = "a Hugging Face folder, a .gguf file or a sentencepiece .model"
TRANSFORMERS_KINDS = "a Hugging Face folder or a .gguf file"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that adds the special tokens it adds by itself, as in Megatron.

    Attributes:
        encode: text to token ids.
        vocab_size: ids are below it.
        eos: id of the end-of-sequence token, or None if it has none.
        id_of: id of a token by its text, or None if it is not in the vocabulary.
    """

    encode: Callable[[str], list[int]]
    vocab_size: int
    eos: int | None
    id_of: Callable[[str], int | None]


def open_tokenizer(path: Path, extra: str = "inspect") -> Tokenizer:
    """The tokenizer of ``--tokenizer PATH``.

    Args:
        extra: the extra of megatron-mtraining that a missing package is named with.

    Raises:
        ConfigError: it does not exist or cannot be read, or a package is missing.
    """
    if path.suffix != ".model" or not path.is_file():
        return of_transformers(open_transformers_tokenizer(path, extra, KINDS))
    require("sentencepiece", extra=extra)
    try:
        return _sentencepiece(path)
    except Exception as error:
        raise ConfigError(
            f"--tokenizer is {path}, which sentencepiece cannot read: {reason(error)}"
        ) from None


def open_transformers_tokenizer(
    path: Path, extra: str = "inspect", kinds: str = TRANSFORMERS_KINDS
):
    """The tokenizer of ``--tokenizer PATH`` as transformers opens it: of a folder or a .gguf file.

    Args, Raises: as for :func:`open_tokenizer`. ``kinds`` are those that messages name.
    """
    if not path.exists():
        raise ConfigError(f"--tokenizer is {path}, which does not exist: give {kinds}")
    gguf = path.suffix == ".gguf" and path.is_file()
    if not (gguf or path.is_dir() or path.name in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(f"--tokenizer is {path}: give {kinds}")
    require("transformers", *(["gguf"] if gguf else []), extra=extra)
    more = {"gguf_file": path.name} if gguf else {}
    try:
        return transformers_tokenizer(path if path.is_dir() else path.parent, **more)
    except Exception as error:
        raise ConfigError(
            f"--tokenizer is {path}, which transformers cannot read: {reason(error)}"
        ) from None


def transformers_tokenizer(folder: Path, **more):
    """transformers' tokenizer of a folder; raises what transformers raises.

    Args:
        more: arguments of ``AutoTokenizer.from_pretrained``, such as ``gguf_file``.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **LOCAL, **more)


def of_transformers(tokenizer) -> Tokenizer:
    """A tokenizer of transformers."""
    # If verbose, it warns about texts longer than the model's positions.
    return Tokenizer(
        encode=lambda text: tokenizer(text, verbose=False)["input_ids"],
        vocab_size=len(tokenizer),
        eos=tokenizer.eos_token_id,
        id_of=lambda token: tokenizer.get_vocab().get(token),
    )


def _sentencepiece(path: Path) -> Tokenizer:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def id_of(token: str) -> int | None:
        found = model.piece_to_id(token)  # an unknown piece has the id of the unknown token
        return found if model.id_to_piece(found) == token else None

    eos = model.eos_id()
    return Tokenizer(model.encode, model.get_piece_size(), eos if eos >= 0 else None, id_of)
