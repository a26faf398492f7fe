# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The frontier of accuracy and speed: joined rows of ``benchmarks.model.frontier``, in words and tables."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.lib.policies_at_density import AS_PUBLISHED_BY_BLOCK
from benchmarks.model.frontier_rows import CONSTANT, SELECTING
from megatron_mtraining.config.schedule import NAMED, parse

from . import step_tables
from .common import Columns, Row, Table, cell, rows, values

MODELS = {"smol.gguf": "SmolLM2-135M-Instruct", "qwen.gguf": "Qwen2.5-Coder-0.5B-Instruct"}
"""By file name, as rows have it."""
LABELS = {
    "dense": "dense",
    "published": "fixed: 1000 columns, 100 diagonals, last 64 rows",
    "price": "price",
    "target": "price, target recall",
    "fixed": "fixed",
    "fixed_last": "fixed, last 64 rows",
    "coverage": "coverage",
    "coverage_last": "coverage, last 64 rows",
    "price_last": "price, last 64 rows",
    "xattention": "xattention, as published",
    "moba": "moba, as published",
    "window": "sliding window",
    "xattention_previous": "xattention",
    "moba_previous": "moba",
    "schedule": "price",
}
MARK = " †"
"""Of own-attention losses of policies that look ahead."""
TEXTS = ("code", "book", "speech")


# Words


def name_of(row: Row) -> str:
    """Policy, and how the learning rate decays if it does."""
    label = LABELS.get(row["policy"], row["policy"])
    if row["policy"] == "target":
        label = f"{label} {row['wanted']:g}"
    if row["policy"] == "schedule":
        label = f"{label} {prices_of(row)}"
    return f"{label}, {decay_name(row)}" if row.get("decay") not in (None, CONSTANT) else label


def prices_of(row: Row) -> str:
    """The prices of a run with a schedule: its name or its points, or the one price."""
    text = row["setting"]["schedule"]
    schedule = parse("schedule", text)
    if len(schedule.points) == 1:
        return f"{schedule.lowest:g}"
    named = (
        name for name, other in NAMED["schedule"].items() if parse("schedule", other) == schedule
    )
    return f"`{next(named, text)}`"


def decay_name(row: Row) -> str:
    return f"linear over {row['decay']}" if "-" in row["decay"] else row["decay"]


def model_of(row: Row) -> str:
    return MODELS.get(row["model"], row["model"])


def run_of(row: Row) -> str:
    """Model, length and steps."""
    return model_of(row) + cell(", {seq:K}, {steps}", row)


def threshold_of(row: Row) -> str:
    return f"{row['backward_threshold']:g}" if row["backward_threshold"] else "off"


def with_spread(ratio: float | None, spread: float | None) -> str:
    """A ratio less 1 in percent, with half of its range; None of one."""
    return cell("{x:over}", x=ratio) + ("" if spread is None else f" ± {100 * spread:.2f}")


def losses(row: Row, name: str) -> str:
    """A loss over dense with its spread over seeds."""
    return with_spread(row[f"{name}_over_dense"], row[f"{name}_spread"])


def by_text(row: Row, name: str) -> str:
    """A loss over dense by text."""
    found = row[f"{name}_by_text"]
    return ", ".join(cell("{x:–over}", x=found.get(kind)) for kind in TEXTS) if found else ""


def times(row: Row, label: str) -> str:
    """Search, forward and backward over dense."""
    layer, search, dense = values(row, *(f"{n}_ms_{label}" for n in ("layer", "search", "dense")))
    return "" if layer is None else f"{(layer + search) / dense:.3f}"


def times_of(row: Row) -> str:
    """Of a layer over dense: at 128K tokens, then at 512K."""
    found = [times(row, label) for label in LABELS_OF.values()]
    return ", ".join(each or "–" for each in found) if any(found) else ""


LABELS_OF = {131072: "128k", 524288: "512k"}
"""Lengths with times of layers, and the names that the rows have for them."""


# Which rows


