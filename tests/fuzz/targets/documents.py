# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Files of documents, as ``mtraining data prepare`` reads them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .common import Fault, Refused, command, folder_of_this_process


@cache
def tokenizer() -> Path:
    """A sentencepiece model: quick to open."""
    import sentencepiece

    root = folder_of_this_process()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(DOCUMENTS), model_prefix=str(root / "tokens"), vocab_size=30,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return root / "tokens.model"


DOCUMENTS = [chr(97 + n % 5) * (1 + n % 7) + " é" * (n % 3) for n in range(60)]


def _prepare(data: bytes, place: Path, name: str, count: Callable[[Path], int | None]) -> None:
    """Prepare a file; the documents read and left out as empty must be those that ``count`` finds in another
    way, which gives None for a broken file."""
    file, out = place / name, place / "out"
    file.write_bytes(data)
    expected = count(file)
    words = [
        "data",
        "prepare",
        file,
        "--tokenizer",
        tokenizer(),
        "--seq-length",
        "16",
        "--workers",
        "1",
    ]
    try:
        command([*words, "--output", out], place / "out.bin", named="")
    except Refused as refusal:
        message = str(refusal)
        if (place / "out.idx").exists() or (place / "out.json").exists():
            raise Fault(f"a part of a dataset was left after {message}") from None
        if name not in message and "--seq-length" not in message:
            raise Fault(f"the file is not named: {message}") from None
        if expected is None and "--seq-length" in message:
            raise Fault(f"a broken file was read to its end: {message}") from None
        if expected is None and ".jsonl" in name:
            if not any(each in message for each in (", line ", "byte ", "is empty")):
                raise Fault(f"no place is named: {message}") from None
        raise
    documents = json.loads((place / "out.json").read_text())["documents"]
    found = documents["read"] + documents["empty"]
    if found != expected:
        raise Fault(f"{found} documents were read, but there are {expected}")


def _lines_in(content: bytes) -> int | None:
    """JSON objects in lines; None if a line is something else, or has no document."""
    count = 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or not {"text", "input_ids"} & record.keys():
            return None
        value = record["text"] if "text" in record else record["input_ids"]
        if not (value is None or isinstance(value, (str, list))):
            return None
        count += 1
    return count


def _inflated(content: bytes) -> bytes:
    """All members of a gzip file, by zlib alone."""
    out = []
    while content:
        stream = zlib.decompressobj(wbits=31)
        out.append(stream.decompress(content) + stream.flush())
        if not stream.eof:
            raise EOFError
        content = stream.unused_data.lstrip(b"\0")
    return b"".join(out)


def _streams(new: Callable, content: bytes, padding: bytes = b"") -> bytes:
    out = []
    while content:
        stream = new()
        out.append(stream.decompress(content))
        if not stream.eof:
            raise EOFError
        content = stream.unused_data.lstrip(padding) if padding else stream.unused_data
    return b"".join(out)


def _zstd():
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


DECOMPRESS = {
    "": lambda content: content,
    ".gz": _inflated,
    ".bz2": lambda content: _streams(bz2.BZ2Decompressor, content),
    ".xz": lambda content: _streams(lzma.LZMADecompressor, content, b"\0"),
    ".zst": lambda content: _streams(_zstd().ZstdDecompressor, content),
}
COMPRESS = {
    "": lambda content: content,
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    # With a checksum: without one, changed bytes may decompress to other text, which nobody can tell.
    ".zst": lambda content: _zstd().compress(
        content, options={_zstd().CompressionParameter.checksum_flag: 1}
    ),
}


def jsonl(suffix: str) -> Callable[[bytes, Path], None]:
    """The target for a compression, or for none."""

    def count(file: Path) -> int | None:
        try:
            return _lines_in(DECOMPRESS[suffix](file.read_bytes()))
        except Exception:
            return None

    return lambda data, place: _prepare(data, place, f"a.jsonl{suffix}", count)


def jsonl_seeds(suffix: str) -> Callable[[], list[bytes]]:
    def seeds():
        tokenizer()  # once, and not in each process that is forked from this one
        halves = [
            b"".join(
                json.dumps({"id": n, "text": text}).encode() + b"\n" for n, text in enumerate(part)
            )
            for part in (DOCUMENTS[:30], DOCUMENTS[30:])
        ]
        ids = b"".join(b'{"input_ids": [%d, 1, 2, 3, 4]}\n' % (n % 5) for n in range(30))
        compress = COMPRESS[suffix]
        return [compress(b"".join(halves)), b"".join(map(compress, halves)), compress(ids)]

    return seeds


def parquet(data: bytes, place: Path) -> None:
    def count(file: Path) -> int | None:
        from pyarrow import parquet as library

        try:
            names = library.read_schema(file).names
            column = "text" if "text" in names else "input_ids"
            how = {"use_threads": False, "page_checksum_verification": True}
            return library.read_table(file, columns=[column], **how).num_rows
        except Exception:
            return None

    _prepare(data, place, "a.parquet", count)


def parquet_seeds() -> list[bytes]:
    tokenizer()  # once, and not in each process that is forked from this one
    import pyarrow
    from pyarrow import parquet as library

    seeds = []
    ids = [[n % 5, 1, 2, 3, 4] for n in range(60)]
    for table in ({"text": DOCUMENTS, "id": list(range(60))}, {"input_ids": ids}):
        file = io.BytesIO()
        library.write_table(pyarrow.table(table), file, row_group_size=20, write_page_checksum=True)
        seeds.append(file.getvalue())
    return seeds


def text(data: bytes, place: Path) -> None:
    def count(file: Path) -> int | None:
        try:
            return None if "\0" in file.read_bytes().decode() else 1
        except UnicodeDecodeError:
            return None

    _prepare(data, place, "a.txt", count)


def text_seeds() -> list[bytes]:
    tokenizer()  # once, and not in each process that is forked from this one
    return ["\n".join(DOCUMENTS).encode()]
