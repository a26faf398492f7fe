# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Tokens of each kind of text, and the documents of packed samples cut from them.

    python -m benchmarks.model.texts --model MODEL.gguf --text book=book.txt ... --cache tokens.npz

writes the tokens to a file, which the scripts that run a model take with ``--cache``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining.errors import ConfigError
from megatron_mtraining.models.tokenizer import open_tokenizer

from ..lib import record
from . import sets

HELD_OUT = 0.03
"""The last share of each text, which no sample of training is cut from."""
CHARACTERS_PER_TOKEN = 6
"""Text that is encoded at first for each token that is needed."""


class Texts:
    """Streams of tokens, from which documents are cut one after the other, again from the start at the end.

    Args:
        tokens: by kind, ``[n]``.
        held_out: take the last ``share`` of each, or else what is before it.
        seed: where each stream begins.
    """

    def __init__(
        self,
        tokens: dict[str, np.ndarray],
        held_out: bool = False,
        seed: int = 0,
        share: float = HELD_OUT,
    ):
        rng = np.random.default_rng(seed)
        self.streams, self._at = {}, {}
        for kind, all_of in tokens.items():
            first = int(len(all_of) * (1 - share))
            stream = all_of[first:] if held_out else all_of[:first]
            if not len(stream):
                raise ConfigError(f"text {kind} has {len(all_of)} tokens: give more text")
            self.streams[kind] = stream
            self._at[kind] = 0 if held_out else int(rng.integers(len(stream)))

    def cut(self, kind: str, count: int) -> np.ndarray:
        """The next ``count`` tokens of a kind."""
        stream, at = self.streams[kind], self._at[kind]
        self._at[kind] = (at + count) % len(stream)
        return stream[np.arange(at, at + count) % len(stream)]

    def sample(self, dataset: int, documents: np.ndarray) -> Tensor:
        """A packed sample: int64 ``[s]``."""
        kind = sets.KINDS[dataset]
        parts = [self.cut(kind, int(length)) for length in documents]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def read(options) -> dict[str, np.ndarray]:
    """Tokens by kind: of ``--cache`` if it is there, else of ``--text`` and Python's standard library (or
    ``--text code=FILE`` in its place); then ``--cache`` is written."""
    if options.cache is not None and options.cache.exists():
        with np.load(options.cache, allow_pickle=False) as found:
            return {kind: found[kind] for kind in found.files}
    files, encode = dict(options.text), open_tokenizer(options.model).encode
    kinds = (["code"] if options.code and "code" not in files else []) + list(files)
    unknown = [kind for kind in kinds if kind not in sets.KINDS]
    if unknown or not kinds:
        raise ConfigError(f"--text has kinds {unknown}: use some of {', '.join(sets.KINDS)}")
    found = {}
    for kind in kinds:
        share = dict(zip(sets.KINDS, sets.SHARES))[kind]
        count = round(options.tokens * share)
        ids = encode(read_text(kind, files, count * CHARACTERS_PER_TOKEN))[:count]
        found[kind] = np.array(ids, np.int32 if max(ids) >= 2**16 else np.uint16)
        print(f"{kind}: {len(ids)} tokens", flush=True)
    if options.cache is not None:
        np.savez_compressed(options.cache, **found)
    return found


def fingerprint(options) -> str | None:
    """Names the tokens of ``options.kinds``, so that losses on other text are not compared; None without a
    file of tokens."""
    if options.cache is None or not options.cache.exists():
        return None
    return _fingerprint(options.cache, options.cache.stat().st_mtime_ns, tuple(options.kinds))


@functools.cache
def _fingerprint(cache: Path, _changed: int, kinds: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    with np.load(cache, allow_pickle=False) as found:
        for kind in sorted({*kinds} & {*found.files}):
            digest.update(f"{kind} {len(found[kind])} ".encode())
            digest.update(found[kind].astype("<u4").tobytes())
    return digest.hexdigest()[:12]


def code_files() -> list[Path]:
    """Python's standard library, tests left out, in order of names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
    return [file for file in sorted(root.rglob("*.py")) if not skip & set(file.parts)]


def read_text(kind: str, files: dict[str, Path], most: int) -> str:
    """Up to ``most`` characters of a kind of text."""
    parts, length = [], 0
    for file in [files[kind]] if kind in files else code_files():
        parts.append(file.read_text(encoding="utf-8", errors="ignore"))
        length += len(parts[-1])
        if length >= most:
            break
    return "".join(parts)[:most]


def named_file(word: str) -> tuple[str, Path]:
    """``KIND=FILE``."""
    kind, equals, file = word.partition("=")
    if not equals or not kind or not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{word!r} is no KIND=FILE of a file that is there")
    return kind, Path(file)


def add_options(parser: argparse.ArgumentParser, needs_model: bool = True) -> None:
    """Options of all scripts that run a model over texts."""
    add = parser.add_argument
    add("--model", type=Path, required=needs_model, help="a GGUF file or a Hugging Face folder")
    add("--text", type=named_file, nargs="+", default=[], metavar="KIND=FILE")
    add("--no-code", dest="code", action="store_false", help="without Python's standard library")
    add("--tokens", type=int, default=4_000_000, help="that are read of all texts, at most")
    add("--cache", type=Path, help="a file of the texts' tokens; made if it is not there")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def main(words: list[str] | None = None) -> None:
    parser = record.parser(__doc__)
    add_options(parser)
    try:
        read(parser.parse_args(words))
    except ConfigError as error:
        sys.exit(f"texts.py: {error}")


if __name__ == "__main__":
    main()