def order(row: Row) -> tuple:
    return (
        row["model"],
        row["seq"],
        row["steps"] or 0,
        list(LABELS).index(row["policy"]),
        -row["density"],
    )


def is_scheduled(row: Row) -> bool:
    """Whether prices or learning rates of a run have a schedule."""
    return row["policy"] == "schedule" or row["decay"] not in (None, CONSTANT)


def trained(found: Iterable[Row]) -> list[Row]:
    """Rows of training in their order, at the last learning rate of each model, which is constant; dense
    runs and schedules left out."""
    found = [row for row in found if row["steps"] and not is_scheduled(row)]
    rates = {row["model"]: row["lr"] for row in found}
    found = [row for row in found if row["policy"] != "dense" and row["lr"] == rates[row["model"]]]
    return sorted(found, key=order)


def scheduled(found: Iterable[Row]) -> list[Row]:
    """Rows of training with a schedule in their order; dense runs left out."""
    found = [row for row in found if is_scheduled(row) and row["policy"] != "dense"]
    names = ("model", "seq", "steps", "decay")
    return sorted(found, key=lambda row: (*values(row, *names), -row["density_trained"]))


def chosen(model: str = "smol.gguf", policy: str = "price", wanted: float = 0.15) -> Row:
    """The row of a setting of a model, with most seeds, of the shortest training at a constant rate."""
    return _chosen(trained(rows("frontier")), model, policy, wanted)


def with_schedule(model: str, wanted: str, decay: str = "cosine", steps: int = 300) -> Row:
    """The row of a schedule of a model with a decay, with most seeds."""
    found = [row for row in rows("frontier") if (row["decay"], row["steps"]) == (decay, steps)]
    return _chosen(found, model, "schedule", wanted)


def _chosen(found: list[Row], *kind: str | float) -> Row:
    found = [row for row in found if values(row, "model", "policy", "wanted") == kind]
    return min(found, key=lambda row: (-row["seeds"], row["steps"]))


# Tables

RUN: Columns = {"model, tokens, steps": run_of, "policy": name_of}

untrained = Table(
    "frontier",
    {
        "model, tokens": lambda row: model_of(row) + cell(", {seq:K}", row),
        "policy": lambda row: name_of({**row, "decay": None}),
        "density": "{density:share}",
        "recall": lambda row: (
            cell("{recall:.3f}", row) + ("*" if row["recall_by"] == SELECTING else "")
        ),
        "loss over dense": "{zero_over_dense:over}",
        "needle; with a dense tail": lambda row: "; ".join(
            f"{x:.2f}" for x in values(row, "zero_needle", "zero_needle_tail") if x is not None
        ),
        "answer loss": "{zero_answer_loss:.2f}",
        "layer 128K, 512K / cuDNN": times_of,
    },
    where=lambda row: row["zero_over_dense"] is not None,
    newest=("model", "seq", "policy", "wanted"),
    order=lambda row: (*order(row)[:2], *order(row)[3:]),
)
"""Models as they are, by each policy and density."""


def _own(row: Row) -> str:
    own = losses(row, "trained_own") + (MARK if row["policy"] in AS_PUBLISHED_BY_BLOCK else "")
    return "; ".join(filter(None, (own, by_text(row, "trained_own"))))


after_training = Table(
    "frontier",
    {
        **RUN,
        "seeds": "{seeds}",
        "density, recall": "{density_trained:share}, {recall_trained:.3f}",
        "dense-attention loss over dense": lambda row: losses(row, "trained_dense"),
        "code, book, speeches": lambda row: by_text(row, "trained_dense"),
        "own-attention loss; code, book, speeches": _own,
        "layer 128K, 512K / cuDNN": times_of,
    },
    find=trained,
)

