# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What is fuzzed: one function for each kind of input, for hypothesis and for fuzzers of bytes alike.

A target takes an input (bytes, or values for options) and an empty folder, and gives the input to the package
as a user would. It returns if the input was read. It raises ConfigError, or :class:`Refused` for a whole
command that has refused it in the right way. Whatever else it raises is a fault.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import settings_file
from megatron_mtraining.megatron import options as command_line_options
from megatron_mtraining.tools import cli

LONGEST = 2200
"""Characters of a message, with what the command line adds to a ConfigError's."""
LAYERS, HEADS, SEQUENCE = 4, 4, 4096


class Refused(Exception):
    """A command has ended with status 2 and one line, and has left nothing."""


class Fault(AssertionError):
    """A promise that does not hold."""


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        run: takes an input and a folder.
        seeds: valid inputs, to be changed. None for targets that take values.
        tokens: bytes that mean something in this format.
    """

    run: Callable[[object, Path], None]
    seeds: Callable[[], list[bytes]] | None = None
    tokens: tuple[bytes, ...] = ()


def check_message(message: str) -> None:
    """Raise :class:`Fault` unless an error is one line that a terminal can show."""
    if not message or not message.isprintable() or len(message) > LONGEST:
        raise Fault(f"not one line of at most {LONGEST} characters: {message[:5000]!r}")


def command(words: list, out: Path, named: str = "") -> None:
    """Run the console command; raises :class:`Refused` or :class:`Fault` if it does not succeed.

    Args:
        out: what it writes; whatever is beside it of that name is left over.
        named: what the error must contain.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as file:
        with contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = cli.main([str(word) for word in words])
            except SystemExit as end:  # argparse's
                status = end.code
        file.seek(0)
        lines = file.read().splitlines()
    if status == 0:
        return
    if status != 2 or not lines:
        raise Fault(f"exit status {status}: {lines[-3:]}")
    if any("Traceback" in line for line in lines):
        raise Fault("a traceback: " + " | ".join(lines[-20:]))
    check_message(lines[-1])
    if not lines[-1].startswith("mtraining "):
        raise Fault(f"the last line is none of ours: {lines[-1]!r}")
    if named not in lines[-1]:
        raise Fault(f"the error does not name {named}: {lines[-1]}")
    left = sorted(path.name for path in out.parent.iterdir() if out.name in path.name)
    if left:
        raise Fault(f"left over: {left} after {lines[-1]}")
    raise Refused(lines[-1])


# Options and settings files


def options(values: dict, place: Path) -> None:
    """Flat options, as ``MTrainingConfig.from_options`` takes them."""
    config = MTrainingConfig.from_options(**values)
    if MTrainingConfig.from_options(**config.options()) != config:
        raise Fault("options() is not the inverse of from_options()")
    MTrainingConfig.for_sequence(SEQUENCE, **values)


def command_line(words: list[str], place: Path) -> None:
    """Words of Megatron's command line."""
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py")
    command_line_options.add_arguments(parser)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            args = parser.parse_args(words)
    except SystemExit as end:
        if end.code == 0:  # --help
            return
        last = errors.getvalue().splitlines()[-1]
        if end.code != 2 or not last.startswith("pretrain_gpt.py: error: "):
            raise Fault(f"exit status {end.code}: {last!r}") from None
        raise Refused(last) from None
    args.seq_length = SEQUENCE
    command_line_options.config_from_args(args)


def _settings(data: bytes, file: Path) -> None:
    file.write_bytes(data)
    args = argparse.Namespace(seq_length=SEQUENCE, mtraining_settings=str(file))
    try:
        config = command_line_options.config_from_args(args)
        settings_file.check_settings_file(config, LAYERS, HEADS)
        for layer in range(LAYERS):
            policies = settings_file.head_policies(config, layer, LAYERS, HEADS)
            if policies is not None and len(policies) != HEADS:
                raise Fault(f"layer {layer} has {len(policies)} policies")
    except ConfigError as error:
        # Values of the whole run are refused by the name of their option, as on the command line.
        if str(file) not in str(error) and "--mtraining-" not in str(error):
            raise Fault(f"neither file nor option is named: {error}") from None
        raise


