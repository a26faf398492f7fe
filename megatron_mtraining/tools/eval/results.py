# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a run has found: means with their intervals, the table, and the files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from ..report.table import table
from .noise import mean_of
from .options import DENSE, SPARSE, Options
from .perplexity import BINS

COMPARED = ("score", "loss", "key_loss")
"""Values of a sample whose differences between attentions are shown."""
Sample = dict
"""A row of a file of samples, with ``task``, ``length`` and ``attention``."""


def rows_of(samples: list[Sample]) -> list[dict]:
    """Means of each task, length and attention, in the order of the samples."""
    return [
        {**where, **_means(found)}
        for where, found in _grouped(samples, ("task", "length", "attention"))
    ]


def _means(samples: list[Sample]) -> dict:
    found: dict = {"samples": len(samples)}
    for name in ("tokens", "score", "loss", "density", "recall"):
        measured = [each for each in samples if each.get(name) is not None]
        if measured:
            values = [each[name] for each in measured]
            found[name] = mean_of(values, _weights(measured, name)).numbers()
    if "loss_by_position" in samples[0]:
        found["perplexity"] = math.exp(found["loss"]["mean"])
        parts = zip(*(each["loss_by_position"] for each in samples))
        found["loss_by_position"] = [round(sum(part) / len(samples), 6) for part in parts]
    keys = [each for each in samples if each.get("key_tokens")]
    if any("key_tokens" in each for each in samples):
        found["key_tokens"] = sum(each["key_tokens"] for each in keys)
    if keys:
        mean = mean_of([each["key_loss"] for each in keys], _weights(keys, "key_loss"))
        found["key_loss"], found["longppl"] = mean.numbers(), math.exp(mean.value)
    truncated = sum(each.get("truncated", 0) > 0 for each in samples)
    if truncated:
        found["truncated_samples"] = truncated
    found["seconds"] = round(sum(each["seconds"] for each in samples), 1)
    return found


def _weights(samples: list[Sample], name: str) -> list[int] | None:
    """The tokens that each sample's value is a mean of; None where all samples count the same."""
    tokens = {"loss": "answer_tokens", "key_loss": "key_tokens"}.get(name)
    if tokens is None or not all(tokens in each for each in samples):
        return None
    return [each[tokens] for each in samples]


def differences_of(samples: list[Sample]) -> list[dict]:
    """Sparse less dense for the same samples, of each task and length; and of each length over all tasks:
    means with the weights of :func:`rows_of`, so that both have the same sign."""
    found = []
    for names in (("task", "length"), ("length",)):
        for where, of_both in _grouped(samples, names):
            if names == ("length",) and len({each["task"] for each in of_both}) < 2:
                continue
            row = {"task": "all", **where}
            for name in COMPARED:
                pairs = _pairs(of_both, name)
                if pairs:
                    apart = [sparse[name] - dense[name] for dense, sparse in pairs]
                    weights = _weights([dense for dense, _ in pairs], name)
                    row[name] = mean_of(apart, weights).numbers()
            if len(row) > 2:
                found.append(row)
    return found


def _pairs(samples: list[Sample], name: str) -> list[tuple[Sample, Sample]]:
    """The same samples with dense and with sparse attention, where both have this value."""

    def by_id(attention):
        return {
            (each["task"], each["id"]): each
            for each in samples
            if each["attention"] == attention and each.get(name) is not None
        }

    dense, sparse = by_id(DENSE), by_id(SPARSE)
    return [(dense[each], sparse[each]) for each in dense if each in sparse]


def grid_of(samples: list[Sample]) -> dict[str, dict]:
    """Mean score by length and depth, for each attention: ``lengths``, ``depths``, ``scores`` (a row for
    each depth), and ``losses`` likewise."""
    found = {}
    for where, each in _grouped(samples, ("attention",)):
        lengths = sorted({sample["length"] for sample in each})
        depths = sorted({sample["depth"] for sample in each})

        def means(name, each=each, lengths=lengths, depths=depths):
            cells = {
                (w["depth"], w["length"]): mean_of([s[name] for s in c], _weights(c, name)).value
                for w, c in _grouped(each, ("depth", "length"))
            }
            return [[cells[depth, length] for length in lengths] for depth in depths]

        found[where["attention"]] = {
            "lengths": lengths, "depths": depths, "scores": means("score"), "losses": means("loss")
        }  # fmt: skip
    return found


def _grouped(samples: Iterable[Sample], names: tuple[str, ...]) -> list[tuple[dict, list[Sample]]]:
    groups: dict[tuple, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[name] for name in names), []).append(sample)
    return [(dict(zip(names, key)), group) for key, group in groups.items()]


def summary(rows: list[dict], differences: list[dict]) -> str:
    """The tables."""
    values = ("score", "loss", "density", "recall", "perplexity", "longppl")
    names = [name for name in values if any(name in row for row in rows)]
    lines = [
        [row["task"], _length(row), row["attention"], str(row["samples"]),
         f"{row['tokens']['mean']:.0f}", *(_shown(row.get(name)) for name in names)]
        for row in rows
    ]  # fmt: skip
    text = table(["task", "length", "attention", "samples", "tokens", *names], lines)
    if differences:
        names = [name for name in COMPARED if any(name in each for each in differences)]
        lines = [
            [each["task"], _length(each), *(_shown(each.get(name)) for name in names)]
            for each in differences
        ]
        shown = [f"{name.replace('_', ' ')}, mtraining - dense" for name in names]
        text += "\n\n" + table(["task", "length", *shown], lines)
    truncated = sum(row.get("truncated_samples", 0) for row in rows)
    if truncated:
        text += f"\n\nThe beginnings of {truncated} prompts, longer than the model's positions, were cut off."
    return text + "\n\nIn brackets: 95% intervals, by bootstrap over samples."


def _length(row: dict) -> str:
    return "-" if row["length"] is None else str(row["length"])


def _shown(value: dict | float | None) -> str:
    """A cell: a mean and its interval, or a number that has none."""
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return f"{value:.4g}"
    if value["low"] is None:
        return f"{value['mean']:.3f}"
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def write(
    folder: Path,
    options: Options,
    about: dict,
    samples: list[Sample],
    rows: list[dict],
    differences: list[dict],
) -> None:
    """Write ``BENCHMARK.json`` and the pictures into a folder."""
    from ..report import scores

    name = options.benchmark
    found = {**about, "rows": rows, "differences": differences, "samples": samples}
    title = options.model.name or str(options.model)
    if name == "needle":
        found["grid"] = grid = grid_of(samples)
        scores.length_by_depth(folder / "needle.png", grid, title)
    elif name == "perplexity":
        curves = {
            f"{row['attention']}, {row['length']} tokens": (
                [row["length"] * (i + 0.5) / BINS for i in range(BINS)],
                row["loss_by_position"],
            )
            for row in rows
        }
        scores.loss_by_position(folder / "perplexity.png", curves, title)
    else:
        bars = {
            attention: {
                f"{row['task']} {_length(row)}".removesuffix(" -"): row["score"]
                for row in rows
                if row["attention"] == attention
            }
            for attention in options.attentions
        }
        scores.score_by_task(folder / f"{name}.png", bars, f"{title}, {name}")
    text = json.dumps(found, indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
