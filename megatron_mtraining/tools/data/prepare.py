# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare`` from start to end: find, tokenize, pack, write, tell."""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import lru_cache
from itertools import chain

import numpy as np

from ... import __version__
from ...errors import ConfigError
from ...requirements import require
from . import indexed, inputs, packing
from .options import LONGER, Options
from .output import WRITER, Output, Parts
from .readers import Place
from .tally import Tally
from .tokenization import Encoder, Job, fingerprint, open_encoder, tokenize_all

VERSION = 3
"""Of what is kept of parts: that of another one is not used."""
KEEP = {
    "short": "lower it, or make one document of all files of a folder (a repository) with --join FOLDER",
    "longer_dropped": "use --longer cut, or a larger --seq-length",
}
"""What to do where documents are left out, by the tally's name of the reason."""
REPORTED = (
    "pack",
    "longer",
    "long_only",
    "shuffle",
    "seed",
    "buffer",
    "workers",
    "part_bytes",
)
"""Options that the report repeats."""
TOLD = 10
"""Changed files that are named."""
OPEN_PARTS = 256
"""Parts whose files are open at a time."""


def prepare(options: Options) -> None:
    """Write the dataset, and print what became of the documents.

    Raises:
        ConfigError: the input, the tokenizer or the output cannot work; no dataset is there then that
            was not there before.
    """
    require("tqdm", "megatron.core", extra="data")
    started = time.perf_counter()
    output = Output(options.output)
    with output.opened(options.overwrite):
        found = inputs.find(options, output)
        encoder = open_encoder(options.tokenizer, options.eod)
        parts = Parts(output.parts, _keys(options, found, encoder))
        _tokenize(options, found, parts, encoder)
        tally = Tally(options.seq_length, found.left_out)
        for number in range(len(found.parts)):
            tally.read(parts.done(number), parts.lengths(number))
        if not tally.documents["read"]:
            raise ConfigError(
                f"INPUT ({', '.join(map(str, options.inputs))}) has no documents: {tally.documents['empty']} "
                f"are empty, {tally.skipped_files} files are not UTF-8 text"
            )
        samples = _with_tokens(
            _packed(options, parts, len(found.parts), tally), parts, encoder, tally
        )

        def report() -> bytes:
            if not tally.samples and tally.documents["short"] == tally.documents["read"]:
                raise ConfigError(
                    f"--long-only is {options.long_only}, and all {tally.documents['read']} documents have "
                    f"fewer tokens: {KEEP['short']}"
                )
            if not tally.samples:
                raise ConfigError(
                    f"--seq-length is {options.seq_length}, but all documents that are kept have only "
                    f"{tally.tokens['left_over']} tokens: use fewer, or give more input"
                )
            return _report(options, found, encoder, tally, time.perf_counter() - started)

        with closing(samples):
            indexed.write(output, samples, encoder.dtype, report)
        output.remove_parts(but=parts.keys if options.keep_parts else None)
    print(f"\n{tally.text()}\n")
    _warn(options, tally)
    origin = "the tokenizer's eos_token" if options.eod is None else f"--eod {options.eod}"
    print(f"End-of-document token: id {encoder.eod}, {origin}")
    print(
        f"{tally.samples:,} samples of {options.seq_length:,} tokens, {tally.samples_an_epoch:,} an epoch, "
        f"in {time.perf_counter() - started:.0f} s. Train with --data-path "
        f"{shlex.quote(str(options.output))} --seq-length {options.seq_length}"
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


def _keys(options: Options, found: inputs.Inputs, encoder: Encoder) -> list[str]:
    """Names of the parts, see :class:`~megatron_mtraining.tools.data.output.Parts`."""
    shared = (
        VERSION,
        options.text_field,
        options.pack == "as-is",
        fingerprint(options.tokenizer),
        encoder.eod,
        encoder.tokenizer.vocab_size,
    )
    described = (repr((shared, part)) for part in found.parts)
    # A name may have bytes that are not UTF-8.
    return [
        hashlib.sha256(one.encode("utf-8", "surrogateescape")).hexdigest()[:32] for one in described
    ]


def _tokenize(options: Options, found: inputs.Inputs, parts: Parts, encoder: Encoder) -> None:
    """Tokenize the parts that are not done."""
    from tqdm import tqdm

    job = Job(
        parts.folder, found.parts, parts.keys, options.tokenizer, options.eod, options.text_field,
        options.pack == "as-is", options.document_bytes,
    )  # fmt: skip
    todo = []
    total = sum(part.size for part in found.parts)
    with tqdm(total=total, desc="tokenize", unit="B", unit_scale=True, file=sys.stderr) as bar:
        _tell_changes(bar, parts.changed(found.files), found)
        for number, part in enumerate(found.parts):
            counts = parts.done(number)
            if counts is not None and not parts.is_whole(number, counts):
                bar.write(f"a part of {part.files[0]} is broken: it is tokenized again", sys.stderr)
                counts = None
            if counts is None:
                todo.append(number)
            else:
                _check_lengths(options, part, counts)
                bar.update(part.size)
        if len(todo) < len(found.parts):
            bar.write(
                f"going on: {len(found.parts) - len(todo)} of {len(found.parts)} parts are done",
                file=sys.stderr,
            )
        with closing(tokenize_all(job, encoder, todo, options.workers)) as done:
            for number, counts in done:
                _check_lengths(options, found.parts[number], counts)
                bar.update(found.parts[number].size)


def _tell_changes(bar, changed: list[str], found: inputs.Inputs) -> None:
    """Say which files are not those that an interrupted run has read."""
    for path in changed[:TOLD]:
        size = found.files[path].size
        bar.write(f"{path} ({size} bytes) has changed: it is tokenized again", sys.stderr)
    if len(changed) > TOLD:
        bar.write(f"so have {len(changed) - TOLD} other files", sys.stderr)


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


def _packed(
    options: Options, parts: Parts, count: int, tally: Tally
) -> Iterator[list[packing.Piece]]:
    """The pieces of each sample; the last one may have fewer tokens."""
    documents = _kept(options, parts, count, tally)
    if options.shuffle:
        documents = _shuffled(documents, options.buffer, random.Random(options.seed + 1))
    how = "in-order" if options.pack == "as-is" else options.pack
    groups = packing.samples(documents, options.seq_length, how)
    if options.shuffle:
        # Else short documents, and those left for the last, would be together at the end: in --split's
        # validation data.
        groups = _shuffled(
            groups,
            options.buffer,
            random.Random(options.seed + 2),
            lambda group: sum(map(len, group)),
        )
    return chain.from_iterable(groups)


def _kept(options: Options, parts: Parts, count: int, tally: Tally) -> Iterator[tuple[tuple, int]]:
    """Documents that are not left out, as ((part, first token in it), tokens)."""
    order = list(range(count))
    if options.shuffle:
        random.Random(options.seed).shuffle(order)
    for number in order:
        start = 0
        for length in parts.lengths(number).tolist():
            if length < options.long_only:
                tally.drop("short", length)
            elif length > options.seq_length and options.longer == "drop":
                tally.drop("longer_dropped", length)
            else:
                tally.documents["longer_cut"] += length > options.seq_length
                yield (number, start), length
            start += length


def _shuffled(items: Iterable, size: int, rng: random.Random, weigh=lambda item: 1) -> Iterator:
    """Any of the items that wait, as soon as these weigh more than ``size``."""
    waiting, weight = [], 0
    for item in items:
        waiting.append(item)
        weight += weigh(item)
        while weight > size:
            place = int(rng.random() * len(waiting))
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            item = waiting.pop()
            weight -= weigh(item)
            yield item
    rng.shuffle(waiting)
    yield from waiting


def _with_tokens(samples, parts: Parts, encoder: Encoder, tally: Tally) -> Iterator[np.ndarray]:
    """Token ids ``[seq_length]`` of the samples that are full."""
    from tqdm import tqdm

    # Not mapped: mapped pages count as this process's memory.
    tokens = lru_cache(OPEN_PARTS)(parts.tokens)
    width = np.dtype(encoder.dtype).itemsize
    total = tally.tokens["read"]
    with tqdm(total=total, desc="pack", unit="tok", unit_scale=True, file=sys.stderr) as bar:
        for pieces in samples:
            if sum(map(len, pieces)) < tally.seq_length:
                tally.left_over(pieces)
                continue
            ids = np.full(tally.seq_length, encoder.eod, encoder.dtype)
            at = 0
            for piece in pieces:
                number, first = piece.document
                count = piece.stop - piece.start
                file = tokens(number)
                file.seek((first + piece.start) * width)
                ids[at : at + count] = np.fromfile(file, encoder.dtype, count)
                at += len(piece)
            tally.sample(pieces)
            bar.update(sum(piece.stop - piece.start for piece in pieces))
            yield ids


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
        "bytes": sum(state.size for state in found.files.values()),
        "join": [str(path) for path in options.join],
        **{name: getattr(options, name) for name in REPORTED},
        "seconds": round(seconds, 1),
        WRITER: __version__,
    }
    return (json.dumps(about, indent=1) + "\n").encode()