schedules = Table(
    "frontier",
    {
        "model, tokens, steps": run_of,
        "learning rate": lambda row: f"{row['lr']:g}, {decay_name(row)}",
        "price, by share of the run": lambda row: (
            prices_of(row) if row["schedule"] else name_of(row)
        ),
        "threshold": threshold_of,
        "seeds": "{seeds}",
        "pairs": "{density_trained:share}",
        "mean cost": "{mean_cost:–.3f}",
        "dense-attention loss over dense": lambda row: losses(row, "trained_dense"),
        "code, book, speeches": lambda row: by_text(row, "trained_dense"),
        "own-attention loss": lambda row: losses(row, "trained_own"),
    },
    find=scheduled,
)
"""Prices and learning rates that change over a run."""


def _four(name: str) -> str:
    """A figure with own attention, with a dense tail, with dense attention, and of the dense run."""
    return ", ".join(f"{{{name}{kind}:–.2f}}" for kind in ("", "_tail", "_dense", "_of_dense"))


def _interval(row: Row) -> str:
    """A mean with its 95% interval, as ``mtraining eval`` has it."""
    found = row["ruler_loss_more"]
    if not found:
        return ""
    text = f"{found[0]:+.2f}" + (f" [{found[1]:.2f}, {found[2]:.2f}]" if len(found) == 3 else "")
    return text.replace("-", "−")


retrieval = Table(
    "frontier",
    {
        **RUN,
        "density": "{density_trained:share}",
        "needle: own attention, with a dense tail, dense attention, dense run": _four("needle"),
        "RULER's answers, likewise": _four("ruler"),
        "loss of the answers, likewise": _four("ruler_loss"),
        "dense attention − dense run, 95%": _interval,
    },
    find=lambda found: [
        row for row in (*trained(found), *scheduled(found)) if row["ruler"] is not None
    ],
)
"""Needle and RULER after training."""


# Predicted steps


def _parts(seq: int) -> tuple[Row, float, float]:
    """The profiled step of a length with fixed budgets, its seconds beside attention, and attention's at the
    chosen setting."""
    [row] = [
        row for row in step_tables.breakdown.shown()
        if (row["world"], row["attention"], row["seq"]) == (4, "mtraining", seq) and row["vertical"]
    ]  # fmt: skip
    setting, label = chosen(), LABELS_OF[seq]
    layer = setting[f"layer_ms_{label}"] + setting[f"search_ms_{label}"]
    rest = (row["iter_ms"] - row["breakdown"]["attention"]) / 1000
    return row, rest, step_tables.LAYERS * layer / row["world"] / 1000


def predicted_over_measured(seq: int) -> str:
    """How far the prediction is from the step of a length that was measured, for that step's density."""
    profiled, rest, attention = _parts(seq)
    row = step_tables.step_at_price(seq, gpu=profiled["gpu"])
    at_density = rest + attention * row["density"] / chosen()["density_trained"]
    return f"{100 * (at_density / (row['iter_ms'] / 1000) - 1):+.1f}%"


def _predictions(_: list[Row]) -> list[Row]:
    """Steps of Qwen2.5-3B's shape on four GPUs at the chosen setting: what a measured step takes beside its
    attention, and the attention of as many measured layers, evenly over the GPUs."""
    found = []
    for seq in sorted(LABELS_OF, reverse=True):
        row, rest, attention = _parts(seq)
        step = step_tables.step(seq, gpu=row["gpu"])
        kept, measured = step_tables.kept_seconds(step)
        dense = [step_tables.dense_of(step, each) for each in (step_tables.KEPT, step_tables.TWICE)]
        found.append(
            dict(
                world=row["world"], seq=seq, density=chosen()["density_trained"], attention=attention,
                rest=rest, step=attention + rest, about="" if measured else "~", kept=kept,
                over=kept / (attention + rest), used=[chosen(), row, dense[0] or dense[1]],
            )
        )  # fmt: skip
    return found


predicted_steps = Table(
    "frontier pretrain",
    {
        "GPUs": "{world}",
        "tokens": "{seq:K}",
        "density": "{density:share}",
        "attention, predicted": "{attention:.2f}",
        "rest, measured": "{rest:.2f}",
        "step, predicted": "{step:.2f}",
        "dense step, output kept": "{about}{kept:.2f}",
        "over dense, predicted": "{over:.1f}x",
    },
    find=_predictions,
)
