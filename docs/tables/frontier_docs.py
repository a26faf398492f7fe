# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The frontier of accuracy and speed: joined rows of ``benchmarks.model.frontier``."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.model import ablations, frontier_tables, mean_cost, schedule_tables

from . import step_tables
from .common import Row, all_of, measured_on, percent, rows, source, table, tokens


def frontier_rows() -> list[Row]:
    """The joined rows."""
    return list(rows("frontier"))


def untrained() -> str:
    """The model as it is, by each policy and density."""
    found = [row for row in frontier_rows() if row["zero_over_dense"] is not None]
    return frontier_tables.untrained_table(found) + source(apart(found), "frontier")


def after_training() -> str:
    """The models after training."""
    found = frontier_tables.trained(frontier_rows())
    return frontier_tables.trained_table(found) + source(apart(found), "frontier")


def schedules() -> str:
    """The models after training with prices or learning rates that change."""
    found = frontier_tables.scheduled(frontier_rows())
    used = [*apart(found), *mean_cost.counted(rows("real_operands"))]
    return schedule_tables.schedule_table(found) + source(used, "frontier", "real_operands")


def retrieval() -> str:
    """Needle and RULER after training."""
    found = [row for row in frontier_rows() if row["ruler"] is not None]
    return frontier_tables.retrieval_table(found) + source(apart(found), "frontier")


def chosen(model: str = "smol.gguf", policy: str = "price", wanted: float = 0.15) -> Row:
    """The row of a setting of a model, with most seeds, of the shortest training at a constant rate."""
    return _chosen(frontier_tables.trained(frontier_rows()), model, policy, wanted)


def with_schedule(model: str, wanted: str, decay: str = "cosine", steps: int = 300) -> Row:
    """The row of a schedule of a model with a decay, with most seeds."""
    found = [row for row in frontier_rows() if (row["decay"], row["steps"]) == (decay, steps)]
    return _chosen(found, model, "schedule", wanted)


def _chosen(found: list[Row], *kind: str | float) -> Row:
    found = [row for row in found if (row["model"], row["policy"], row["wanted"]) == kind]
    return min(found, key=lambda row: (-row["seeds"], row["steps"]))


def _parts(seq: int, label: str) -> tuple[Row, float, float]:
    """The profiled step of a length with fixed budgets, its seconds beside attention, and attention's at the
    chosen setting."""
    [row] = [
        row
        for row in step_tables.profiled()
        if (row["world"], row["attention"], row["seq"]) == (4, "mtraining", seq) and row["vertical"]
    ]
    setting = chosen()
    layer = setting[f"layer_ms_{label}"] + setting[f"search_ms_{label}"]
    rest = (row["iter_ms"] - row["breakdown"]["attention"]) / 1000
    return row, rest, step_tables.LAYERS * layer / row["world"] / 1000


def predicted_over_measured(seq: int) -> str:
    """How far the prediction is from the step of a length that was measured, for that step's density."""
    profiled, rest, attention = _parts(seq, LABELS[seq])
    row = step_tables.step_at_price(seq, gpu=profiled["gpu"])
    at_density = rest + attention * row["density"] / chosen()["density_trained"]
    return f"{100 * (at_density / (row['iter_ms'] / 1000) - 1):+.1f}%"


LABELS = {524288: "512k", 131072: "128k"}
"""Lengths with times of layers, and the names that the rows have for them."""


def predicted_seconds(seq: int) -> float:
    """The step of a length at the chosen setting."""
    _, rest, attention = _parts(seq, LABELS[seq])
    return rest + attention


def predicted_steps() -> str:
    """Steps of Qwen2.5-3B's shape on four GPUs at the chosen setting: what a measured step takes beside its
    attention, and the attention of as many measured layers, evenly over the GPUs."""
    setting, body, used = chosen(), [], []
    for seq, label in LABELS.items():
        row, rest, attention = _parts(seq, label)
        step = step_tables.step(seq, gpu=row["gpu"])
        kept, measured = step_tables.kept_seconds(step)
        body.append(
            [
                row["world"], tokens(seq), percent(setting["density_trained"]), f"{attention:.2f}",
                f"{rest:.2f}", f"{attention + rest:.2f}", ("" if measured else "~") + f"{kept:.2f}",
                f"{kept / (attention + rest):.1f}x",
            ]
        )  # fmt: skip
        used += [
            row,
            step_tables.dense_of(step, step_tables.KEPT)
            or step_tables.dense_of(step, step_tables.TWICE),
        ]
    header = [
        "GPUs",
        "tokens",
        "density",
        "attention, predicted",
        "rest, measured",
        "step, predicted",
    ]
    header += ["dense step, output kept", "over dense, predicted"]
    return table(header, body) + source([*apart([setting]), *used], "frontier")


def ablations_by_loss() -> str:
    """What each part costs in loss, after training; policies are in the table after training."""
    return _ablations(lambda row: row["loss_over_dense"] is not None and row["what"] != "policy")


def ablations_by_time() -> str:
    """What each part costs in time, but for rings."""
    return _ablations(lambda row: row["loss_over_dense"] is None and row["what"] != "ring")


RING = re.compile("(.+?): ([0-9.]+[KM]) (.+?), ([0-9]+ ranks on .+)")
"""The setting of an ablation of rings: keys, tokens, pattern, and where it ran."""


def ablations_by_ring() -> str:
    """Inner groups of two ranks over one group, by pattern and length."""
    found = [row for row in rows("ablations") if row["what"] == "ring"]
    cells: dict[tuple[str, str], dict[int, dict[str, Row]]] = {}
    for row in found:
        keys, _, pattern, where = RING.fullmatch(row["setting"]).groups()
        cells.setdefault((where, pattern), {}).setdefault(row["seq"], {})[keys] = row
    lengths = sorted({row["seq"] for row in found})
    body, used = [], []
    for (where, pattern), by_length in sorted(cells.items()):
        line = []
        for seq in lengths:
            pair = by_length.get(seq, {})
            used += [{**row, "commit": row["source_commit"]} for row in pair.values()]
            times = [f"{row['step_ms']:.4g}" for row in pair.values()]
            line.append(f"{pair['2 x 2']['over_base']:.2f} ({' to '.join(times)})" if pair else "")
        body.append([where, pattern, *line])
    where = f"{all_of(used, 'source_gpu')}; commit {all_of(used, 'commit')}"
    return (
        table(["where", "pattern", *map(tokens, lengths)], body)
        + f"\n\nRows: `ablations.jsonl`; from `rings.jsonl`; {where}."
    )


def _ablations(wanted: Callable[[Row], bool]) -> str:
    found = [row for row in rows("ablations") if wanted(row)]
    measured = [row for row in found if "source" not in row]
    files = dict.fromkeys(f"`{row['source']}`" for row in found if "source" in row)
    where = [f"from {', '.join(files)}"] if files else []
    if measured:
        where += [measured_on(measured)]
    commits = [row.get("source_commit", row["commit"]).split(", ") for row in found]
    known = dict.fromkeys(commit for some in commits for commit in some)
    return (
        ablations.ablation_table(found, frontier_rows())
        + f"\n\nRows: `ablations.jsonl`; {'; '.join(where)}; commit {', '.join(known)}."
    )


def apart(found: list[Row]) -> list[Row]:
    """A row for each commit, as a joined row may name several."""
    return [{**row, "commit": commit} for row in found for commit in row["commit"].split(", ")]
