# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Whole steps of Megatron-LM over real data-parallel ranks, on a mixed set, in one mode of the balancer.

    python -m benchmarks.sparsebalance.ranks MEGATRON_LM --mode both --gpus 4 --cp 2 --folder FOLDER

Trains with a recipe (``--script``) on samples that are packed as ``mtraining data prepare`` packs them: a
dataset for each kind of text, which the folder keeps for the other modes. Tokens are cut from real texts with
``--cache`` (``benchmarks.model.texts`` writes it), and are random ones without. Weights are those of
``--weights``, a converted checkpoint, and random ones without. Random weights attend evenly: kinds of text do
not differ in density then, only documents in length, and a cap on slashes sets the density (``--slash-cap``).
Rows say which it was.

Appends a row to ``results/sparsebalance.jsonl`` with ``source`` ranks: from the log of the steps after
``--learn``, the attention time of the slowest rank, its ratio to the mean and the idle share, as measured and
as predicted, and the time of the step. Mode ``off`` runs as tuning that may move next to no attention mass,
which reports the times and leaves prices as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np

from megatron_mtraining import ConfigError

from ..lib import record
from ..model import pretrain, sets, texts

SCRIPT = pretrain.ROOT / "examples" / "qwen2.5-0.5b-128k" / "run.sh"
MODES = {
    "off": ("off", False),
    "length": ("length", False),
    "cost": ("cost", False),
    "tuning": ("off", True),
    "both": ("cost", True),
}
"""How samples are placed, and whether prices are tuned."""
VOCABULARY = 151936
"""Of that recipe without a converted model."""
SEED = 1
"""Of the set."""
MASS = 0.01
"""Attention mass that tuning may move, as --mtraining-tuning-mass."""
NOTHING = 1e-9
"""A share of attention mass that moves no price, but lets ranks report their times."""
LINE = re.compile(
    r"\[mtraining\] iteration (\d+) \| attention of the slowest rank: measured (\S+) ms \(max/mean (\S+), "
    r"idle (\S+)%\)(?: \| predicted (\S+) ms)?"
)
PRICES = re.compile(r"\| price times (\S+) to (\S+)$", re.MULTILINE)


def words_of(mode: str) -> list[str]:
    """The options of a mode."""
    batching, tuning = MODES[mode]
    words = ["--mtraining-batching", batching]
    if tuning or mode == "off":
        words += ["--mtraining-tuning", "on"]
        words += ["--mtraining-tuning-mass", str(MASS if tuning else NOTHING)]
    return words


