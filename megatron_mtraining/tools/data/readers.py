# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Documents of a part of the input, one at a time.

Formats are decoded by their libraries: Python's json, gzip, bz2 and lzma, backports.zstd (Python's own
compression.zstd before 3.14), pyarrow for Parquet and mosaicml-streaming for MDS. Here is which field a
document is in, and the errors, which name file and record.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import operator
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ...requirements import first_line
from . import shards
from .inputs import File, Part, compression
from .options import DOCUMENT_BYTES

TEXT, IDS, STRETCHES = "text", "input_ids", "indices"
"""Fields that are looked for; the last two are those of ProLong's packed datasets."""
NOT_TEXT = object()
"""In place of the document of a file that is not UTF-8, found in a folder."""
RECORD = {"jsonl": "line", "parquet": "row", "mds": "sample"}
CHUNK = 2**20


@dataclass(frozen=True)
class Place:
    """Where a document is. Turning it into text may read a jsonl file up to there, to count lines.

    Attributes:
        number: of the record in the file, from 0; of the line in the part, from 1.
        document: of those in a packed record.
    """

    part: Part
    file: str
    number: int
    document: int | None = None

    def __str__(self) -> str:
        if self.part.kind == "text":
            return self.file
        number = self.number
        if self.part.kind == "jsonl":
            number += _lines_before(self.file, self.part.start)
        within = "" if self.document is None else f", document {self.document}"
        return f"{self.file}, {RECORD[self.part.kind]} {number}{within}"


def read(
    part: Part, field: str | None, stretches: bool, limit: int = DOCUMENT_BYTES
) -> Iterator[tuple[Place, object]]:
    """The documents of a part with their places: strings, token ids ``[n]`` or :data:`NOT_TEXT`.

    Args:
        field: that documents are in; None for ``text``, or ``input_ids`` where there is no text.
        limit: bytes of a document; a longer one is refused.
        stretches: take packed token ids apart into their documents, where the record has their bounds.

    Raises:
        ConfigError: a file cannot be read, or a record is broken.
    """
    if part.kind == "text":
        yield from _texts(part, limit)
        return
    for place, record in READERS[part.kind](part, field):
        content = _content(place, record, field)
        # No more than 4 bytes a character: short ones need not be encoded to know.
        if isinstance(content, str) and 4 * len(content) > limit:
            _check_size(place, len(content.encode("utf-8", "surrogatepass")), limit)
        if stretches and not isinstance(content, str) and record.get(STRETCHES) is not None:
            for number, ids in enumerate(_taken_apart(place, content, record[STRETCHES])):
                yield replace(place, document=number), ids
        else:
            yield place, content


def _content(place: Place | str, record: Mapping, field: str | None) -> str | np.ndarray:
    names = [TEXT, IDS] if field is None else [field]
    name = next((name for name in names if name in record), None)
    if name is None:
        raise ConfigError(
            f"{place} has no {' or '.join(names)}: it has {', '.join(record) or 'no fields'}; name one with "
            "--text-field"
        )
    value = record[name]
    if value is None or isinstance(value, str):
        return value or ""
    try:
        # numpy would take true and false among numbers for 1 and 0, and 0 numbers for floats.
        plain = isinstance(value, list) and bool not in set(map(type, value))
        ids = np.asarray(value if plain or isinstance(value, np.ndarray) else "")
        ids = ids if len(ids) else np.empty(0, np.int64)
    except (TypeError, ValueError):
        ids = np.empty(())
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"{place} has {name} of type {type(value).__name__}: text or a list of token ids is supported"
        )
    return ids


def _taken_apart(place: Place, ids: np.ndarray, stretches) -> Iterator[np.ndarray]:
    try:
        # Not int(), which takes fractions, and fails in a way of its own for infinity.
        bounds = [(operator.index(start), operator.index(stop)) for start, stop in stretches]
    except (TypeError, ValueError):
        bounds = [(-1, -1)]
    ends = [0, *(stop for _, stop in bounds)]
    if [start for start, _ in bounds] != ends[:-1] or sorted(ends) != ends or ends[-1] != len(ids):
        raise ConfigError(
            f"{place} has {STRETCHES} that do not divide its {len(ids)} tokens into one stretch after the "
            "other"
        )
    for start, stop in bounds:
        yield ids[start:stop]


