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
pytest.importorskip("transformers")

import generate  # noqa: E402
import overview  # noqa: E402
import pictures  # noqa: E402
import tables  # noqa: E402
from tables import (  # noqa: E402
    backward_tables,
    common,
    frontier_tables,
    sparsebalance_tables,
    step_tables,
)

from benchmarks.model import frontier_rows  # noqa: E402
from tests.support.frontier_cases import time_row, train_row, zero_row  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.jsonl"))
SCRIPT = re.compile(r"(?:(\w+)\.py|-m benchmarks\.(?:\w+\.)*(\w+)|mtraining (convert))\b")
MOVED = {"index": "selection", "kernels": "attention", "parity": "frontier"}
"""Scripts by the names that they had when rows were measured; what parity measured is in frontier."""


def test_nothing_is_stale(monkeypatch, capsys):
    """Neither tables and pictures nor the pages that are made from the code."""
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0, capsys.readouterr().err
    monkeypatch.setattr(generate, "stale", lambda: {"docs/options.md": None})
    assert generate.main() == 1
    assert capsys.readouterr().err.endswith(
        "docs/options.md is stale: run python docs/generate.py\n"
    )


@pytest.mark.parametrize("name", sorted(set(tables.TABLES) - {"refusals"}))  # of the code
def test_a_table_is_a_table_with_its_source(name):
    made = tables.TABLES[name]()
    *lines, blank, source = made.splitlines()
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


@pytest.fixture
def files(monkeypatch):
    """Rows of files in place of those that are there: by name."""
    found: dict = {}
    read = common.read
    monkeypatch.setattr(common, "read", lambda name: found[name] if name in found else read(name))
    return found


def test_a_new_row_makes_table_figure_and_picture_stale(files):
    files["pretrain"] = [{**row, "iter_ms": row["iter_ms"] / 2} for row in common.read("pretrain")]
    assert "| 3.71 |" in tables.TABLES["steps"]() and tables.FIGURES["step_512k"]() == "3.71 s"
    assert pictures.is_stale("steps.png") and not pictures.is_stale("kernels.png")
    assert "docs/performance.md" in generate.stale()


def test_cells():
    row = dict(seq=2**20, gpu="NVIDIA H100 80GB HBM3", share=1, less=-0.001, none=None)
    assert common.cell("{seq:K} {gpu:gpu} {share:share} {less:over} {less:share2}", row) == (
        "1M H100 100% −0.10% -0.10%"
    )
    assert common.cell("{none:.2f}|{none:–share}|{x:K}", row, x=131072) == "|–|128K"


def test_a_table_leaves_out_empty_columns_and_names_the_rows_behind_its_lines(files):
    of = dict(gpu="none", torch="2", triton="3")
    files["made"] = [dict(a=n, b=None, kind=n % 2, commit=f"c{n}", **of) for n in range(4)]
    made = common.Table(
        "made more",
        {"a": "{a}", "b": "{b}", "c": lambda row: row["a"] + 1},
        where=lambda row: row["a"],
        newest=("kind",),
        order=lambda row: (-row["a"],),
    )
    assert made() == (
        "| a | c |\n| --- | --- |\n| 3 | 4 |\n| 2 | 3 |\n\n"
        "Rows: `made.jsonl`, `more.jsonl`; no GPU, torch 2, Triton 3; commit c3, c2."
    )
    joined = common.Table("made", {"a": "{a}"}, find=lambda rows: [dict(a="all", used=rows)])
    assert joined().endswith(
        "| all |\n\nRows: `made.jsonl`; no GPU, torch 2, Triton 3; commit c0, c1, c2, c3."
    )


def with_steps(files, *more):
    """The rows of steps, and more."""
    files["pretrain"] = [*common.read("pretrain"), *more]


def test_steps_that_differ_in_what_the_backward_keeps_have_rows_of_their_own(files):
    step = tables.step(524288)
    price = dict(step, vertical=None, slash=None, price=0.25, slash_cap=308, weights="random")
    with_steps(files, price, dict(price, backward_threshold=3.0), dict(step, weights="qwen2.5-3b"))
    found = tables.TABLES["steps"]()
    capped = "| price 0.25, at most 1000 columns and 308 slashes"
    assert found.count(capped) == 2 and "and 110 slashes" not in found
    assert found.count(f"{capped}, backward threshold 3 |") == 1
    assert "| 1000 columns, 100 diagonals, trained weights |" in found
    assert step_tables.step(524288)["weights"] == "random"


