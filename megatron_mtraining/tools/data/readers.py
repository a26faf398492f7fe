# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Documents of a part of the input, one at a time."""

from __future__ import annotations

import gzip
import json
import operator
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ...config import ConfigError
from .inputs import Part, compression, shard_entry

TEXT, IDS, STRETCHES = "text", "input_ids", "indices"
"""Fields that are looked for; the last two as ProLong's packed sets have them."""
NOT_TEXT = object()
"""In place of the document of a file that is not UTF-8, found in a folder."""
CODES = {16: "uint16", 33: "int32", 32: "uint32", 65: "int64", 64: "uint64"}
"""Types of arrays in Mosaic data shards, as their first byte gives them."""


@dataclass(frozen=True)
class Place:
    """Where a document is. As a string it is for people, and takes reading a jsonl file up to there.

    Attributes:
        number: counted from 0 in the file; lines from 1, in the part.
        document: of those in a packed record.
    """

    part: Part
    file: str
    number: int
    document: int | None = None

    def __str__(self) -> str:
        within = "" if self.document is None else f", document {self.document}"
        if self.part.kind == "text":
            return self.file
        if self.part.kind == "jsonl":
            return f"{self.file}, line {_lines_before(self.file, self.part.start) + self.number}{within}"
        what = {"parquet": "row", "mds": "sample"}[self.part.kind]
        return f"{self.file}, {what} {self.number}{within}"


def read(part: Part, field: str | None, stretches: bool) -> Iterator[tuple[Place, object]]:
    """A document's place, and the document: a string, token ids ``[n]`` or :data:`NOT_TEXT`.

    Args:
        field: see :attr:`~megatron_mtraining.tools.data.options.Options.text_field`.
        stretches: packed token ids are taken apart into their documents, if the record says where they
            are.

    Raises:
        ConfigError: a file cannot be read, or a record is broken.
    """
    if part.kind == "text":
        yield from _texts(part)
        return
    records = {"jsonl": _lines, "parquet": _rows, "mds": _samples}[part.kind]
    for where, record in records(part, field):
        content = _content(where, record, field)
        if stretches and not isinstance(content, str) and record.get(STRETCHES) is not None:
            for number, ids in enumerate(_taken_apart(where, content, record[STRETCHES])):
                yield replace(where, document=number), ids
        else:
            yield where, content


def _content(where: Place | str, record: Mapping, field: str | None):
    names = [TEXT, IDS] if field is None else [field]
    present = [name for name in names if name in record]
    if not present:
        raise ConfigError(
            f"{where} has no {' or '.join(names)}: it has {', '.join(record) or 'no fields'}; name one with "
            "--text-field"
        )
    value = record[present[0]]
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    ids = None
    if isinstance(value, list | np.ndarray):
        try:
            ids = np.asarray(value) if len(value) else np.empty(0, np.int64)
        except (TypeError, ValueError):
            pass
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"{where} has {present[0]} of type {type(value).__name__}: text or a list of token ids is "
            "supported"
        )
    return ids


def _taken_apart(where: Place, ids: np.ndarray, stretches) -> Iterator[np.ndarray]:
    try:
        # Not int(), which takes fractions, and fails in a way of its own for infinity.
        bounds = [(operator.index(start), operator.index(stop)) for start, stop in stretches]
    except (TypeError, ValueError):
        bounds = [(-1, -1)]
    ends = [0, *(stop for _, stop in bounds)]
    if [start for start, _ in bounds] != ends[:-1] or sorted(ends) != ends or ends[-1] != len(ids):
        raise ConfigError(
            f"{where} has {STRETCHES} that do not divide its {len(ids)} tokens into one stretch after the "
            "other"
        )
    for start, stop in bounds:
        yield ids[start:stop]