def settings_json(data: bytes, place: Path) -> None:
    _settings(data, place / "settings.json")


def settings_yaml(data: bytes, place: Path) -> None:
    _settings(data, place / "settings.yaml")


SETTINGS = (
    {"price": 0.31, "layers": {"0": {"dense": True}, "3": {"price": 0.2, "heads": {"3": {"dense": True}}}}},
    {"target_recall": 0.9, "layers": {"1": {"target_recall": 0.99, "heads": {"0": {"price": 0.5}}}}},
    {"policy": "xattention", "layers": {"0": {"policy": "fixed", "vertical": 100, "slash": 10}}},
    {"vertical": 100, "slash": 10, "window": 64, "sink": 0, "layers": {"2": {"coverage": 0.5}}},
    [{str(h): ["vertical_and_slash", 30, 800, 1] for h in range(HEADS)}] * LAYERS,
    [{str(h): ["flex_vertical_and_slash", [0.9, 30], [0.9, 80], 1] for h in range(HEADS)}] * LAYERS,
)  # fmt: skip


def _settings_json_seeds() -> list[bytes]:
    return [json.dumps(each).encode() for each in SETTINGS]


def _settings_yaml_seeds() -> list[bytes]:
    import yaml

    seeds = [yaml.safe_dump(each).encode() for each in SETTINGS]
    return [*seeds, b"layers:\n  0: &a {price: 0.2}\n  1: {<<: *a, price: .5}\n  2: *a\n"]


# Checkpoints

CONFIG = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", vocab_size=40, hidden_size=128,
    intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=False, use_sliding_window=False,
    sliding_window=None, max_window_layers=2, attention_dropout=0.0, torch_dtype="bfloat16",
    rope_theta=1e6, rope_scaling=None, layer_types=["full_attention"] * 2,
)  # fmt: skip
INDEX, TRACKER = "model.safetensors.index.json", "latest_checkpointed_iteration.txt"