@contextmanager
def _named(name: str, library: str):
    """Errors of reading a file, as one line that names it."""
    try:
        yield
    except (ConfigError, GeneratorExit):
        raise
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        raise ConfigError(f"{name}, which {library} cannot read: {first_line(error)}") from None


def _texts(part: Part, limit: int) -> Iterator[tuple[Place, object]]:
    for folder, files in groupby(part.files, key=lambda file: file.joined):
        texts, size = [], 0
        for file in files:
            text = _text(file, limit)
            if text is NOT_TEXT or not folder:
                yield Place(part, file.path, 0), text
            else:
                texts.append(text if text.endswith("\n") else text + "\n")
                size += len(texts[-1].encode())
                _check_size(f"INPUT {folder}, with --join a document,", size, limit)
        if texts:
            yield Place(part, folder, 0), "".join(texts)


def _text(file: File, limit: int):
    name = file.path
    with _named(name, "Python"), open(name, "rb") as opened:
        data = opened.read(limit + 1)
    whole = len(data) <= limit  # else the last character may be cut
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
        at = data.find(0)  # a zero byte is UTF-8, but in no text
    except UnicodeDecodeError as error:
        at = error.start
    if at < 0:
        _check_size(name, len(data), limit)
        return text
    if file.named:
        raise ConfigError(f"{name} is not UTF-8 text (byte {at}): convert it, or leave it out")
    return NOT_TEXT


def _lines(part: Part, field: str | None) -> Iterator[tuple[Place, Mapping]]:
    name = part.files[0].path
    with _opened(name) as file:
        position = part.start
        if position:
            # The line that the byte before is in belongs to the part before.
            file.seek(position - 1)
            position += _skip_line(file) - 1
        count = 0
        while part.stop < 0 or position < part.stop:
            line = file.readline()
            if not line:
                break
            position += len(line)
            count += 1
            if line.strip():
                place = Place(part, name, count)
                yield place, _json_object(place, line)


def _json_object(place: Place, line: bytes) -> dict:
    try:
        record = json.loads(line)
        problem = None if isinstance(record, dict) else "is not a JSON object"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON ({error})"
    if problem:
        raise ConfigError(f"{place} {problem}: correct it or leave it out")
    return record


def _skip_line(file) -> int:
    """Read up to the end of a line, of any length; returns how many bytes that were."""
    count = 0
    while piece := file.readline(CHUNK):
        count += len(piece)
        if piece.endswith(b"\n"):
            break
    return count


def _lines_before(name: str, start: int) -> int:
    """Lines of a file before the first that begins at byte ``start`` or later."""
    if not start:
        return 0
    count, left = 0, start - 1
    with open(name, "rb") as file:
        while left and (data := file.read(min(left, CHUNK))):
            count += data.count(b"\n")
            left -= len(data)
        return count + bool(_skip_line(file))


@contextmanager
def _opened(name: str):
    """A file of lines, decompressed. A file that ends too early, or goes on with other data, is an error."""
    with _named(name, "Python"), open(name, "rb") as raw:
        suffix = compression(name)
        try:
            yield _decompressed(raw, suffix) if suffix else raw
        except (ConfigError, GeneratorExit):
            raise
        except Exception as error:
            if not suffix or getattr(error, "errno", None):
                raise
            raise ConfigError(
                f"{name} cannot be decompressed: {error} (read up to byte {raw.tell()} of "
                f"{Path(name).stat().st_size})"
            ) from None


def _decompressed(raw, suffix: str):
    if suffix == ".zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        return zstd.open(raw)
    if suffix == ".gz":
        return gzip.open(raw)
    streams = _Streams(raw, bz2.BZ2Decompressor if suffix == ".bz2" else lzma.LZMADecompressor)
    return io.BufferedReader(streams, CHUNK)