@contextmanager
def _readable(name: str):
    """Errors of reading a file, as one line of ours that names it."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{name} cannot be decompressed: {error}") from None


def _texts(part: Part) -> Iterator[tuple[Place, object]]:
    for folder, files in groupby(zip(part.files, part.joined), key=lambda file: file[1]):
        texts = []
        for name, _ in files:
            text = _text(name, part.named)
            if text is NOT_TEXT or not folder:
                yield Place(part, name, 0), text
            else:
                texts.append(text if text.endswith("\n") else text + "\n")
        if texts:
            yield Place(part, folder, 0), "".join(texts)


def _text(name: str, named: bool):
    with _readable(name):
        data = Path(name).read_bytes()
    problem = None
    try:
        text = data.decode("utf-8")
        if "\0" in text:  # it is UTF-8, but in no text
            problem = f"it has a zero byte, the first at {text.index(chr(0))}"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start}"
    if problem and named:
        raise ConfigError(f"{name} is not UTF-8 text ({problem}): convert it, or leave it out")
    return NOT_TEXT if problem else text


def _lines(part: Part, field: str | None) -> Iterator[tuple[Place, Mapping]]:
    (name,) = part.files
    with _readable(name), _opened(name) as file:
        position = part.start
        if position:
            # The line that the byte before is in belongs to the part before.
            file.seek(position - 1)
            position += len(file.readline()) - 1
        count = 0
        while part.stop < 0 or position < part.stop:
            line = file.readline()
            if not line:
                break
            position += len(line)
            count += 1
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                problem = None if isinstance(record, dict) else "is not a JSON object"
            except (ValueError, RecursionError) as error:
                problem = f"is not JSON ({error})"
            if problem:
                raise ConfigError(f"{Place(part, name, count)} {problem}: mend it or leave it out")
            yield Place(part, name, count), record


def _lines_before(name: str, start: int) -> int:
    """Lines of a file before the first that begins at byte ``start`` or later."""
    if not start:
        return 0
    count, left = 0, start - 1
    with open(name, "rb") as file:
        while left and (data := file.read(min(left, 2**20))):
            count += data.count(b"\n")
            left -= len(data)
        return count + bool(file.readline())


def _opened(name: str):
    kind = compression(name)
    if kind == ".gz":
        return gzip.open(name, "rb")
    if kind == ".zst":
        return _zstd(name)
    return open(name, "rb")


@contextmanager
def _zstd(name: str):
    import io

    import zstandard

    try:
        with open(name, "rb") as file:
            # Several frames, as parallel compressors write them.
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            with io.BufferedReader(reader, 2**20) as lines:
                yield lines
    except zstandard.ZstdError as error:
        raise ConfigError(f"{name} cannot be decompressed: {error}") from None


def _rows(part: Part, field: str | None) -> Iterator[tuple[Place, Mapping]]:
    from pyarrow import parquet

    (name,) = part.files
    try:
        with parquet.ParquetFile(name) as file:
            names = file.schema_arrow.names
            wanted = [field] if field is not None else [TEXT] if TEXT in names else [IDS]
            if wanted[0] not in names:
                _content(name, dict.fromkeys(names), field)  # which says so
            wanted += [STRETCHES] if wanted[0] != TEXT and STRETCHES in names else []
            groups = range(part.start, part.stop)
            before = [file.metadata.row_group(group).num_rows for group in range(part.start)]
            row = sum(before)
            # A row at a time may be a book: few of them at once.
            for batch in file.iter_batches(batch_size=16, row_groups=groups, columns=wanted):
                columns = [_values(batch.column(column)) for column in wanted]
                for values in zip(*columns):
                    yield Place(part, name, row), dict(zip(wanted, values))
                    row += 1
    except (ConfigError, GeneratorExit):
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{name}, which pyarrow cannot read: {line}") from None


def _values(column) -> Iterator:
    """Strings as strings, lists of numbers as arrays."""
    import pyarrow

    for value in column:
        # Of a struct, `values` is a function.
        inner = value.values if isinstance(value, pyarrow.ListScalar) else None
        if inner is None or not value.is_valid:
            yield value.as_py()
        elif hasattr(inner, "values"):  # a list of lists
            yield value.as_py()
        else:
            yield inner.to_numpy(zero_copy_only=False)


def _samples(part: Part, field: str | None) -> Iterator[tuple[Place, Mapping]]:
    """Samples of a Mosaic data shard: a count, where each begins, a description, and the samples, in each of
    which the sizes of columns of varying size come before all columns."""
    (name,) = part.files
    entry = shard_entry(Path(name))
    wanted = {TEXT, IDS, STRETCHES} if field is None else {field, STRETCHES}
    columns = list(zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"]))
    with _readable(name):
        data = np.memmap(name, np.uint8, "r")
        try:
            (count,) = data[:4].view("<u4").tolist()
            bounds = data[4 : 4 * (count + 2)].view("<u4").tolist()
            if count != entry["samples"] or bounds[-1] != len(data) or sorted(bounds) != bounds:
                raise ValueError("its samples are not where it says")
            for number, (start, stop) in enumerate(zip(bounds, bounds[1:])):
                where = Place(part, name, number)
                yield where, _decoded(where, data[start:stop].tobytes(), columns, wanted)
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise ConfigError(f"{name} is broken: {error}") from None


def _decoded(where: Place, sample: bytes, columns: list, wanted: set) -> dict:
    varying = [size is None for _, _, size in columns]
    at = 4 * sum(varying)
    sizes = iter(np.frombuffer(sample, "<u4", sum(varying)).tolist())
    record = {}
    for column, encoding, size in columns:
        size = next(sizes) if size is None else size
        value = sample[at : at + size]
        at += size
        if column not in wanted:
            record[column] = None
        elif encoding == "str":
            record[column] = value.decode("utf-8")
        elif encoding.split(":")[0] == "ndarray":
            record[column] = _array(value, *encoding.split(":")[1:])
        else:
            raise ConfigError(
                f"{where} has {column} encoded as {encoding}: str and arrays of whole numbers are supported"
            )
    if at != len(sample):
        raise ValueError(f"{where} has {len(sample)} bytes, but its columns take {at}")
    return record


def _array(data: bytes, dtype: str | None = None, shape: str | None = None) -> np.ndarray:
    """An array whose type and shape come first, where the encoding does not give them."""
    if dtype is None:
        dtype, data = CODES.get(data[0]), data[1:]
    if dtype not in CODES.values():
        raise ValueError("it has an array of other than whole numbers of 16 bits and more")
    if shape is None:
        axes, width = data[0] >> 2, 1 << (data[0] & 3)
        sizes = np.frombuffer(data, f"<u{width}", axes, 1).tolist()
        data = data[1 + axes * width :]
    else:
        sizes = [int(size) for size in shape.split(",")]
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(sizes)