def test_a_ratio_is_over_a_dense_step_with_the_same_recomputation(files):
    row = tables.step(524288)
    twice = step_tables.dense_of(row, "twice")
    kept = dict(twice, dense_recompute="output kept", iter_ms=5 * row["iter_ms"], commit="another")
    before = step_tables.ratio(row, "output kept")
    assert before.startswith("~"), "estimated"
    assert 3 * row["iter_ms"] < 1000 * step_tables.kept_seconds(row)[0] < twice["iter_ms"]
    with_steps(files, kept)
    assert step_tables.ratio(row, "output kept") == "5.0x" and step_tables.over_dense(row) == 5
    assert step_tables.ratio(row, "twice") == f"{twice['iter_ms'] / row['iter_ms']:.1f}x"
    assert "dense, Transformer Engine, loss in chunks; output kept" in tables.TABLES["steps"]()
    again = dict(row, command=row["command"] + " --mtraining-recompute-attention")
    assert step_tables.over_dense(again) == twice["iter_ms"] / row["iter_ms"]


def test_a_dense_step_of_other_gpus_or_versions_does_not_count():
    row = tables.step(524288)
    assert step_tables.dense_of(dict(row, commit="another"), "twice")
    assert step_tables.dense_of(dict(row, gpu="another"), "twice") is None
    assert step_tables.dense_of(dict(row, versions={}), "twice") is None


def test_mfu_of_a_dense_step():
    row = dict(seq=4, batch=1, world=2, iter_ms=1000.0, density=1.0)
    pairs = 4 * 16 * 36 * 128 * 10  # products of queries with keys, and of as many with values
    flops = 6 * step_tables.WEIGHTS * 4 + 3 * pairs
    assert step_tables.mfu(row) == pytest.approx(flops / (2 * step_tables.PEAK))
    assert step_tables.tokens_a_second(row) == 2


def real_row(layer, price=0.31, text="code", **more):
    times = dict(search_ms=1.0, forward_ms=2.0, backward_ms=3.0, dense_forward_ms=12.0)
    times |= dict(dense_backward_ms=18.0, fa4_forward_ms=10.0, fa4_backward_ms=14.0)
    row = dict(
        model="qwen.gguf", text=text, seq=131072, price=price, backward_threshold=0.0, layer=layer
    )
    row |= dict(
        density=0.1 * layer, backward_density=0.1 * layer, gpu="NVIDIA H200", torch="1", triton="1"
    )
    return row | times | dict(commit="abc") | more  # fmt: skip


def test_real_operands_are_summed_over_layers(files):
    files["real_operands"] = (
        real_row(1, forward_ms=99.0),
        real_row(1),
        real_row(2, forward_ms=8.0),
        real_row(3, text="book"),
    )
    _, code = [line for line in tables.TABLES["real_operands"]().splitlines() if "128K" in line]
    assert code == "| code, 128K | 0.31 | 15.0% | 0.300 | 0.375 | 0.200 to 0.400 | 2 |"
    said = "3.3x cuDNN's dense attention, 2.7x FlashAttention-4's"
    assert tables.FIGURES["real_price"]() == said


def test_later_tokens(files):
    def of_text(text, tokens, difference):
        return dict(text=text, tokens=tokens, difference=difference, stderr=0.003)

    same = dict(model="smol.gguf", seq=16384, steps=300, seed=1, lr=3e-5, data="a")
    same |= dict(gpu="none", torch="1", triton="1", commit="abc")
    dense = dict(same, stage="train", policy="dense", own=2.0, dense=2.0)
    row = dict(same, policy="moba", wanted=0.15, density=0.15, own=2.02, dense=2.01)
    row["measured"] = [
        of_text(text, tokens, value)
        for tokens, values in {
            "32 before the cut": (0.03, -0.01), "all before the cut": (0.0, 0.0), "copies": (0.5, 0.7)
        }.items()
        for text, value in zip(("code", "book"), values)
    ]  # fmt: skip
    files.update(later_tokens=[row], frontier_runs=[dict(dense, seed=2, dense=9.0), dense])
    expected = (
        "| moba, as published, 15.0% | its block | +1.00%; +1.50% ± 0.11 | +0.50% | +0.0100 ± 0.0021 | "
        "+0.0000 ± 0.0021 | +0.6000 ± 0.0021 |"
    )
    assert expected in tables.TABLES["later_tokens"]()
    files["later_tokens"].append(dict(row, decay="cosine"))
    files["frontier_runs"].append(dict(dense, decay="cosine", dense=1.0))
    made = tables.TABLES["later_tokens"]()
    assert expected in made and made.count("| moba, as published") == 2 and "+102.00%" in made


