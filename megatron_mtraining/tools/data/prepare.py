# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare`` from start to end: find, tokenize, pack, write, tell."""

from __future__ import annotations

import json
import random
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from ... import __version__
from ...errors import ConfigError
from ...requirements import require
from . import indexed, inputs
from .options import LONGER, Options
from .output import WRITER, Output
from .packing import packed
from .readers import Place
from .store import Parts
from .tally import Tally
from .tokenization import Encoder, Job, keys, open_encoder
from .workers import tokenize

KEEP = {
    "short": "lower it, or make one document of all files of a folder (a repository) with --join FOLDER",
    "longer_dropped": "use --longer cut, or a larger --seq-length",
}
"""What to do where documents are left out, by the tally's name of the reason."""
REPORTED = ("pack", "longer", "long_only", "shuffle", "seed", "buffer", "workers", "part_bytes")
"""Options that the report repeats."""


def prepare(options: Options) -> None:
    """Write the dataset, and print what became of the documents.

    Raises:
        ConfigError: the input, the tokenizer or the output cannot work; no dataset is there then that
            was not there before.
    """
    require("tqdm", "megatron.core", extra="data")
    started = time.perf_counter()
    output = Output(options.output)
    with output.replaced(options.overwrite, options.keep_parts):
        found = inputs.find(options, output)
        encoder = open_encoder(options.tokenizer, options.eod)
        parts = Parts(output.parts, keys(options, found.parts, encoder))
        _tokenize(Job(options, found.parts, parts), encoder, found)
        tally = Tally(options.seq_length, found)
        for number in range(len(found.parts)):
            tally.read(parts.load(number))
        if not tally.documents["read"]:
            raise ConfigError(
                f"INPUT ({', '.join(map(str, options.inputs))}) has no documents: {tally.documents['empty']} "
                f"are empty, {tally.skipped_files} files are not UTF-8 text"
            )
        samples = packed(_kept(options, parts, tally), options)
        indexed.write(output.new, samples, parts, encoder, tally)
        _check_samples(options, tally)
        seconds = time.perf_counter() - started
        output.new[".json"].write_bytes(_report(options, found, encoder, tally, seconds))
        if options.keep_parts:
            parts.remove_others()
    print(f"\n{tally.text()}\n")
    _warn(options, tally)
    origin = "the tokenizer's eos_token" if options.eod is None else f"--eod {options.eod}"
    print(f"End-of-document token: id {encoder.eod}, {origin}")
    print(
        f"{tally.samples:,} samples of {options.seq_length:,} tokens, {tally.samples_an_epoch:,} an epoch, "
        f"in {time.perf_counter() - started:.0f} s. Train with --data-path "
        f"{shlex.quote(str(options.output))} --seq-length {options.seq_length}"
    )


def _tokenize(job: Job, encoder: Encoder, found: inputs.Inputs) -> None:
    """Tokenize the parts that are not done."""
    from tqdm import tqdm

    todo = []
    total = sum(part.size for part in found.parts)
    with tqdm(total=total, desc="tokenize", unit="B", unit_scale=True, file=sys.stderr) as bar:

        def done(number: int, counts: dict) -> None:
            _check_lengths(job.options, found.parts[number], counts)
            bar.update(found.parts[number].size)

        for number in range(len(found.parts)):
            counts = job.parts.load(number)
            if counts is None:
                todo.append(number)
            else:
                done(number, counts)
        if len(todo) < len(found.parts):
            done_before = len(found.parts) - len(todo)
            bar.write(f"going on: {done_before} of {len(found.parts)} parts are done", sys.stderr)
        with closing(tokenize(job, encoder, todo)) as results:
            for number, counts in results:
                done(number, counts)


def _check_lengths(options: Options, part: inputs.Part, counts: dict) -> None:
    """Refuse a document that --longer or --pack do not let through, as soon as it is known."""
    length = options.seq_length
    if counts["longest"] is None:
        return
    if options.pack == "as-is":
        for tokens, *place in (counts["longest"], counts["shortest"]):
            if tokens != length:
                raise ConfigError(
                    f"{Place(part, *place)} has {tokens} tokens, but --pack is as-is and --seq-length "
                    f"{length}: use --seq-length {tokens} if all are so long, or --pack best-fit"
                )
    tokens, *place = counts["longest"]
    if options.longer == "error" and tokens > length:
        others = " or ".join(name for name in LONGER if name != "error")
        raise ConfigError(
            f"{Place(part, *place)} has {tokens} tokens, more than --seq-length ({length}), and --longer is "
            f"error: use --longer {others}, or longer samples"
        )


def _kept(options: Options, parts: Parts, tally: Tally) -> Iterator[tuple[tuple, int]]:
    """Documents that are not left out, as ((part, first token in it), tokens)."""
    order = list(range(len(parts.keys)))
    if options.shuffle:
        random.Random(options.seed).shuffle(order)
    for number in order:
        start = 0
        for length in parts.load(number)["lengths"]:
            if length < options.long_only:
                tally.drop("short", length)
            elif length > options.seq_length and options.longer == "drop":
                tally.drop("longer_dropped", length)
            else:
                tally.documents["longer_cut"] += length > options.seq_length
                yield (number, start), length
            start += length


def _check_samples(options: Options, tally: Tally) -> None:
    """Refuse a dataset without samples."""
    if tally.samples:
        return
    if tally.documents["short"] == tally.documents["read"]:
        raise ConfigError(
            f"--long-only is {options.long_only}, and all {tally.documents['read']} documents have "
            f"fewer tokens: {KEEP['short']}"
        )
    raise ConfigError(
        f"--seq-length is {options.seq_length}, but all documents that are kept have only "
        f"{tally.tokens['left_over']} tokens: use fewer, or give more input"
    )


def _warn(options: Options, tally: Tally) -> None:
    """Say so if an option leaves out most of the documents, or of their tokens."""
    given = {"short": f"--long-only {options.long_only}", "longer_dropped": "--longer drop"}
    for why, option in given.items():
        counts = [(each[why], each["read"]) for each in (tally.documents, tally.tokens)]
        if any(2 * part > whole for part, whole in counts):
            documents, tokens = (f"{part:,} of {whole:,}" for part, whole in counts)
            print(
                f"warning: {option} leaves out {documents} documents, with {tokens} tokens: {KEEP[why]}",
                file=sys.stderr,
            )


def _report(
    options: Options, found: inputs.Inputs, encoder: Encoder, tally: Tally, seconds: float
) -> bytes:
    about = {
        "seq_length": options.seq_length,
        "dtype": np.dtype(encoder.dtype).name,
        "tokenizer": str(options.tokenizer),
        "eod": encoder.eod,
        "vocab_size": encoder.tokenizer.vocab_size,
        **tally.numbers(),
        "inputs": [str(path) for path in options.inputs],
        "files": len(found.files),
        "bytes": sum(file.size for file in found.files),
        "join": [str(path) for path in options.join],
        **{name: getattr(options, name) for name in REPORTED},
        "seconds": round(seconds, 1),
        WRITER: __version__,
    }
    return (json.dumps(about, indent=1) + "\n").encode()
