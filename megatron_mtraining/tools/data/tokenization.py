# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Token ids of the parts of the input, in this process or in several."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ...files import lone_surrogate
from ...models.tokenizer import Tokenizer, open_tokenizer
from ...requirements import first_line
from .inputs import Part
from .options import Options
from .readers import NOT_TEXT, Place, read
from .store import Parts

VERSION = 5
"""Of what is kept of parts: that of another one is not used."""
NAMED = 10
"""Files left out that a part's counts name."""


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and its end-of-document token."""

    tokenizer: Tokenizer
    eod: int

    @property
    def dtype(self) -> type[np.number]:
        """Of the ids in Megatron's dataset: that of its ``DType.optimal_dtype``."""
        return np.uint16 if self.tokenizer.vocab_size < 65500 else np.int32

    def encode(self, place: Place, content: str | np.ndarray) -> np.ndarray:
        """Token ids ``[n]`` of a document, which may have them already."""
        ids = content
        if isinstance(content, str):
            try:
                ids = np.array(self.tokenizer.encode(content), np.int64)
            except MemoryError:
                raise ConfigError(
                    f"{place} takes more memory to tokenize than there is: lower --document-bytes"
                ) from None
            except Exception as error:
                why = str(error) if isinstance(error, ConfigError) else first_line(error)
                if half := lone_surrogate(content):
                    why = f"{half}: correct it or leave it out"
                raise ConfigError(f"{place} cannot be tokenized: {why}") from None
        size = self.tokenizer.vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ConfigError(
                f"{place} has the token id {wrong}, but --tokenizer has {size} tokens: give the one that "
                "the ids are of"
            )
        return ids.astype(self.dtype)


def open_encoder(path: Path, eod: str | None) -> Encoder:
    """The tokenizer at ``path``, with the end-of-document token ``eod`` or, if None, its end of sequence.

    Raises:
        ConfigError: it cannot be read, or has no such token.
    """
    tokenizer = open_tokenizer(path, extra="data")
    number = tokenizer.eos if eod is None else tokenizer.id_of(eod)
    if number is None and eod is None:
        raise ConfigError(
            f"--tokenizer is {path}, which has no end-of-document token (eos_token), and documents in a "
            "sample could not be told apart: name one of its tokens with --eod"
        )
    if number is None:
        raise ConfigError(
            f"--eod is {eod}, which is not a token of --tokenizer ({path}): name one that is"
        )
    if not 0 <= number < tokenizer.vocab_size <= np.iinfo(np.int32).max:
        raise ConfigError(
            f"--tokenizer is {path}, with {tokenizer.vocab_size} tokens and {number} at the end of "
            "documents: ids have to fit into 32 bits, and below the number of tokens"
        )
    return Encoder(tokenizer, number)


def keys(options: Options, inputs: list[Part], encoder: Encoder) -> list[str]:
    """Names of the parts, see :class:`~megatron_mtraining.tools.data.store.Parts`."""
    shared = (
        VERSION,
        options.text_field,
        options.pack == "as-is",
        _fingerprint(options.tokenizer),
        encoder.eod,
        encoder.tokenizer.vocab_size,
    )
    # A name may have bytes that are not UTF-8.
    described = (repr((shared, part)).encode("utf-8", "surrogateescape") for part in inputs)
    return [hashlib.sha256(one).hexdigest()[:32] for one in described]


def _fingerprint(path: Path) -> str:
    """A hash of the files that make a tokenizer."""
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
            try:
                digest.update(os.fsencode(file.name) + b"\0" + file.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"--tokenizer is {path}, whose {file.name} cannot be read: {error.strerror}"
                ) from None
    return digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """What a worker process needs to know: how, what, and where to."""

    options: Options
    inputs: list[Part]
    parts: Parts

    def run(self, encoder: Encoder, number: int) -> dict:
        """Write the token ids of part ``number``, and return what was counted in it.

        Raises:
            ConfigError: the input is broken.
        """
        counts = {"empty": 0, "with_eod": 0, "skipped": 0, "skipped_names": []}
        counts |= {"shortest": None, "longest": None}
        documents = _documents(self.options, encoder, self.inputs[number], counts)
        self.parts.save(number, documents, counts)
        return counts


def _check_unchanged(part: Part) -> None:
    """Refuse files that are being written: what was read of them is neither the old content nor the new."""
    for file in part.files:
        try:
            now = os.stat(file.path)
        except OSError as error:
            raise ConfigError(f"{file.path} cannot be read: {error.strerror}") from None
        if (now.st_size, now.st_mtime_ns) != (file.size, file.changed):
            raise ConfigError(
                f"INPUT has {file.path}, which changed while it was read ({file.size} bytes, now "
                f"{now.st_size}): run the same command again when it is complete"
            )


def _read(options: Options, part: Part) -> Iterator[tuple[Place, object]]:
    """The documents of a part whose files are as they were when they were found."""
    apart = options.pack != "as-is"
    try:
        yield from read(part, options.text_field, apart, options.document_bytes)
    except ConfigError:
        _check_unchanged(part)  # which explains the error
        raise
    _check_unchanged(part)


def _documents(
    options: Options, encoder: Encoder, part: Part, counts: dict
) -> Iterator[np.ndarray]:
    """Token ids of the documents that are not empty, without an end-of-document token at the end, which
    packing sets; token for token with --pack as-is."""
    for place, content in _read(options, part):
        if content is NOT_TEXT:
            counts["skipped"] += 1
            if len(counts["skipped_names"]) < NAMED:
                counts["skipped_names"].append(place.file)
            continue
        ids = encoder.encode(place, content)
        if options.pack != "as-is" and len(ids) and ids[-1] == encoder.eod:
            ids = ids[:-1]
        if not len(ids) or (isinstance(content, str) and not content.strip()):
            counts["empty"] += 1
            continue
        counts["with_eod"] += bool((ids[:-1] == encoder.eod).any())
        where = [len(ids), place.file, place.number, place.document]
        if counts["shortest"] is None or len(ids) < counts["shortest"][0]:
            counts["shortest"] = where
        if counts["longest"] is None or len(ids) > counts["longest"][0]:
            counts["longest"] = where
        yield ids
