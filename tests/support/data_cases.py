# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the tests of ``mtraining data`` share: a tokenizer of bytes, documents, and their files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import sys
from pathlib import Path

import numpy as np
import pytest

EOD, SEQ = 256, 256
IN_ORDER = {"pack": "in-order", "no_shuffle": True}


def save_tokenizer(folder: Path, **special) -> Path:
    """Bytes are their own ids, and 256 is the end-of-document token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel's stand-in for each byte: itself where it can be seen, else from 256 on.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    letters.update({chr(256 + place): byte for place, byte in enumerate(others)})
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eod>"])
    special = special or {"eos_token": "<eod>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def make_documents(count: int, seed: int = 0, longest: int = 3000) -> list[str]:
    """Texts of many lengths, some long."""
    rng = random.Random(seed)
    lengths = [min(longest, int(rng.paretovariate(0.8) * 20)) for _ in range(count)]
    return ["".join(rng.choices("abcdefgh é\n", k=length)).strip() + "." for length in lengths]


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def write_jsonl(path: Path, documents: list, field: str = "text") -> Path:
    lines = [json.dumps({"id": n, field: text}) for n, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_mds(folder: Path, samples: list[dict], encodings: dict) -> Path:
    """A Mosaic data shard and its index.json."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=encodings) as writer:
        for sample in samples:
            dtypes = {name: code.split(":")[1] for name, code in encodings.items() if ":" in code}
            arrays = {name: np.asarray(sample[name], dtype) for name, dtype in dtypes.items()}
            writer.write({**sample, **arrays})
    return folder


def zstd_compress():
    """Of Python's own library, or before Python 3.14 its backport."""
    return pytest.importorskip(
        "backports.zstd" if sys.version_info < (3, 14) else "compression.zstd"
    ).compress


COMPRESS = {
    "jsonl.gz": lambda: gzip.compress,
    "jsonl.bz2": lambda: bz2.compress,
    "jsonl.xz": lambda: lzma.compress,
    "jsonl.zst": zstd_compress,
}


def in_order(documents: list[list[int]], seq_length: int, eod: int = EOD) -> list[list[int]]:
    """Samples by the rules, a token at a time: full ones only, each document that fills some first."""
    samples, current = [], []
    for ids in documents:
        full = len(ids) // seq_length
        pieces = [ids[at * seq_length : (at + 1) * seq_length] for at in range(full)]
        rest = ids[full * seq_length :]
        if len(rest) == seq_length - 1:
            pieces, rest = [*pieces, [*rest, eod]], []
        samples += pieces
        for place, token in enumerate(rest):
            current.append(token)
            if place == len(rest) - 1 and len(current) < seq_length:
                current.append(eod)
            if len(current) == seq_length:
                samples.append(current)
                current = []
    return samples


def ids(prefix: Path, seq_length=SEQ) -> list[list[int]]:
    """The samples, read without Megatron's code: tokens, and an index of as many sequences."""
    samples = np.fromfile(f"{prefix}.bin", np.uint16).reshape(-1, seq_length)
    header = Path(f"{prefix}.idx").read_bytes()[:34]
    assert header[:9] == b"MMIDIDX\0\0"
    assert int.from_bytes(header[18:26], "little") == len(samples)
    return samples.tolist()


def report(prefix: Path) -> dict:
    return json.loads(Path(f"{prefix}.json").read_text())


def refused(capsys, named: list[str], status: int) -> None:
    """One error, on the last line, that names all this."""
    lines = capsys.readouterr().err.strip().splitlines()
    error = lines[-1] if lines else ""
    assert status == 2 and error.startswith("mtraining data: "), lines
    assert sum("mtraining data: " in line for line in lines) == 1
    for word in named:
        assert word in error, error


def interrupted(prepare, monkeypatch, *given, **options) -> None:
    """Run until all parts are done."""
    from megatron_mtraining.tools.data import prepare as prepare_module

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_kept", interrupt)
        assert prepare(*given, **options) == 130
