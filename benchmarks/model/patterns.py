# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What patterns keep of a trained model's attention (recall), of how many pairs (density): policies,
estimators and block lists beside each other.

A model (a Hugging Face folder or a GGUF file) is run once over each text at each length. Every layer's
queries and keys choose all patterns, and these are judged by ``--rows`` query rows that no estimator samples,
as ``mtraining inspect`` does. One setting holds for all heads: ``recall`` and ``density`` are means over all
heads of the layers that were looked at.

- ``price``: this package's policy; ``coverage``: a baseline (``lib/coverage.py``), by estimator ``strata``,
  the default, and by ``last``, the published one, the last 64 rows.
- ``price`` with estimator ``oracle``: all rows choose, those that judge among them; at most
  ``--oracle-rows``, as masses are summed in 32 bits whose steps grow with the rows. The setting says how
  many.
- ``xattention``, ``moba``: block lists in every head (:func:`select_key_blocks`), by a query block's own
  queries, as published.
Prints a table and appends rows to ``results/patterns.jsonl``; docs/tables/pattern_tables.py reads the density
at a recall from them. Memory is linear in the length, but for the lists of one choice: a byte a head and pair
of blocks, 14 MB at 128K tokens and 14 heads.

    python -m benchmarks.model.patterns --model PATH ... --text FILE ... --seq N ... [--yarn FACTOR]
        [--layers EVERY]
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import BlockListPolicy, MobaPolicy, XAttentionPolicy
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.models.environment import default_dtype
from megatron_mtraining.models.open import open_model
from megatron_mtraining.models.text import tokens_for
from megatron_mtraining.models.types import LayerInput, ModelOptions
from megatron_mtraining.pattern import search_pattern, select_key_blocks
from megatron_mtraining.requirements import require
from megatron_mtraining.tools.inspect.measure import (
    BlockSparsePattern,
    LayerPattern,
    VerticalSlashPattern,
    for_search,
    held_out_rows,
    recall_of_patterns,
)
from megatron_mtraining.tools.report.table import table

from ..lib import record
from ..lib.coverage import from_options

BLOCK = 128
PRICES = (2.0, 1.3, 0.8, 0.5, 0.3, 0.18, 0.11, 0.065, 0.04)
COVERAGES = (0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 0.9, 0.97)
THRESHOLDS = (0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.98, 0.99)
STRIDE = 16
MOST_TOP_K = 8
"""Settings of moba: powers of 2, the largest half of all blocks."""


class Case(NamedTuple):
    """One setting of all heads."""

    policy: str
    estimator: str
    setting: str
    how: MTrainingConfig | BlockListPolicy
    """Settings of the search; a policy to select key blocks by alone."""


class Measured(NamedTuple):
    """What all layers gave: recall and density, float64 ``[cases, layers, h]``."""

    cases: list[Case]
    recall: np.ndarray
    density: np.ndarray