@cache
def checkpoints() -> tuple[Path, Path]:
    """A model in two files with an index, and the checkpoint converted from it; removed at exit."""
    import atexit

    from safetensors.torch import save_file

    from megatron_mtraining.tools.convert.families import model_of
    from megatron_mtraining.tools.convert.mapping import mapped

    root = Path(tempfile.mkdtemp(prefix="mtraining-fuzz-"))
    atexit.register(_remove_in, os.getpid(), root)
    model, checkpoint = root / "hf", root / "meg"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    tensors = {
        each.name: torch.randn(each.shape).to(torch.bfloat16)
        for each in mapped(model_of(CONFIG, model / "config.json"))
    }
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, model / file, metadata={"format": "pt"})
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (model / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    command(["convert", "hf-to-megatron", model, checkpoint], checkpoint)
    return model, checkpoint


def _remove_in(process: int, folder: Path) -> None:
    if os.getpid() == process:  # and not in one forked from it
        shutil.rmtree(folder, ignore_errors=True)


def _with(folder: Path, place: Path, name: str, data: bytes) -> Path:
    """``folder``, by links, with another file ``name``."""
    copy = place / "in"
    shutil.copytree(folder, copy, copy_function=os.link)
    (copy / name).unlink(missing_ok=True)
    (copy / name).write_bytes(data)
    return copy


def _to_megatron(data: bytes, place: Path, name: str) -> None:
    source, out = _with(checkpoints()[0], place, name, data), place / "out"
    command(["convert", "hf-to-megatron", source, out], out)
    if not (out / "release" / ".metadata").is_file():
        raise Fault("no checkpoint was written")


def config_json(data: bytes, place: Path) -> None:
    _to_megatron(data, place, "config.json")


def index_json(data: bytes, place: Path) -> None:
    _to_megatron(data, place, INDEX)


def safetensors(data: bytes, place: Path) -> None:
    _to_megatron(data, place, "model-00001-of-00002.safetensors")


def inspect_config(data: bytes, place: Path) -> None:
    """config.json as ``inspect`` opens it, through transformers."""
    from megatron_mtraining.models.environment import quietly
    from megatron_mtraining.models.open import open_model
    from megatron_mtraining.models.types import ModelOptions

    folder = _with(checkpoints()[0], place, "config.json", data)
    quietly(lambda: open_model(ModelOptions(folder, torch.device("cpu"), torch.float32)))


def _to_hf(data: bytes, place: Path, name: str, kept: tuple = ()) -> None:
    folder = _with(checkpoints()[1], place, name, data)
    if name not in kept:
        (folder / "release" / "integrity.json").unlink(missing_ok=True)
    out = place / "out"
    command(["convert", "megatron-to-hf", folder, out], out)
    if not (out / "config.json").is_file():
        raise Fault("no model was written")


def tracker(data: bytes, place: Path) -> None:
    _to_hf(data, place, TRACKER)


def metadata(data: bytes, place: Path) -> None:
    _to_hf(data, place, "release/.metadata")


def common_pt(data: bytes, place: Path) -> None:
    _to_hf(data, place, "release/common.pt")


def distcp(data: bytes, place: Path) -> None:
    _to_hf(data, place, "release/__0_0.distcp")


def integrity(data: bytes, place: Path) -> None:
    name = "release/integrity.json"
    _to_hf(data, place, name, kept=(name,))


def _file(pair: int, name: str) -> Callable[[], list[bytes]]:
    def seeds():
        if pair:  # once, and not in each process that is forked from this one
            import megatron.core.dist_checkpointing  # noqa: F401
        return [(checkpoints()[pair] / name).read_bytes()]

    return seeds


def gguf(data: bytes, place: Path) -> None:
    from megatron_mtraining.models.gguf_header import check_header

    file = place / "model.gguf"
    file.write_bytes(data)
    check_header(file, f"MODEL is {file}")


def _gguf_seeds() -> list[bytes]:
    from struct import pack

    def text(value: bytes) -> bytes:
        return pack("<Q", len(value)) + value

    values = [
        text(b"general.architecture") + pack("<I", 8) + text(b"qwen2"),
        text(b"qwen2.block_count") + pack("<II", 4, 24),
        text(b"qwen2.embedding_length") + pack("<IQ", 10, 896),
        text(b"tokenizer.ggml.tokens")
        + pack("<IIQ", 9, 8, 3)
        + text(b"a")
        + text(b"bc")
        + text(b""),
        text(b"tokenizer.ggml.scores") + pack("<IIQ3f", 9, 6, 3, 0, 1, 2),
        text(b"nested") + pack("<IIQ", 9, 9, 2) + 2 * pack("<IQ2b", 1, 2, 3, 4),
    ]
    tensors = [
        text(b"token_embd.weight") + pack("<I2Q", 2, 896, 3) + pack("<IQ", 0, 0),
        text(b"output_norm.weight") + pack("<IQ", 1, 896) + pack("<IQ", 0, 10752),
    ]
    content = b"".join(values + tensors) + bytes(64)
    return [
        b"GGUF" + pack("<IQQ", version, len(tensors), len(values)) + content for version in (2, 3)
    ]


def indexed_dataset(data: bytes, place: Path) -> None:
    """The index of a dataset of Megatron's, as ``inspect --text`` reads it."""
    from megatron_mtraining.models.text import read_indexed_dataset

    (place / "a.bin").write_bytes(bytes(range(240)))
    (place / "a.idx").write_bytes(data)
    ids = read_indexed_dataset(place / "a.bin", 100)
    if ids.ndim != 1 or len(ids) > 100:
        raise Fault(f"tokens of shape {ids.shape}")


def _index_seeds() -> list[bytes]:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as folder:
        builder = IndexedDatasetBuilder(f"{folder}/a.bin", np.uint16)
        for count in (40, 30, 50):
            builder.add_document(torch.arange(count), [count])
        builder.finalize(f"{folder}/a.idx")
        return [Path(folder, "a.idx").read_bytes()]


# Data


@cache
def tokenizer() -> Path:
    """A sentencepiece model: quick to open."""
    import atexit

    import sentencepiece

    root = Path(tempfile.mkdtemp(prefix="mtraining-fuzz-"))
    atexit.register(_remove_in, os.getpid(), root)
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


def _jsonl_seeds(suffix: str) -> Callable[[], list[bytes]]:
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


def _parquet_seeds() -> list[bytes]:
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


def _text_seeds() -> list[bytes]:
    tokenizer()  # once, and not in each process that is forked from this one
    return ["\n".join(DOCUMENTS).encode()]


# Of pickles: what a stranger would put there. None of it may be called.
GADGETS = (
    b"cos\nsystem\n(S'true'\ntR",
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R",
    b"cbuiltins\nexec\n(S'import os; os.system(\"true\")'\ntR",
    b"cbuiltins\ngetattr\n",
    b"ctorch.storage\n_load_from_bytes\n(B\x04\x00\x00\x00abcdtR",
    b"ctorch\nload\n(S'/etc/passwd'\ntR",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}V__repr__\nI1\nstb",
    b"cpathlib\nPosixPath\n(S'..'\ntR",
    b"r\xff\xff\xff\x07", b"j\xff\xff\xff\x7f", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f", b"\x8b\x10\x00\x00\x00" + b"\xff" * 16,
    *(bytes([letter]) for letter in b"(}]N0.2asb"),
    pickle.dumps(10**30)[2:-1], b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
)  # fmt: skip
JSON_TOKENS = (
    *(bytes([letter]) for letter in b'{}[]":,'), b"null", b"true", b"0", b"0.5", b"1e999", b"-1", b"NaN",
    b"9" * 5000, b"\\ud800", b"\\u0000", b"[" * 3000, b'{"a":' * 3000, b"\xff", b"\xef\xbb\xbf",
)  # fmt: skip
YAML_TOKENS = (
    *JSON_TOKENS[:15],
    b"&a ",
    b"*a",
    b"<<: ",
    b"=: ",
    b"---\n",
    b"? ",
    b"- ",
    b"\t",
    b"|\n",
    b"~",
    b"%YAML 9.9\n",
    b"!!python/object/apply:os.system ['true']",
    b"2001-99-99",
    b"1:30",
    b"010",
    b"0x",
    b"0b_",
    b".inf",
    b".nan",
    *(
        b"!!" + kind + b" "
        for kind in b"binary set omap timestamp int float null bool str seq map".split()
    ),
)
LINES = (
    b"\n",
    b"\r",
    b"\n\n",
    b"\0",
    b'{"text": null}\n',
    b'{"text": ""}\n',
    b"{}\n",
    b"[]\n",
    *JSON_TOKENS,
)

