# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Real text that every machine has: the sources of Python's standard library, as tokens."""

from __future__ import annotations

import hashlib
import io
import sysconfig
from pathlib import Path

import numpy as np

TOKENIZER_CHARACTERS = 2_000_000  # of text the tokenizer is trained on: a few seconds
HELD_OUT_PERCENT = 10


class TextError(RuntimeError):
    """There is not enough text on this machine."""


def source_files() -> list[Path]:
    """The standard library's Python files in an order that looks random, the same on each run.

    Raises:
        TextError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    if not files:
        raise TextError(f"no Python sources under {root}: use a Python that has its library")
    return sorted(files, key=lambda path: _digest(path.relative_to(root)))


def split(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files; a file is wholly on one side."""
    count = max(1, len(files) * HELD_OUT_PERCENT // 100)
    return files[count:], files[:count]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def train_tokenizer(files: list[Path], vocab_size: int, prefix: Path) -> Path:
    """Train a sentencepiece BPE model on the head of ``files``; returns the model file's path.

    Raises:
        TextError: the text does not give that many pieces.
    """
    import sentencepiece

    lines: list[str] = []
    size = 0
    for path in files:
        text = read(path)
        size += len(text)
        lines += [line for line in text.split("\n") if 0 < len(line) < 1000]
        if size >= TOKENIZER_CHARACTERS:
            break
    model = io.BytesIO()
    trainer = dict(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",  # code: indentation and case are meaning
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        user_defined_symbols=["\n"],  # training sees single lines, so it cannot learn this one
        num_threads=2,
        minloglevel=2,
    )
    try:
        sentencepiece.SentencePieceTrainer.train(**trainer)
    except RuntimeError as error:
        raise TextError(
            f"--vocab-size is {vocab_size}: no tokenizer of that size can be trained on Python's "
            f"standard library ({str(error).strip().splitlines()[-1]}); use a smaller one"
        ) from None
    path = prefix.with_suffix(".model")
    path.write_bytes(model.getvalue())
    return path


def tokenize(files: list[Path], tokenizer: Path, count: int, seq_length: int) -> np.ndarray:
    """``count`` sequences of real text, files one after the other.

    Returns:
        int32 ``[count, seq_length + 1]``: inputs and, one token later, labels.

    Raises:
        TextError: the files hold fewer tokens.
    """
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    needed = count * seq_length + 1
    tokens: list[int] = []
    for path in files:
        tokens += [processor.bos_id(), *processor.encode(read(path)), processor.eos_id()]
        if len(tokens) >= needed:
            break
    if len(tokens) < needed:
        raise TextError(
            f"{count} sequences of {seq_length} tokens need {needed} tokens, and this Python's "
            f"standard library gives {len(tokens)}: lower --steps, --batch or --seq-length"
        )
    stream = np.asarray(tokens[:needed], dtype=np.int32)
    starts = np.arange(count)[:, None] * seq_length
    return stream[starts + np.arange(seq_length + 1)]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode()).hexdigest()
