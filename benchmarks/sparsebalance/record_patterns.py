# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""How dense a real model's patterns are, by kind of text, length and price: what the simulation draws from.

A model (a Hugging Face folder or a GGUF file) runs with dense attention over windows of each text at each
length. Every layer's queries and keys choose the default policy's pattern at all prices at once
(:func:`search_price_series`); a row of ``results/sparsebalance_patterns.jsonl`` is one window, with the mean
``density`` and ``recall`` (by held-out rows) over layers and heads at each of ``prices``. Lengths beyond the
model's positions take YaRN with the factor that they need.

``--packed SEQxDOC`` measures windows of SEQ tokens cut into documents of DOC tokens that do not see each
other, in the model and in the search (``document`` in the row; 0 elsewhere).

``code`` is Python's standard library; other kinds are ``--text KIND=FILE``. A window that has a row already
is left out, so a run that was stopped goes on.

    python -m benchmarks.sparsebalance.record_patterns --model MODEL.gguf --text book=book.txt ... \
        [--seq N ...] [--windows N] [--packed SEQxDOC ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.documents import Documents
from megatron_mtraining.models.environment import default_dtype
from megatron_mtraining.models.open import open_model
from megatron_mtraining.models.types import LayerInput, ModelOptions
from megatron_mtraining.pattern import search_pattern, search_price_series
from megatron_mtraining.requirements import require

from ..lib import record

OUTPUT = record.RESULTS / "sparsebalance_patterns.jsonl"
PRICES = (0.03, 0.06, 0.1, 0.18, 0.3, 0.5, 0.8, 1.3, 2.0, 4.0)
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
PACKED_WINDOWS = 4
"""Of a kind and shape, at most: they are there to see that documents' pairs add up."""
CHARACTERS_PER_TOKEN = 6
"""Text that is encoded at first for each token that is needed."""


class Window(NamedTuple):
    """Some tokens of a text, one document or packed."""

    kind: str
    seq: int
    document: int
    """Tokens of each packed document; 0 for one document."""
    number: int

    @property
    def name(self) -> tuple:
        return self.kind, self.seq, self.document, self.number


# Texts.


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


def windows_of(kinds: list[str], options) -> list[Window]:
    """All windows, short ones first."""
    shapes = [(seq, 0) for seq in options.seq] + list(options.packed)
    found = []
    for seq, document in sorted(shapes):
        most = PACKED_WINDOWS if document else options.windows
        count = max(2, min(options.windows, most, options.tokens // seq))
        found += [Window(kind, seq, document, number) for kind in kinds for number in range(count)]
    return found


def tokens_of(window: Window, tokens: Tensor, count: int) -> tuple[int, Tensor]:
    """Where a window of ``count`` begins, evenly over the text, and its tokens ``[seq]``."""
    room = len(tokens) - window.seq
    if room < 0:
        raise ConfigError(
            f"text {window.kind} has {len(tokens)} tokens, and a window {window.seq}: give more text, or a "
            "smaller --seq"
        )
    start = room * window.number // max(1, count - 1)
    return start, tokens[start : start + window.seq]


# Measuring.


class Recorder:
    """A visitor of a model's layers that keeps density and recall at all prices."""

    def __init__(self, window: Window, device):
        self.configs = [MTrainingConfig.from_options(price=price) for price in PRICES]
        self.documents = None
        if window.document:
            lengths = [window.document] * (window.seq // window.document)
            lengths += [window.seq - sum(lengths)] if sum(lengths) < window.seq else []
            self.documents = Documents.from_lengths(lengths, window.seq, device)
        self.density, self.recall, self.low = [], [], []

    def __call__(self, given: LayerInput) -> Tensor | None:
        query, key = given.query, given.key
        if not query.is_cuda:  # the search's references on CPUs would convert them each time
            query, key = query.float(), key.float()
        cp, scale = CPGroup(None), given.softmax_scale
        if self.documents is None:
            series = search_price_series(query, key, self.configs, cp, scale)
        else:
            series = [
                search_pattern(query, key, config, cp, scale, documents=self.documents)
                for config in self.configs
            ]
        density = torch.stack([index.density() for index in series])[:, 0]
        recall = torch.stack(
            [
                torch.ones_like(d) if i.recall is None else i.recall[0]
                for i, d in zip(series, density)
            ]
        )
        self.density.append(density.mean(1))
        self.recall.append(recall.mean(1))
        self.low.append((recall < 0.9).float().mean(1))
        return self._dense(given) if self.documents is not None else None

    def _dense(self, given: LayerInput) -> Tensor:
        """All pairs within documents, by this package's attention with a window as long as the sequence."""
        config = replace(self.configs[0], window=given.query.shape[0])
        return attend(
            *(t.contiguous() for t in (given.query, given.key, given.value)),
            config=config, softmax_scale=given.softmax_scale, documents=self.documents,
        ).out  # fmt: skip

    def row(self) -> dict:
        """Means over layers and heads, one for each price."""
        found = {}
        for name in ("density", "recall", "low"):
            mean = torch.stack(getattr(self, name)).double().mean(0).tolist()
            found["heads_below_0.9" if name == "low" else name] = [round(x, 5) for x in mean]
        layers = torch.stack(self.density).double()
        found["layers"] = len(layers)
        found["density_of_layers"] = [
            [round(x, 4) for x in layers[:, PRICES.index(price)].tolist()] for price in (0.1, 0.5)
        ]
        return found


def loads(windows: list[Window], options) -> Iterator[tuple[object, float | None, list[Window]]]:
    """The model's source at each YaRN factor, and the windows that it is for."""

    def source_with(factor):
        about = ModelOptions(options.model, options.device, options.dtype, yarn_factor=factor)
        return open_model(about)

    positions = source_with(None).shape.positions
    by_factor: dict = {}
    for window in windows:
        # Documents see distances of their own length at most.
        reach = window.document or window.seq
        factor = None if reach <= positions else reach / positions
        by_factor.setdefault(factor, []).append(window)
    for factor, some in by_factor.items():
        yield source_with(factor), factor, some


def done(path: Path, model: str) -> set[tuple]:
    """Names of the windows that have rows."""
    if not path.exists():
        return set()
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        Window(row["kind"], row["seq"], row["document"], row["window"]).name
        for row in rows
        if row["model"] == model
    }


def run_all(options) -> None:
    """Every window that has no row yet."""
    require("transformers", extra="inspect")
    files = dict(options.text)
    kinds = (["code"] if options.code else []) + list(files)
    windows = windows_of(kinds, options)
    counts: dict = {}
    for window in windows:
        counts[window[:3]] = counts.get(window[:3], 0) + 1
    there = done(options.output, options.model.name)
    left = [window for window in windows if window.name not in there]
    print(f"{len(left)} of {len(windows)} windows are to be measured", flush=True)
    encoded: dict[str, Tensor] = {}
    for source, factor, some in loads(left, options):
        tokenizer = source.tokenizer()
        for kind in kinds:
            if kind not in encoded:
                text = read_text(kind, files, options.tokens * CHARACTERS_PER_TOKEN)
                encoded[kind] = torch.tensor(tokenizer.encode(text))
                print(f"{kind}: {len(text)} characters, {len(encoded[kind])} tokens", flush=True)
        with source.loaded() as run:
            for window in some:
                started = time.perf_counter()
                start, tokens = tokens_of(window, encoded[window.kind], counts[window[:3]])
                recorder = Recorder(window, options.device)
                run(tokens, recorder)
                row = dict(
                    model=options.model.name, kind=window.kind, seq=window.seq,
                    document=window.document, window=window.number, start=start, yarn=factor,
                    prices=PRICES, **recorder.row(),
                    transformers=record.installed("transformers"), python=platform.python_version(),
                )  # fmt: skip
                record.append(options.output, [row])
                took = time.perf_counter() - started
                middle = PRICES.index(0.5)
                print(
                    f"{' '.join(map(str, window))}: density {row['density'][middle]:.3f}, recall "
                    f"{row['recall'][middle]:.3f} at price 0.5, {took:.2f} s",
                    flush=True,
                )


def named_file(word: str) -> tuple[str, Path]:
    """``KIND=FILE``."""
    kind, equals, file = word.partition("=")
    if not equals or not kind or not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{word!r} is no KIND=FILE of a file that is there")
    return kind, Path(file)


def packed(word: str) -> tuple[int, int]:
    """``SEQxDOC``."""
    seq, _, document = word.partition("x")
    if not (seq.isdigit() and document.isdigit() and 0 < int(document) <= int(seq)):
        raise argparse.ArgumentTypeError(f"{word!r} is not SEQxDOC, such as 16384x2048")
    return int(seq), int(document)


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    add("--text", type=named_file, nargs="+", default=[], metavar="KIND=FILE")
    add("--no-code", dest="code", action="store_false", help="without Python's standard library")
    add("--seq", type=int, nargs="+", default=list(LENGTHS), help="tokens, multiples of 128")
    add("--windows", type=int, default=12, help="windows of a kind and length, at most")
    what = "tokens of a kind that are read; its windows at a length have no more in all (but 2 windows)"
    add("--tokens", type=int, default=400_000, help=what)
    add("--packed", type=packed, nargs="+", default=[], metavar="SEQxDOC")
    add("--device", type=torch.device, help="cuda where there is a GPU, else cpu")
    add("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(words)
    if not options.code and not options.text:
        parser.error("--no-code leaves nothing: give --text")
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = default_dtype(options.device)
    return options


def main(words: list[str] | None = None) -> None:
    try:
        run_all(options_from(words))
    except ConfigError as error:
        sys.exit(f"record_patterns.py: {error}")


if __name__ == "__main__":
    main()