def test_a_pruned_backward_is_compared_with_runs_of_its_decay(files):
    def run(threshold, loss, **more):
        same = dict(
            model="smol.gguf", seq=16384, seed=1, steps=300, lr=3e-5, data="a", stage="train"
        )
        return dict(same, forward="dense", threshold=threshold, dense=loss, **more)

    pruned, *files["backward"] = run(3, 1.01), run(0, 1.0), run(0, 9.0, decay="cosine")
    assert backward_tables.over([pruned], "dense", "dense") == "+1.00%"
    assert backward_tables.over([run(3, 9.18, decay="cosine")], "dense", "dense") == "+2.00%"


def test_balance_by_length_has_no_predicted_times(files):
    some = common.read("sparsebalance")
    none = [{**row, "predicted_over_measured": None} for row in some if row["mode"] == "length"]
    files["sparsebalance"] = [*some, *none]
    lines = sparsebalance_tables.over_ranks().splitlines()
    assert {line.split(" | ")[-1] for line in lines if "by length" in line} == {"– |"}


def test_density_between_settings():
    points = [(0.1, 0.9), (0.2, 1.0)]
    assert tables.pattern_tables.density_at(points, 0.95) == pytest.approx(0.15)
    assert tables.pattern_tables.density_at(points, 0.5) is None


def test_tables_of_the_frontier_have_the_spread_of_seeds(files):
    """A row that is not trained, or dense, is in no table of trained ones."""
    runs = [train_row("dense", None, seed, base, base) for seed, base in ((1, 2.0), (2, 3.0))]
    runs += [train_row("price", 0.15, 1, 2.02, 2.01), train_row("price", 0.15, 2, 3.06, 3.03)]
    runs += [train_row("target", 0.95, 1, 2.04, 2.0), zero_row("window", 0.15, 0.2)]
    files["frontier"] = frontier_rows.joined([*runs, time_row("price", 0.15, 131072, 20.0)])
    trained = tables.TABLES["frontier_trained"]()
    assert "| +0.75% ± 0.25 | +1.50% ± 0.50 |" in trained
    kept = frontier_tables.trained(files["frontier"])
    assert [row["policy"] for row in kept] == ["price", "target"]
    assert overview.points(kept, "density")["price"] == [
        (kept[0]["density_trained"], pytest.approx(0.75), pytest.approx(0.25))
    ]
    base = dict(
        base="price@0.15", model="m", seq=16384, steps=300, what="dense steps", setting="last 10%"
    )
    base |= dict(variant="cool-10", own_over_dense=0.03, dense_share=0.1, density=0.1)
    base |= dict(gpu="none", torch="2", triton="3", commit="abc")
    files["ablations"] = [
        dict(base, seed=seed, loss_over_dense=loss) for seed, loss in ((1, 0.01), (2, 0.03))
    ]
    line = tables.TABLES["ablations_by_loss"]().splitlines()[2]
    assert "| m, 16K | dense steps: last 10% | 2 | 10.0% | +2.00% | +3.00% |" in line
    assert f"| {0.1 + 0.9 * 0.203:.3f} |" in line


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
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/balance.md", "docs/frontier.md", "README.md")
    ]
    for name in pictures.PICTURES:
        assert sum(page.count(f"images/{name})") for page in (text, *others)) == 1, name


def test_the_frontier_is_that_of_its_runs():
    """benchmarks.model.frontier table joins the rows of runs; docs show what it has joined."""
    found = frontier_rows.joined(common.read("frontier_runs"), common.read("real_operands"))
    assert found == list(common.read("frontier"))
