# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Mixed sets of documents, packed into samples as ``mtraining data prepare`` packs them.

Each kind of text is a dataset of its own in the blend. Lengths are those of real documents
(``lengths.json``): source files of Python's standard library and of installed packages, C headers, API
descriptions in JSON, speeches, chapters of a book. A set takes those within its ranges of length, so that
each range has its share of the tokens; where a kind has too few in a range, those of all kinds.

    python -m benchmarks.sparsebalance.sets show
    python -m benchmarks.sparsebalance.sets measure --tokenizer MODEL.gguf KIND=PATH[:PATTERN] ...

``measure`` writes ``lengths.json`` from files: each file is a document, and a file of chapters is cut at
lines that begin with CHAPTER.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_mtraining.balance.latency import visible_pairs
from megatron_mtraining.balance.plan import Samples
from megatron_mtraining.tools.data.packing import samples as packed_samples

LENGTHS = Path(__file__).with_name("lengths.json")
KINDS = ("code", "book", "speech", "c", "json")
"""Datasets of the blend, by number."""
SHARES = (0.4, 0.2, 0.1, 0.15, 0.15)
"""Of the tokens."""
FEW = 20
"""With fewer documents of a kind in a range, those of all kinds are drawn from."""
MOST_LENGTHS = 400
"""Of a kind, in the file: quantiles of more."""


class Range(NamedTuple):
    """Documents of ``low`` to ``high`` tokens, and their share of a set's tokens."""

    low: int
    high: int
    share: float


class MixedSet(NamedTuple):
    """A set: the length of samples, and of documents."""

    seq_length: int
    ranges: tuple[Range, ...]
    what: str


def _octaves(low: int, high: int) -> tuple[Range, ...]:
    """Equal shares of the tokens in each power of two of length."""
    edges = [low]
    while edges[-1] * 2 < high:
        edges.append(edges[-1] * 2)
    edges.append(high)
    share = 1 / (len(edges) - 1)
    return tuple(Range(a, b, share) for a, b in zip(edges, edges[1:]))


K = 1024
SETS = {
    "bimodal": MixedSet(
        64 * K,
        (Range(128, 4 * K, 0.5), Range(16 * K, 64 * K, 0.5)),
        "half of the tokens in documents under 4K, half in documents over 16K",
    ),
    "8K-72K": MixedSet(72 * K, (Range(8 * K, 72 * K, 1.0),), "documents of 8K to 72K"),
    "long-tailed": MixedSet(
        128 * K, (Range(128, 128 * K, 1.0),), "documents as long as they are, up to 128K"
    ),
    "to 256K": MixedSet(
        256 * K, _octaves(1 * K, 256 * K), "equally many tokens in each power of two, 1K to 256K"
    ),
}


class PackedSet(NamedTuple):
    """Samples of a set, shuffled."""

    seq_length: int
    datasets: np.ndarray
    """int32 ``[n]``: numbers of :data:`KINDS`."""
    documents: list[np.ndarray]
    """Lengths of each sample's documents; they add up to ``seq_length``."""

    def samples(self) -> Samples:
        """What a plan needs of them."""
        return Samples(
            np.arange(len(self.datasets), dtype=np.int64),
            self.datasets,
            np.array([lengths.max() for lengths in self.documents], np.int64),
            np.array([visible_pairs(lengths) for lengths in self.documents], np.float64),
        )


def real_lengths(path: Path = LENGTHS) -> dict[str, np.ndarray]:
    """Tokens of real documents by kind, ascending."""
    found = json.loads(path.read_text(encoding="utf-8"))["tokens"]
    return {kind: np.array(found[kind], np.int64) for kind in KINDS}


def draw_lengths(
    kind: str, ranges: tuple[Range, ...], tokens: int, lengths: dict[str, np.ndarray], rng
) -> list[int]:
    """Lengths of documents of a kind, of ``tokens`` tokens or a document more, in random order."""
    choices = []
    for low, high, _ in ranges:
        inside = [each[(each >= low) & (each <= high)] for each in lengths.values()]
        own = lengths[kind][(lengths[kind] >= low) & (lengths[kind] <= high)]
        choices.append(own if len(own) >= FEW else np.concatenate([own, *inside]))
        if not len(choices[-1]):
            # Nothing that long was found: any length of the range, short ones more often.
            choices[-1] = np.exp(np.linspace(np.log(low), np.log(high), FEW)).astype(np.int64)
    # As many documents of a range as give its tokens.
    weights = np.array([each.share for each in ranges]) / [each.mean() for each in choices]
    found: list[int] = []
    total = 0
    while total < tokens:
        which = rng.choice(len(ranges), 4096, p=weights / weights.sum())
        places = rng.random(4096)
        for number, at in zip(which.tolist(), places.tolist()):
            of_range = choices[number]
            found.append(int(of_range[int(at * len(of_range))]))
            total += found[-1]
            if total >= tokens:
                break
    return found


