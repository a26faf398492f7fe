# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The header of a GGUF file, checked against the file's size before gguf reads it.

gguf takes lengths as they are: an array of 2^40 entries in a small file keeps it busy for days.
"""

from __future__ import annotations

import struct
from pathlib import Path

from ..errors import ConfigError
from ..files import size_of
from .model_sizes import check_size

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""struct's letters of GGUF's types of values."""
STRING, ARRAY = 8, 9
MOST_DIMS = 8
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
"""Values that transformers makes a model's sizes of, by what follows the architecture's name."""


class _Bad(Exception):
    """What is wrong with the header."""


def check_header(path: Path, label: str) -> None:
    """Raise :class:`ConfigError` unless the header fits the file, and the model's sizes are possible ones.

    Args:
        label: names the file, for messages.
    """
    size = size_of(path, "a GGUF file is needed")
    try:
        with path.open("rb") as file:
            values = _Header(file, size).read()
    except OSError as error:
        raise ConfigError(f"{label}, which cannot be read: {error.strerror}") from None
    except _Bad as error:
        raise ConfigError(f"{label}, which is damaged or not a GGUF file: {error}") from None
    for key, value in values.items():
        field = SIZES.get(key.partition(".")[2])
        if field is not None and value != 0:  # 0 experts, or heads that arrays give by layer
            check_size(field, value, f"{label}, whose {key}")


class _Header:
    """Reads a header, and each length only if the rest of the file can have as much."""

    def __init__(self, file, size: int):
        self.file, self.left, self.order = file, size, "<"

    def read(self) -> dict[str, object]:
        """The values that are single numbers, by their keys."""
        if (magic := self._bytes(4)) != b"GGUF":
            raise _Bad(f"it begins with {magic!r}")
        version = self._number("I")
        if version & 0xFFFF == 0:  # written in the other byte order
            self.order, version = ">", version >> 24
        if version not in (2, 3):
            raise _Bad(f"its version is {version}; 2 and 3 are supported")
        tensors, values = self._number("Q"), self._number("Q")
        found = {}
        self._fits(values, 13, "values")
        for _ in range(values):
            key = self._string().decode("utf-8", errors="replace")
            kind = self._number("I")
            value = self._value(kind, key)
            if value is not None:
                found[key] = value
        self._fits(tensors, 24, "tensors")
        for _ in range(tensors):
            name = self._string().decode("utf-8", errors="replace")
            dims = self._number("I")
            if dims > MOST_DIMS:
                raise _Bad(f"its tensor {name[:80]} has {dims} dimensions")
            total = 1
            for _ in range(dims):
                total *= self._number("Q")
            if total >= 1 << 62:
                raise _Bad(f"its tensor {name[:80]} has {total} elements")
            self._bytes(12)  # type and offset
        return found

    def _value(self, kind: int, key: str, depth: int = 0) -> object:
        """A number; None for texts and arrays, which are passed over."""
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            self._string()
        elif kind == ARRAY and depth < 4:
            of, count = self._number("I"), self._number("Q")
            if of in SCALARS:
                size = struct.calcsize(SCALARS[of])
                self._fits(count, size, f"entries in {key[:80]}")
                self._skip(count * size)
                return None
            self._fits(count, 8 if of == STRING else 12, f"entries in {key[:80]}")
            for _ in range(count):
                self._value(of, key, depth + 1)
        else:
            raise _Bad(f"{key[:80]} is of the unknown type {kind}")
        return None

    def _fits(self, count: int, size: int, what: str) -> None:
        if count * size > self.left:
            raise _Bad(f"it says that it has {count} {what}, in {self.left} bytes")

    def _string(self) -> bytes:
        length = self._number("Q")
        self._fits(length, 1, "bytes in a text")
        return self._bytes(length)

    def _number(self, letter: str):
        data = self._bytes(struct.calcsize(letter))
        return struct.unpack(self.order + letter, data)[0]

    def _bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise _Bad("it is cut off in its header")
        self.left -= count
        return data

    def _skip(self, count: int) -> None:
        self.file.seek(count, 1)
        self.left -= count
