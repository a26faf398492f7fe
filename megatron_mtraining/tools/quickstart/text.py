# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Text that every machine has: the sources of Python's standard library, as tokens."""

from __future__ import annotations

import hashlib
import io
import sysconfig
from pathlib import Path

import numpy as np

from ...errors import ConfigError

VOCABULARY = 2048
TOKENIZER_CHARACTERS = 2_000_000
"""Text that the tokenizer is trained on: a few seconds."""
HELD_OUT_PERCENT, HELD_OUT_SEQUENCES = 10, 4


def write_sequences(folder: Path, count: int, seq_length: int) -> None:
    """Tokenize text into ``train.npy`` and ``held_out.npy`` in ``folder``, int32 ``[n, s + 1]``."""
    files, held_out = split(source_files())
    print(
        f"Text: {len(files) + len(held_out)} files of Python's standard library; training a "
        f"tokenizer with {VOCABULARY} entries on them",
        flush=True,
    )
    tokenizer = train_tokenizer(files, VOCABULARY, folder / "tokenizer")
    sequences = tokenize(files, tokenizer, count, seq_length)
    # Consecutive sequences come from the same file: shuffle them.
    np.random.default_rng(0).shuffle(sequences)
    np.save(folder / "train.npy", sequences)
    sequences = tokenize(held_out, tokenizer, HELD_OUT_SEQUENCES, seq_length)
    np.save(folder / "held_out.npy", sequences)


def source_files() -> list[Path]:
    """The standard library's Python files, shuffled in the same order on each run.

    Raises:
        ConfigError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    if not files:
        raise ConfigError(f"no Python sources under {root}: use a Python that has its library")
    return sorted(
        files,
        key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest(),
    )


def split(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training files and held-out files."""
    count = max(1, len(files) * HELD_OUT_PERCENT // 100)
    return files[count:], files[:count]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def train_tokenizer(files: list[Path], vocab_size: int, prefix: Path) -> Path:
    """Train a sentencepiece BPE model on the head of ``files``; returns the model file's path."""
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
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",  # in code, indentation and case have a meaning
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=False,
        user_defined_symbols=["\n"],  # lines are trained on one by one, so it cannot learn this one
        num_threads=2,
        minloglevel=2,
    )
    path = prefix.with_suffix(".model")
    path.write_bytes(model.getvalue())
    return path


def tokenize(files: list[Path], tokenizer: Path, count: int, seq_length: int) -> np.ndarray:
    """Cut the concatenated files into ``count`` sequences.

    Returns:
        int32 ``[count, seq_length + 1]``: inputs and, one token later, labels.

    Raises:
        ConfigError: the files hold fewer tokens.
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
        raise ConfigError(
            f"{count} sequences of {seq_length} tokens need {needed} tokens, and this Python's "
            f"standard library has {len(tokens)}: lower --steps or --seq-length"
        )
    stream = np.asarray(tokens[:needed], dtype=np.int32)
    starts = np.arange(count)[:, None] * seq_length
    return stream[starts + np.arange(seq_length + 1)]