def ranges_at(name: str, seq_length: int) -> tuple[Range, ...]:
    """The ranges of a set whose samples are made shorter or longer, in proportion."""
    chosen = SETS[name]
    if seq_length == chosen.seq_length:
        return chosen.ranges
    ratio = seq_length / chosen.seq_length
    return tuple(
        Range(max(16, round(low * ratio)), round(high * ratio), share)
        for low, high, share in chosen.ranges
    )


def build(name: str, count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> PackedSet:
    """About ``count`` samples of a set.

    Args:
        kinds: those that the set has, each its share of the tokens.

    Raises:
        KeyError: there is no such set.
    """
    chosen = SETS[name]
    return pack(chosen.ranges, chosen.seq_length, count, seed, kinds)


def pack(
    ranges: tuple[Range, ...],
    seq_length: int,
    count: int,
    seed: int,
    kinds: tuple[str, ...] = KINDS,
) -> PackedSet:
    """About ``count`` samples of documents in ``ranges`` of length, packed best-fit, as ``mtraining data
    prepare`` does by default."""
    rng, lengths = np.random.default_rng(seed), real_lengths()
    share_of = dict(zip(KINDS, SHARES))
    whole = sum(share_of[kind] for kind in kinds)
    datasets, documents = [], []
    for kind in kinds:
        wanted = max(1, round(count * share_of[kind] / whole))
        drawn = draw_lengths(kind, ranges, (wanted + 1) * seq_length, lengths, rng)
        groups = packed_samples(enumerate(drawn), seq_length, "best-fit")
        for sample in (sample for group in groups for sample in group):
            # A piece's end-of-document token belongs to it.
            sizes = np.array([len(piece) for piece in sample], np.int64)
            if sizes.sum() == seq_length and wanted:
                datasets.append(KINDS.index(kind))
                documents.append(sizes)
                wanted -= 1
    order = rng.permutation(len(documents))
    return PackedSet(
        seq_length, np.array(datasets, np.int32)[order], [documents[number] for number in order]
    )


# The file of lengths.


def chapters(text: str) -> list[str]:
    """A text cut at lines that begin with CHAPTER; a text without them is one."""
    parts, lines = [], []
    for line in text.splitlines(keepends=True):
        if line.startswith("CHAPTER") and lines:
            parts.append("".join(lines))
            lines = []
        lines.append(line)
    return [*parts, "".join(lines)]


def measure(sources: list[tuple[str, Path, str]], encode, output: Path) -> None:
    """Write the file of lengths.

    Args:
        sources: kinds, files or folders, and patterns of files in folders.
        encode: a text's tokens.
    """
    sizes: dict[str, list[int]] = {kind: [] for kind in KINDS}
    rate: dict[str, float] = {}
    for kind, path, pattern in sources:
        files = [path] if path.is_file() else sorted(path.rglob(pattern))
        texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
        if kind == "book":
            texts = [chapter for text in texts for chapter in chapters(text)]
        if kind not in rate:
            some = "".join(texts[:: max(1, len(texts) // 40)])[:400_000]
            rate[kind] = len(some) / len(encode(some))
        sizes[kind] += [round(len(text) / rate[kind]) for text in texts]
    found = {}
    for kind in KINDS:
        kept = np.sort([size for size in sizes[kind] if size >= 16])
        if len(kept) > MOST_LENGTHS:
            at = np.linspace(0, len(kept) - 1, MOST_LENGTHS).round().astype(int)
            kept = kept[at]
        found[kind] = kept.tolist()
    about = {
        "documents": {kind: len(sizes[kind]) for kind in KINDS},
        "characters_per_token": {kind: round(rate[kind], 3) for kind in rate},
        "tokens": found,
    }
    output.write_text(json.dumps(about) + "\n", encoding="utf-8")


def show() -> None:
    """A line for each set."""
    for name, chosen in SETS.items():
        found = build(name, 1000, 1)
        samples = found.samples()
        spread = samples.pairs / samples.pairs.mean()
        low, middle, high = np.quantile(spread, (0.05, 0.5, 0.95))
        counts = np.array([len(each) for each in found.documents])
        print(
            f"{name}: {chosen.what}; samples of {chosen.seq_length // K}K, {counts.mean():.1f} documents in "
            f"each; pairs over their mean {low:.2f} {middle:.2f} {high:.2f} (5%, median, 95%)"
        )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("do", choices=("show", "measure"))
    parser.add_argument("source", nargs="*", help="KIND=PATH[:PATTERN]")
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--output", type=Path, default=LENGTHS)
    options = parser.parse_args(words)
    if options.do == "show":
        return show()
    if options.tokenizer is None or not options.source:
        parser.error("measure takes --tokenizer and sources")
    sources = []
    for word in options.source:
        kind, _, rest = word.partition("=")
        path, _, pattern = rest.partition(":")
        if kind not in KINDS or not Path(path).exists():
            parser.error(f"{word!r} is no KIND=PATH of {', '.join(KINDS)}")
        sources.append((kind, Path(path), pattern or "*"))
    from megatron_mtraining.models.tokenizer import open_tokenizer

    return measure(sources, open_tokenizer(options.tokenizer).encode, options.output)


if __name__ == "__main__":
    main()
