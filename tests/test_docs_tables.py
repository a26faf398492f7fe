# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables, figures and pictures of the docs are what the rows of benchmarks/results have."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
pytest.importorskip("matplotlib")

import generate  # noqa: E402
import pictures  # noqa: E402
import tables  # noqa: E402
from tables import common, step_tables  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.jsonl"))
SCRIPT = re.compile(r"(?:(\w+)\.py|-m benchmarks\.(?:\w+\.)*(\w+)|mtraining (convert))\b")
MOVED = {"index": "selection", "kernels": "attention", "parity": "frontier"}
"""Scripts by the names that they had when rows were measured; what parity measured is in frontier."""


def test_nothing_is_stale():
    assert list(generate.stale()) == []


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_is_a_table_with_its_source(name):
    *lines, blank, source = tables.TABLES[name]().splitlines()
    assert blank == "" and re.fullmatch(
        r"Rows: `\w+\.jsonl?`(, `\w+\.jsonl`)*; .*; commit [0-9a-f, ]+\.", source
    )
    assert len(lines) > 2 and len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_no_figure_begins_a_line():
    for page in generate.marked_pages():
        begun = re.findall(r"^<!-- figure.*", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert begun == [], f"{page}: Markdown ends the paragraph there"


def test_every_table_and_figure_is_shown_somewhere():
    text = "".join(page.read_text(encoding="utf-8") for page in generate.marked_pages())
    assert set(re.findall(r"<!-- rows: (\w+) -->", text)) == set(tables.TABLES)
    assert set(re.findall(r"<!-- figure: (\w+) -->", text)) <= set(tables.FIGURES)
    unknown = "<!-- rows: nothing -->\n<!-- end -->"
    with pytest.raises(KeyError, match="nothing"):
        generate.filled(unknown)


def test_a_new_row_makes_table_figure_and_picture_stale(monkeypatch):
    def faster(name):
        if name != "pretrain":
            return common.rows(name)
        return tuple({**row, "iter_ms": row["iter_ms"] / 2} for row in common.rows(name))

    monkeypatch.setattr(step_tables, "rows", faster)
    assert "| 3.71 |" in tables.TABLES["steps"]() and tables.FIGURES["step_512k"]() == "3.71 s"
    assert pictures.is_stale("steps.png") and not pictures.is_stale("kernels.png")
    assert "docs/performance.md" in generate.stale()


def test_steps_that_differ_in_what_the_backward_keeps_have_rows_of_their_own(monkeypatch):
    step = tables.step(524288)
    price = dict(step, vertical=None, slash=None, price=0.25, slash_cap=308, weights="random")
    pruned = dict(price, backward_threshold=3.0, backward_sampling=False)
    new = [price, pruned, dict(pruned, backward_sampling=True), dict(step, weights="qwen2.5-3b")]
    monkeypatch.setattr(step_tables, "rows", lambda name: (*common.rows(name), *new))
    found = tables.TABLES["steps"]()
    capped = "| price 0.25, at most 1000 columns and 308 slashes"
    assert found.count(capped) == 3 and "and 110 slashes" not in found
    assert found.count(f"{capped}, backward threshold 3 |") == 1
    assert found.count(f"{capped}, backward threshold 3, sampling |") == 1
    assert "| 1000 columns, 100 diagonals, weights qwen2.5-3b |" in found
    assert step_tables.step(524288)["weights"] == "random"


def test_quickstart_quotes_the_figures():
    from megatron_mtraining.tools.quickstart.results import ON_GPUS

    for name in ("", "_dense", "_ratio", "_density", "_recall"):
        assert tables.FIGURES[f"step_512k{name}"]() in ON_GPUS


def test_a_ratio_is_of_one_commit():
    row = dict(tables.step(524288), commit="another")
    assert step_tables.dense_of(row) is None


def test_losses_are_compared_with_the_run_of_the_same_seed():
    off = [dict(seed=1, loss=1.0), dict(seed=2, loss=2.0), dict(seed=3, loss=9.0)]
    own = [dict(seed=2, loss=1.9), dict(seed=1, loss=1.0)]
    found = tables.sparsebalance_tables.over_off(own, off, "loss")
    assert found == "−0.0500 ± 0.0500"


def test_density_between_settings():
    points = [(0.1, 0.9), (0.2, 1.0)]
    assert tables.pattern_tables.density_at(points, 0.95) == pytest.approx(0.15)
    assert tables.pattern_tables.density_at(points, 0.5) is None


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_rows_name_their_origin_and_a_script_that_is_here(file):
    scripts = {path.stem for path in (ROOT / "benchmarks").rglob("*.py")}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert {"gpu", "torch", "triton", "commit", "command"} <= row.keys()
        found = re.search(
            r"(?:(\w+)\.py|-m benchmarks\.(?:\w+\.)*(\w+)|mtraining (convert))\b", row["command"]
        )
        name = found[1] or found[2] or found[3]
        assert MOVED.get(name, name) in scripts, row["command"]


def test_performance_page_is_short():
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    others = [
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("balance", "frontier")
    ]
    for name in pictures.PICTURES:
        assert sum(page.count(f"(images/{name})") for page in (text, *others)) == 1, name


def test_the_frontier_is_that_of_its_runs():
    """benchmarks.model.frontier table joins the rows of runs; docs show what it has joined."""
    from benchmarks.model.frontier_rows import joined

    assert joined(list(tables.rows("frontier_runs"))) == list(tables.rows("frontier"))