def cases_for(seq: int, oracle_rows: int) -> list[Case]:
    """All that is measured at a length of ``seq`` tokens."""
    cases = [
        Case("price", "strata", f"price {price:g}", MTrainingConfig.from_options(price=price))
        for price in PRICES
    ]
    for estimator in ("strata", "last"):
        for coverage in COVERAGES:
            how = from_options(policy="coverage", estimator=estimator, coverage=coverage)
            cases.append(Case("coverage", estimator, f"coverage {coverage:g}", how))
    rows = min(oracle_rows, seq) // 2 * 2
    which = "all rows" if rows == seq else f"{rows} of {seq} rows"
    for price in PRICES:
        how = MTrainingConfig.from_options(
            price=price, sample_strata=rows // 2, sample_rows=2, held_out_rows=0
        )
        cases.append(Case("price", "oracle", f"price {price:g}, {which}", how))
    for threshold in THRESHOLDS:
        how = XAttentionPolicy(stride=STRIDE, threshold=threshold, lookahead=True)
        cases.append(Case("xattention", "own", f"threshold {threshold:g}", how))
    half = max(1, seq // BLOCK // 2).bit_length() - 1
    for power in range(max(0, half + 1 - MOST_TOP_K), half + 1):
        cases.append(
            Case("moba", "own", f"top_k {2**power}", MobaPolicy(top_k=2**power, lookahead=True))
        )
    return cases


# Measuring a layer.


def choose(case: Case, given: LayerInput, rows: Tensor) -> LayerPattern:
    """The pattern of a layer at one setting."""
    cp = CPGroup(None)
    if isinstance(case.how, MTrainingConfig):
        return VerticalSlashPattern(
            search_pattern(given.query, given.key, case.how, cp, given.softmax_scale)
        )
    blocks = select_key_blocks(
        given.query, given.key, case.how, cp, given.softmax_scale, block_size=BLOCK
    )
    return BlockSparsePattern(blocks, rows, BLOCK)


def measure(given: LayerInput, cases: list[Case], rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Recall by rows (int64 ``[n]``, ascending), and density, of a layer's heads: float64 ``[cases, h]``."""
    given, rows = for_search(given), rows.to(given.query.device)
    patterns = [choose(case, given, rows) for case in cases]
    density = torch.stack([pattern.density for pattern in patterns])
    recall = recall_of_patterns(given, patterns, rows, BLOCK)
    if not recall.isfinite().all():
        raise ConfigError(f"the attention scores of layer {given.layer} are not finite numbers")
    return recall.numpy(), density.cpu().numpy()


def rows_of(measured: Measured) -> list[dict]:
    """A row for each case, of all heads."""
    return [
        {
            "estimator": case.estimator,
            "policy": case.policy,
            "setting": case.setting,
            "density": round(float(density.mean()), 5),
            "recall": round(float(recall.mean()), 5),
        }
        for case, recall, density in zip(*measured)
    ]


def summary(rows: list[dict]) -> str:
    """A line for each row, sparse ones of a series first."""
    rows = sorted(rows, key=lambda row: (row["policy"], row["estimator"], row["density"]))
    names = ("policy", "estimator", "setting")
    lines = [
        [*(row[name] for name in names), f"{row['density']:.1%}", f"{row['recall']:.1%}"]
        for row in rows
    ]
    return table([*names, "density", "recall"], lines)


# Running.


def code_files() -> list[Path]:
    """Python's standard library, top-level sources in order of their names."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def run_model(run, tokens: Tensor, layers: int, options, title: str) -> tuple[Measured, int]:
    """Run a loaded model over tokens ``[s]``, and measure every n-th layer; also says by how many rows."""
    cases = cases_for(len(tokens), options.oracle_rows)
    estimated = [
        case.how
        for case in cases
        if isinstance(case.how, MTrainingConfig) and case.estimator != "oracle"
    ]
    rows = held_out_rows(len(tokens), options.rows, estimated, seed=0)
    rows = rows[: len(rows) // 2 * 2]
    found: list[tuple[np.ndarray, np.ndarray]] = []

    def visit(given: LayerInput) -> None:
        if given.layer % options.layers == 0:
            found.append(measure(given, cases, rows))
            print(f"{title}: layer {given.layer + 1} of {layers}", file=sys.stderr)

    run(tokens, visit)
    recall, density = (np.stack(values, 1) for values in zip(*found))
    return Measured(cases, recall, density), len(rows)


def loads_of(path: Path, options) -> Iterator[tuple[object, float | None, list[int]]]:
    """A source of the model, the YaRN factor it has, and the lengths that it is for: those that the model has
    positions for as it is, then those that take ``--yarn``."""

    def source_with(yarn):
        return open_model(ModelOptions(path, options.device, options.dtype, yarn_factor=yarn))

    source = source_with(None)
    near = [seq for seq in options.seq if seq <= source.shape.positions or options.yarn is None]
    far = [seq for seq in options.seq if seq not in near]
    if near:
        yield source, None, near
    if far:
        yield source_with(options.yarn), options.yarn, far


def run_text(run, source, text: str, tokens: Tensor, yarn: float | None, options) -> None:
    """One model, text and length, from tokens to rows and tables."""
    about = dict(model=options.name, text=text, seq=len(tokens))
    title, cuda = " ".join(map(str, about.values())), options.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(options.device)
    started = time.perf_counter()
    measured, judged = run_model(run, tokens, source.shape.layers, options, title)
    took = f"{time.perf_counter() - started:.0f} s"
    if cuda:
        took += f", {torch.cuda.max_memory_allocated(options.device) / 2**30:.1f} GiB at most"
    _, layers, heads = measured.density.shape
    more = dict(
        layers=layers, every=options.layers, heads=heads, rows=judged, yarn=yarn,
        transformers=record.installed("transformers"), python=platform.python_version(),
    )  # fmt: skip
    rows = [{**about, **row, **more} for row in rows_of(measured)]
    record.append(options.output, rows)
    print(f"\n{title}: {layers} of {source.shape.layers} layers, {judged} rows, {took}")
    print(summary(rows), flush=True)


def run_all(options) -> None:
    """Every model over every text at every length; rows are appended after each."""
    require("transformers", extra="inspect")
    for path in options.model:
        options.name, tokenizer = path.name, None
        for source, yarn, lengths in loads_of(path, options):
            tokenizer = tokenizer or functools.cache(source.tokenizer)
            runs = []
            for text in options.text:
                files = code_files() if text == "code" else [Path(text)]
                most, help = source.shape.positions, "a larger --yarn"
                tokens = tokens_for(files, max(lengths), most, BLOCK, tokenizer, help)
                runs += [(Path(text).name, tokens[:seq]) for seq in lengths]
            with source.loaded() as run:
                for text, tokens in runs:
                    run_text(run, source, text, tokens, yarn, options)


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    """The run that arguments ask for."""
    parser = record.parser(__doc__, "patterns.jsonl")
    add = parser.add_argument
    add("--model", type=Path, nargs="+", required=True, help="Hugging Face folders or .gguf files")
    add("--text", nargs="+", default=["code"], help="files, or code: Python's standard library")
    add("--seq", type=int, nargs="+", default=[16384], help="tokens, multiples of 128")
    what = (
        "let positions go so many times as far, by YaRN, for lengths that the model has too few for"
    )
    add("--yarn", type=float, metavar="FACTOR", help=what)
    add("--layers", type=int, default=1, metavar="EVERY", help="measure every so many-th layer")
    add("--rows", type=int, default=512, help="query rows to judge by (%(default)s)")
    what = "rows that choose with estimator oracle, at most (%(default)s)"
    add("--oracle-rows", type=int, default=4096, metavar="N", help=what)
    add("--device", type=torch.device, help="cuda where there is a GPU, else cpu")
    options = parser.parse_args(words)
    for name, least in dict(layers=1, rows=2, oracle_rows=2).items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more")
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = default_dtype(options.device)
    return options


def main():
    options = options_from()
    try:
        run_all(options)
    except ConfigError as error:
        sys.exit(f"patterns.py: {error}")


if __name__ == "__main__":
    main()