TARGETS = {
    "options": Target(options),
    "command_line": Target(command_line),
    "settings_json": Target(settings_json, _settings_json_seeds, JSON_TOKENS),
    "settings_yaml": Target(settings_yaml, _settings_yaml_seeds, YAML_TOKENS),
    "config_json": Target(config_json, _file(0, "config.json"), JSON_TOKENS),
    "inspect_config": Target(inspect_config, _file(0, "config.json"), JSON_TOKENS),
    "index_json": Target(index_json, _file(0, INDEX), JSON_TOKENS),
    "safetensors": Target(safetensors, _file(0, "model-00001-of-00002.safetensors"), JSON_TOKENS),
    "tracker": Target(tracker, _file(1, TRACKER), (b"release", b"0", b"/", b"..")),
    "metadata": Target(metadata, _file(1, "release/.metadata"), GADGETS),
    "common_pt": Target(common_pt, _file(1, "release/common.pt"), GADGETS),
    "distcp": Target(distcp, _file(1, "release/__0_0.distcp"), GADGETS),
    "integrity": Target(integrity, _file(1, "release/integrity.json"), JSON_TOKENS),
    "gguf": Target(gguf, _gguf_seeds, (b"GGUF", b"\x09\0\0\0", b"\x08\0\0\0", b"\xff" * 8)),
    "indexed_dataset": Target(indexed_dataset, _index_seeds, (b"MMIDIDX\0\0", b"\xff" * 8)),
    **{
        f"jsonl{suffix}": Target(jsonl(suffix), _jsonl_seeds(suffix), () if suffix else LINES)
        for suffix in COMPRESS
    },
    "parquet": Target(parquet, _parquet_seeds, (b"PAR1", b"\xff" * 8)),
    "text": Target(text, _text_seeds, (b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf")),
}  # fmt: skip
