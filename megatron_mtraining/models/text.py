# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The tokens that a model is run over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ..config import ConfigError

CHARACTERS_A_TOKEN = 8
"""Of text that is read at first; more is read where this does not give enough tokens."""


def read_text(paths: list[Path]) -> str:
    """The files' text, one after the other.

    Raises:
        ConfigError: a file cannot be read, is not UTF-8, or all are empty.
    """
    parts = []
    for path in paths:
        try:
            parts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--text is {path}, which is not UTF-8 text (byte {error.start}): give a text file, or token "
                "ids as a .npy file"
            ) from None
        except OSError as error:
            raise ConfigError(f"--text is {path}, which cannot be read: {error.strerror}") from None
    text = "".join(parts)
    if not text.strip():
        raise ConfigError(f"--text is {_names(paths)}, which has no text in it")
    return text


def read_tokens(path: Path) -> np.ndarray:
    """Token ids from a .npy file of whole numbers, whatever its shape: int64 ``[n]``."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(f"--text is {path}, which numpy cannot read: {error}") from None
    if not isinstance(ids, np.ndarray):
        ids.close()
        raise ConfigError(
            f"--text is {path}, an archive of arrays (.npz): save the token ids alone, with numpy.save"
        )
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"--text is {path}, an array of {ids.dtype}: token ids are whole numbers")
    return ids.reshape(-1)


def tokens_for(
    paths: list[Path],
    seq_length: int | None,
    positions: int,
    block_size: int,
    tokenizer: Callable[[], Callable[[str], list[int]]],
    extend: str,
) -> Tensor:
    """The tokens to run over: int64 ``[s]``, a whole number of blocks.

    Args:
        seq_length: so many, or None for as many as text and model have.
        positions: of the model.
        tokenizer: gives the tokenizer; called only if the text is not token ids.
        extend: what helps where the model has too few positions.

    Raises:
        ConfigError: the text is too short, or the model has too few positions.
    """
    if seq_length is not None:
        if seq_length % block_size:
            near = max(block_size, seq_length // block_size * block_size)
            raise ConfigError(
                f"--seq is {seq_length}, which is not a multiple of the block size, {block_size}: use {near}"
            )
        if seq_length > positions:
            raise ConfigError(
                f"--seq is {seq_length}, and MODEL has {positions} positions: use at most that, or {extend}"
            )
    wanted = positions if seq_length is None else seq_length
    if paths[0].suffix == ".npy" and len(paths) == 1:
        ids = read_tokens(paths[0])[:wanted]
        what = "tokens"
    elif paths[0].suffix == ".bin" and len(paths) == 1:
        from .megatron_checkpoint import indexed_tokens

        ids, what = indexed_tokens(paths[0], wanted), "tokens"
    else:
        ids = _encode(read_text(paths), wanted, tokenizer())
        what = "tokens by this model's tokenizer"
    tokens = torch.from_numpy(np.array(ids, dtype=np.int64))
    if seq_length is None:
        seq_length = min(len(tokens), positions) // block_size * block_size
        if not seq_length:
            raise ConfigError(
                f"--text is {_names(paths)}, which has {len(tokens)} {what}, fewer than a block of "
                f"{block_size}: give more text"
            )
    elif seq_length > len(tokens):
        fit = len(tokens) // block_size * block_size
        raise ConfigError(
            f"--seq is {seq_length}, but --text ({_names(paths)}) has {len(tokens)} {what}: give more text"
            + (f", or --seq {fit}" if fit else "")
        )
    return tokens[:seq_length]


def _encode(text: str, count: int, encode: Callable[[str], list[int]]) -> list[int]:
    """The first tokens of a text, at least ``count`` if there are so many, without encoding much more."""
    length = count * CHARACTERS_A_TOKEN
    while True:
        ids = encode(text[:length])
        # Where the text is cut, the last tokens are not those of the whole.
        if len(ids) >= count + 64 or length >= len(text):
            return ids[:count] if len(ids) > count else ids
        length *= 2


def _names(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