def write_set(folder: Path, options) -> None:
    """An indexed dataset of a set's samples for each kind, ``KIND.bin`` and ``KIND.idx``: a sequence a
    sample, and each document's last token is the end of a document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokens, rng = None, np.random.default_rng(SEED)
    kinds = sets.KINDS
    if options.cache:
        with np.load(options.cache, allow_pickle=False) as found:
            tokens = texts.Texts({kind: found[kind] for kind in found.files}, seed=SEED)
        kinds = tuple(kind for kind in sets.KINDS if kind in tokens.streams)
    count = options.iterations * options.batch + 2 * len(kinds)
    ranges = sets.ranges_at(options.seq)
    packed = sets.pack(ranges, options.seq, count, SEED, kinds)
    end = options.vocabulary - 1
    dtype = np.uint16 if options.vocabulary <= 2**16 else np.int32
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number in sorted(set(packed.datasets.tolist())):
        prefix = partial / sets.KINDS[number]
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
        for dataset, lengths in zip(packed.datasets, packed.documents):
            if dataset != number:
                continue
            if tokens is None:
                sample = rng.integers(0, end, options.seq)
            else:
                sample = np.minimum(tokens.sample(dataset, lengths).numpy(), end - 1)
            sample[np.cumsum(lengths) - 1] = end
            builder.add_document(sample.astype(dtype), [options.seq])
        builder.finalize(f"{prefix}.idx")
    partial.rename(folder)  # whole, or not there


def prefixes(options) -> list[Path]:
    """The datasets of the set, written if they are not there."""
    texts_of = options.cache.stem if options.cache else "random"
    size = f"{options.seq}-{options.batch}-{options.iterations}"
    folder = options.folder / f"bimodal-{texts_of}-{size}"
    if not folder.is_dir():
        write_set(folder, options)
    return [path.with_suffix("") for path in sorted(folder.glob("*.idx"))]


def figures(log: str, learn: int) -> dict:
    """Means over the steps after ``learn``.

    Raises:
        ConfigError: the log has no attention times of those steps.
    """
    found = [each for each in LINE.findall(log) if int(each[0]) > learn]
    if not found:
        raise ConfigError(f"the log has no attention times of steps after {learn}")
    measured, over, idle = (np.array([float(each[n]) for each in found]) for n in (1, 2, 3))
    predicted = [float(each[4]) / float(each[1]) for each in found if each[4]]
    prices = [float(price) for both in PRICES.findall(log) for price in both]
    return dict(
        attention_ms=round(float(measured.mean()), 3), max_over_mean=round(float(over.mean()), 5),
        idle_share=round(float(idle.mean()) / 100, 5),
        predicted_over_measured=round(float(np.mean(predicted)), 5) if predicted else None,
        multipliers=[min(prices), max(prices)] if prices else None, steps=len(found),
    )  # fmt: skip


def run(options) -> dict:
    """A run of Megatron, and its row."""
    words = ["run", options.megatron, "--attention", "mtraining", "--script", options.script]
    words += ["--gpus", options.gpus, "--seq-length", options.seq, "--price", options.price]
    words += ["--iterations", options.iterations, "--warm-up", options.learn]
    words += ["--data", *prefixes(options)]
    words += ["--weights", options.weights] if options.weights else []
    words += ["--reset-attention-mask", "--eod-mask-loss", *words_of(options.mode)]
    words += ["--mtraining-slash-cap", options.slash_cap] if options.slash_cap else []
    given = pretrain.parse([str(word) for word in [*words, *options.more]])
    # Of a recipe, which are no options of pretrain.
    os.environ.update(CP=str(options.cp), BATCH=str(options.batch))
    log, _ = pretrain.follow_run(given)
    step = pretrain.row_of(given, log)
    found = pretrain.read_log(log)
    kept = ("density", "recall", "max_alloc_gb", "losses", "weights", "versions", "layers")
    dp = options.gpus // options.cp
    return dict(
        source="ranks", set="bimodal", gpus=options.gpus, dp=dp, cp=options.cp, mode=options.mode,
        price=options.price, slash_cap=options.slash_cap, seq=options.seq, seed=SEED,
        model=options.name or pretrain.model_of(options.script),
        texts=options.cache.stem if options.cache else "random",
        step_ms=statistics.median(
            ms for step, ms in found["ms"].items() if step > options.learn
        ),
        **figures(log, options.learn), **{name: step[name] for name in kept},
    )  # fmt: skip


def vocabulary_of(weights: Path) -> int | None:
    """Entries of the vocabulary of a converted checkpoint; None if it does not say."""
    flags = weights / "megatron_args.sh"
    text = flags.read_text(encoding="utf-8") if flags.is_file() else ""
    found = re.search(r"--padded-vocab-size\s+(\d+)", text)
    return int(found[1]) if found else None


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options that can work; else ends with what is wrong."""
    parser = record.parser(__doc__, "sparsebalance.jsonl")
    add = parser.add_argument
    add("megatron", type=Path)
    add("--mode", choices=list(MODES), required=True)
    add("--folder", type=Path, required=True, help="keeps the datasets, which modes share")
    add("--seq", type=int, default=sets.SEQ_LENGTH,
        help="tokens of a sample, and all lengths in proportion (%(default)s)")  # fmt: skip
    add("--gpus", type=int, default=4)
    add("--cp", type=int, default=1)
    add("--batch", type=int, default=16, help="samples of a step")
    add("--iterations", type=int, default=12)
    add("--learn", type=int, default=4, help="first steps that do not count")
    add("--price", type=float, default=0.25)
    add("--slash-cap", type=int, help="as --mtraining-slash-cap, for random weights")
    add("--script", type=Path, default=SCRIPT, help="a recipe")
    add("--name", help="the row's name for the model (default: the recipe's)")
    add(
        "--vocabulary",
        type=int,
        help="of the model; its last entry ends documents (default: the weights', or the recipe's)",
    )
    add("--weights", type=Path, help="a converted checkpoint (default: random weights)")
    add("--cache", type=Path, help="tokens of texts by kind (default: random tokens)")
    # What this does not know goes to Megatron.
    options, options.more = parser.parse_known_args(words)
    options.megatron, options.folder = options.megatron.resolve(), options.folder.resolve()
    if not (options.megatron / "pretrain_gpt.py").is_file():
        parser.error(f"there is no pretrain_gpt.py in {options.megatron}")
    if options.gpus < 1 or options.cp < 1 or options.gpus % options.cp:
        parser.error(f"--cp {options.cp} does not divide --gpus {options.gpus}")
    dp = options.gpus // options.cp
    if dp < 2:
        parser.error(f"--gpus {options.gpus} / --cp {options.cp} is one rank: nothing to balance")
    if options.batch < 1 or options.batch % dp:
        parser.error(f"--batch {options.batch} is no multiple of {dp} data-parallel ranks")
    if not 0 <= options.learn < options.iterations:
        parser.error(
            f"--learn {options.learn} leaves none of {options.iterations} steps that counts"
        )
    if options.vocabulary is None:
        options.vocabulary = vocabulary_of(options.weights) if options.weights else VOCABULARY
        if options.vocabulary is None:
            parser.error(f"--weights {options.weights} has no megatron_args.sh with a vocabulary")
    if options.cache and not options.cache.is_file():
        parser.error(f"there is no {options.cache}: benchmarks.model.texts writes it")
    return options


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    sys.path.append(
        str(options.megatron)
    )  # its indexed datasets, where megatron-core is not installed
    try:
        row = run(options)
    except ConfigError as error:
        sys.exit(f"ranks.py: {error}")
    record.append(options.output, [row])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
