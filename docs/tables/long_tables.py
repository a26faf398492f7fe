# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A trained model trained on at length: loss and time of the same runs."""

from __future__ import annotations

from collections.abc import Callable

from .common import Column, Row, Table, cell, filled, rows, values
from .frontier_tables import by_text

WAYS = {"dense": "dense", "target": "--mtraining-target-recall", "schedule": "--mtraining-schedule"}


def options(row: Row) -> str:
    """How a run was started."""
    policy, _, at = row["policy"].partition("@")
    points, _, threshold = at.partition("/")
    if policy == "dense":
        return "dense (Transformer Engine)"
    pruned = f" --mtraining-backward-threshold {threshold}" if threshold else ""
    return f"`{WAYS[policy]} {points}{pruned}`"


def of_sparse(text: Column) -> Callable[[Row], str]:
    """A cell of sparse runs alone."""
    return lambda row: "" if row["policy"] == "dense" else filled(text, row)


def times(share: float | None) -> str:
    return "" if share is None else f"{1 / share:.1f}x"


def right(row: Row, name: str, samples: str) -> str:
    """Right answers with dense attention and, of sparse runs, with the pattern."""
    if not row[samples]:
        return ""
    dense, own = (round(each * row[samples]) for each in row[name])
    own_too = "" if row["policy"] == "dense" else f", {own}"
    return f"{dense}{own_too} of {row[samples]}"


ORDER = {name: at for at, name in enumerate(WAYS)}
CASE = ("model", "tokens", "policy")
REST = {
    "trained with": options,
    "density": "{density:share}",
    "loss over dense training, both evaluated dense": of_sparse("{dense_loss_over_dense:over}"),
    "code, book, speeches": of_sparse(lambda row: by_text(row, "dense_over_dense")),
    "step": lambda row: f"{row['step_ms'] / 1000:.2f} s",
    "over the dense step": of_sparse(lambda row: times(row["step_over_dense"])),
    "attention over dense": of_sparse(lambda row: times(row["layer_over_dense"])),
}
SHORT = {"tokens, steps": "{tokens:K}, {steps}", **REST}
LONG = {
    "model, tokens, steps": "{model}, {tokens:K}, {steps}; {gpus} {gpu:gpu}",
    **REST,
    "recall": "{recall:.3f}",
    "loss with its own attention; code, book, speeches": of_sparse(
        lambda row: cell("{own_loss_over_dense:over}; ", row) + by_text(row, "own_over_dense")
    ),
    "needles found: dense, own attention": lambda row: right(row, "needle", "needles"),
    "RULER: dense, own attention": lambda row: right(row, "ruler", "ruler_samples"),
    "tokens/s/GPU": "{tokens_per_s_gpu:,}",
    "peak GiB": "{max_alloc_gb:.1f}",
}


def order(row: Row) -> tuple:
    return (
        row["tokens"],
        row["gpus"],
        row["model"],
        ORDER[row["policy"].partition("@")[0]],
        row["density"],
    )


short = Table(
    "long",
    SHORT,
    where=lambda row: not row["policy"].startswith("schedule"),
    newest=CASE,
    order=order,
)
whole = Table("long", LONG, newest=(*CASE, "gpus"), order=order)


def one(policy: str, tokens: int = 131072) -> Row:
    """The last row of a policy at a length."""
    return [row for row in rows("long") if (row["policy"], row["tokens"]) == (policy, tokens)][-1]


def _figures(name: str, policy: str, tokens: int = 131072) -> dict[str, Callable[[], str]]:
    def of(text: Column) -> Callable[[], str]:
        return lambda: filled(text, one(policy, tokens))

    found: dict[str, Column] = {
        "steps": "{steps}",
        "density": "{density:share}",
        "recall": "{recall:.3f}",
        "dense": "{dense_loss_over_dense:over}",
        "own": "{own_loss_over_dense:over}",
        "own_code": lambda row: cell("{x:over}", x=row["own_over_dense_by_text"]["code"]),
        "code": lambda row: cell("{x:over}", x=row["dense_over_dense_by_text"]["code"]),
        "step": lambda row: times(row["step_over_dense"]),
        "attention": lambda row: times(row["layer_over_dense"]),
        "needle": lambda row: right(row, "needle", "needles"),
        "last_eighth": lambda row: cell("{x:over}", x=row["dense_over_dense_by_position"][-1]),
    }
    return {f"long_{name}_{figure}": of(text) for figure, text in found.items()}


def _last_attention(run: Row) -> str:
    """How many times as fast as dense attention a run attends in its last step, which is traced."""

    def attention(policy: str) -> float:
        schedule = policy.partition("@")[2] or None
        return [
            row["breakdown"]["attention"]
            for row in rows("pretrain")
            if row["commit"] == run["commit"]
            and (row["seq"], row["world"], row["schedule"])
            == (*values(run, "tokens", "gpus"), schedule)
            and (row["attention"] == "fused") is (policy == "dense")
        ][-1]

    return times(attention(run["policy"]) / attention("dense"))


def _own_over_dense(run: Row) -> str:
    """Loss of a run evaluated with its own attention over its loss evaluated dense."""
    own, dense = 1 + run["own_loss_over_dense"], 1 + run["dense_loss_over_dense"]
    return cell("{x:over}", x=own / dense - 1)


def _before(name: str, samples: str) -> str:
    """Right answers of the model before training."""
    row = one("dense")
    found = row["before"][name]
    if isinstance(found, dict):
        found = sum(task["right"] for task in found.values()) / len(found)
    return f"{round(found * row[samples])} of {row[samples]}"


FIGURES = {
    **_figures("target", "target@0.95"),
    **_figures("anneal", "schedule@anneal"),
    **_figures("512k_anneal", "schedule@anneal", 524288),
    "long_512k_anneal_last": lambda: _last_attention(one("schedule@anneal", 524288)),
    **_figures("256k", "target@0.95", 262144),
    **_figures("256k_anneal", "schedule@anneal", 262144),
    **_figures("512k", "target@0.95", 524288),
    "long_steps": lambda: str(one("dense")["steps"]),
    "long_gpus": lambda: cell("{gpus} {gpu:gpu}", one("dense")),
    "long_256k_gpus": lambda: cell("{gpus} {gpu:gpu}", one("dense", 262144)),
    "long_512k_gpus": lambda: cell("{gpus} {gpu:gpu}", one("dense", 524288)),
    "long_512k_anneal_over_own": lambda: _own_over_dense(one("schedule@anneal", 524288)),
    "long_dense_needle": lambda: right(one("dense"), "needle", "needles"),
    "long_dense_ruler": lambda: right(one("dense"), "ruler", "ruler_samples"),
    "long_before_needle": lambda: _before("needle", "needles"),
    "long_before_ruler": lambda: _before("ruler", "ruler_samples"),
    "long_before": lambda: f"{one('dense')['before']['loss']['all']:.3f}",
    "long_after": lambda: f"{one('dense')['loss']['all']:.3f}",
    "long_256k_before": lambda: f"{one('dense', 262144)['before']['loss']['all']:.3f}",
    "long_256k_after": lambda: f"{one('dense', 262144)['loss']['all']:.3f}",
}
