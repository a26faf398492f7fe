# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The tokens that a model runs over: from text, arrays of token ids, or Megatron's indexed datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..files import decoded, read_bytes
from ..requirements import first_line, require
from .tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""Text that is encoded at first for each token; more is encoded where this does not give enough."""


def read_text(paths: list[Path]) -> str:
    """The files' text, concatenated.

    Raises:
        ConfigError: a file cannot be read, is not UTF-8, or all are empty.
    """
    parts = []
    for path in paths:
        try:
            content = read_bytes(path, f"--text is {path}, which")
            parts.append(decoded(content))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--text is {path}, which is not UTF-8 text (byte {error.start}): give a text file, or token "
                "ids as a .npy file"
            ) from None
    text = "".join(parts)
    if not text.strip():
        raise ConfigError(f"--text is {_names(paths)}, which has no text in it")
    return text


def read_tokens(path: Path) -> np.ndarray:
    """Token ids from a .npy file of whole numbers, whatever its shape: int64 ``[n]``."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever Python's own parser says of a header, too
        raise ConfigError(
            f"--text is {path}, which numpy cannot read: {first_line(error)}"
        ) from None
    if not isinstance(ids, np.ndarray):
        ids.close()
        raise ConfigError(
            f"--text is {path}, an archive of arrays (.npz): save the token ids alone, with numpy.save"
        )
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"--text is {path}, an array of {ids.dtype}: token ids are whole numbers")
    return ids.reshape(-1)


def read_indexed_dataset(path: Path, count: int) -> np.ndarray:
    """The first tokens of Megatron's indexed dataset (.bin, with .idx beside it): int64 ``[n]``.

    Raises:
        ConfigError: it cannot be read.
    """
    require("megatron.core", extra="inspect")
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise ConfigError(f"--text is {path}, an indexed dataset without {index.name} beside it")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    parts, length = [np.empty(0, np.int64)], 0
    try:
        documents = IndexedDataset(str(path.with_suffix("")))
        for number in range(len(documents)):
            parts.append(np.asarray(documents[number], dtype=np.int64))
            length += len(parts[-1])
            if length >= count:
                break
    except Exception as error:
        raise ConfigError(
            f"--text is {path}, which Megatron-Core cannot read: {first_line(error)}"
        ) from None
    return np.concatenate(parts)[:count]


def tokens_for(
    paths: list[Path],
    seq_length: int | None,
    positions: int,
    block_size: int,
    tokenizer: Callable[[], Tokenizer],
    extend: str,
    name: str = "MODEL",
) -> Tensor:
    """The tokens to run over: int64 ``[s]``, a multiple of the block size.

    Args:
        seq_length: the number of tokens, or None for as many as the text and the model have.
        positions: of the model.
        tokenizer: opens the tokenizer; called only if the text is not token ids.
        extend: what the user can do if the model has too few positions.
        name: what the command line calls the model.

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
                f"--seq is {seq_length}, and {name} has {positions} positions: use at most that, or {extend}"
            )
    wanted = positions if seq_length is None else seq_length
    what = "tokens"
    if len(paths) == 1 and paths[0].suffix == ".npy":
        ids = read_tokens(paths[0])[:wanted]
    elif len(paths) == 1 and paths[0].suffix == ".bin":
        ids = read_indexed_dataset(paths[0], wanted)
    else:
        ids = _encode(read_text(paths), wanted, tokenizer().encode)
        what = "tokens by this model's tokenizer"
    tokens = torch.from_numpy(np.array(ids, dtype=np.int64))
    whole = len(tokens) // block_size * block_size
    if seq_length is None:
        seq_length = min(whole, positions // block_size * block_size)
        if not seq_length:
            raise ConfigError(
                f"--text is {_names(paths)}, which has {len(tokens)} {what}, fewer than a block of "
                f"{block_size}: give more text"
            )
    elif seq_length > len(tokens):
        raise ConfigError(
            f"--seq is {seq_length}, but --text ({_names(paths)}) has {len(tokens)} {what}: give more text"
            + (f", or --seq {whole}" if whole else "")
        )
    return tokens[:seq_length]


def _encode(text: str, count: int, encode: Callable[[str], list[int]]) -> list[int]:
    """The first ``count`` tokens of a text, or all if it has fewer, without encoding much more."""
    length = count * CHARACTERS_PER_TOKEN
    while True:
        ids = encode(text[:length])
        # The last tokens before the cut differ from the tokens of the whole text.
        if len(ids) >= count + 64 or length >= len(text):
            return ids[:count] if len(ids) > count else ids
        length *= 2


def _names(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