class _Streams(io.RawIOBase):
    """Compressed streams one after the other, all of them.

    ``bz2.open`` and ``lzma.open`` take what follows a whole stream and does not begin as another one for the
    end of the file: a damaged stream would be left out in silence, with all after it.
    """

    def __init__(self, raw, decompressor):
        self._pieces, self._piece = _decompressed_pieces(raw, decompressor), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        piece = self._piece or next(self._pieces, b"")
        count = min(len(piece), len(buffer))
        buffer[:count], self._piece = piece[:count], piece[count:]
        return count


def _decompressed_pieces(raw, decompressor) -> Iterator[bytes]:
    padding = b"\0" if decompressor is lzma.LZMADecompressor else b""
    data = raw.read(CHUNK)
    while data:
        stream = decompressor()
        while not stream.eof:
            if stream.needs_input and not data:
                data = raw.read(CHUNK)
                if not data:
                    raise EOFError("it ends before the end of a stream")
            if piece := stream.decompress(data, CHUNK):
                yield piece
            data = b""
        data = stream.unused_data.lstrip(padding)
        while not data and (more := raw.read(CHUNK)):
            data = more.lstrip(padding)


def _check_size(what: Place | str, size: int, limit: int) -> None:
    """Refuse a document that takes too much memory to tokenize."""
    if size > limit:
        raise ConfigError(
            f"{what} is longer than --document-bytes ({limit}): divide it, leave it out, or raise the limit, "
            "if each of the --workers may take about 150 times as many bytes of memory"
        )


def _rows(part: Part, field: str | None) -> Iterator[tuple[Place, Mapping]]:
    from pyarrow import parquet

    name = part.files[0].path
    # Of pages that have a checksum: else a damaged one may be read as other text.
    checked = {"page_checksum_verification": True}
    with _named(name, "pyarrow"), parquet.ParquetFile(name, **checked) as file:
        names = file.schema_arrow.names
        wanted = [field] if field is not None else [TEXT] if TEXT in names else [IDS]
        if wanted[0] not in names:
            _content(name, dict.fromkeys(names), field)  # which says so
        wanted += [STRETCHES] if wanted[0] != TEXT and STRETCHES in names else []
        row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        groups = range(part.start, part.stop)
        # A row may be a book: few of them at a time.
        for batch in file.iter_batches(batch_size=16, row_groups=groups, columns=wanted):
            for values in zip(*(map(_value, batch.column(column)) for column in wanted)):
                yield Place(part, name, row), dict(zip(wanted, values))
                row += 1


def _value(scalar):
    """A value of a column: lists of numbers as arrays, for they may be long."""
    import pyarrow

    flat = isinstance(scalar, pyarrow.ListScalar) and scalar.is_valid
    if flat and not pyarrow.types.is_nested(scalar.type.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _samples(part: Part, field: str | None) -> Iterator[tuple[Place, Mapping]]:
    from streaming.base.format import reader_from_json

    name = part.files[0].path
    path = Path(name)
    entry = shards.entry(path)
    wanted = {TEXT, IDS, STRETCHES} if field is None else {field, STRETCHES}
    columns = zip(entry["column_names"], entry["column_encodings"])
    # Others stay as they are: decoding may be slow, or, of a pickle, run code.
    entry["column_encodings"] = [code if column in wanted else "bytes" for column, code in columns]
    with _named(name, "mosaicml-streaming"):
        reader = reader_from_json(str(path.parent), None, entry)
        reader.validate(allow_unsafe_types=False)
        with open(name, "rb") as file:
            count, *ends = np.fromfile(file, "<u4", reader.samples + 2).tolist()
        if count != reader.samples or ends[-1] != path.stat().st_size or ends != sorted(ends):
            raise ConfigError(f"{name} is broken: its samples are not where index.json says")
        for number in range(count):
            place = Place(part, name, number)
            with _named(str(place), "mosaicml-streaming"):
                record = reader[number]
            yield place, {key: record[key] if key in wanted else None for key in record}


READERS = {"jsonl": _lines, "parquet": _rows, "mds": _samples}
