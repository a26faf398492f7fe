# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables and single figures of the docs, from the rows of ``benchmarks/results/*.jsonl``.

``docs/generate.py`` puts them between markers. Of rows of one case the last in its file counts. A ratio is
taken between rows of one commit alone, which were measured in one session; but the dense step beside a step,
which this package does not run, may be of another.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.model import schedule_tables

from . import backward_tables, step_tables, target_tables
from .common import Row, gpu_name, percent
from .common import rows as rows
from .eval_tables import ruler_agreement, ruler_agreement_samples
from .frontier_docs import (
    ablations_by_loss,
    ablations_by_ring,
    ablations_by_time,
    after_training,
    chosen,
    predicted_over_measured,
    predicted_seconds,
    predicted_steps,
    retrieval,
    schedules,
    untrained,
    with_schedule,
)
from .kernel_tables import backward_paths, kernels, selection, short_layers, worst_error
from .pattern_tables import patterns, patterns_long, patterns_smol
from .peer_tables import fa4_over_cudnn, peers, refused
from .real_tables import later_tokens, mean, price_costs, real_operands, real_share, real_times
from .ring_tables import (
    balance,
    balance_short,
    layers,
    layers_before,
    layers_shorter,
    layers_two,
    rounds,
    slow_link,
)
from .settings_tables import settings
from .sparsebalance_tables import over_ranks
from .step_tables import (
    breakdown,
    layouts,
    loss,
    signed,
    step,
    step_at_price,
    steps,
    steps_two,
    training,
)

STEPS: dict[str, Callable[[], Row]] = {
    "step_512k": lambda: step(524288),
    "step_128k": lambda: step(131072),
    "step_512k_price": lambda: step_at_price(524288),
    "step_128k_price": lambda: step_at_price(131072),
}
"""Steps that sentences quote."""


def seconds_of(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 50 else f"{seconds:.1f} s"


def dense_kept(row: Row) -> str:
    """The dense step beside a step, of which attention's output is kept."""
    found = step_tables.kept_seconds(row)
    return "" if found is None else ("" if found[1] else "about ") + seconds_of(found[0])


OF_STEP: dict[str, Callable[[Row], str]] = {
    "": lambda row: seconds_of(row["iter_ms"] / 1000),
    "_density": lambda row: percent(row["density"]),
    "_recall": lambda row: percent(row["recall"]),
    "_rate": lambda row: f"{step_tables.tokens_a_second(row):,.0f}",
    "_mfu": lambda row: f"{100 * step_tables.mfu(row):.0f}%",
    "_gpus": lambda row: f"{row['world']} {gpu_name(row['gpu'])}",
    "_dense": dense_kept,
    "_ratio": lambda row: step_tables.ratio(row, step_tables.KEPT).replace("~", "about "),
    "_dense_twice": lambda row: seconds_of(step_tables.dense_of(row, step_tables.TWICE)["iter_ms"] / 1000),
    "_ratio_twice": lambda row: step_tables.ratio(row, step_tables.TWICE),
}  # fmt: skip
"""Figures of a step, by the end of their names."""


def target(model: str) -> Row:
    """The row of a model that was trained with a target recall of 0.95."""
    return chosen(model, "target", 0.95)


OF_RUN: dict[str, Callable[[Row], str]] = {
    "density": lambda row: percent(row["density_trained"]),
    "recall": lambda row: percent(row["recall_trained"]),
    "own": lambda row: signed(row["trained_own_over_dense"]),
    "dense": lambda row: signed(row["trained_dense_over_dense"]),
    "cost": schedule_tables.cost_of,
    "times": lambda row: f"{1 / row['mean_cost']:.1f}x cuDNN's dense attention",
    "seeds": lambda row: str(row["seeds"]),
    "own_by_text": lambda row: texts_of(row["trained_own_by_text"]),
    "dense_by_text": lambda row: texts_of(row["trained_dense_by_text"]),
}
"""Figures of a trained setting, by the end of their names."""


def texts_of(losses: dict[str, float]) -> str:
    names = {"code": "code", "book": "book", "speech": "speeches"}
    return ", ".join(f"{name} {signed(losses[text])}" for text, name in names.items())


SCHEDULES = {
    "second_anneal": ("qwen.gguf", "0:0.62,0.9:0.15/3"),
    "second_low": ("qwen.gguf", "0:0.31,0.9:0.1/3"),
    "second_steep": ("qwen.gguf", "0:1.2,0.9:0.15/3"),
    "second_dense": ("qwen.gguf", "0:0.31,0.9:0/3"),
    "second_fixed": ("qwen.gguf", "0:0.31/3"),
    "second_middle": ("qwen.gguf", "0:0.31,0.7:0.31,0.7:0.01,0.8:0.01,0.8:0.65/3"),
    "second_sparser": ("qwen.gguf", "0:0.65,0.9:0/3"),
    "anneal": ("smol.gguf", "0:0.62,0.9:0.15/3"),
    "low": ("smol.gguf", "0:0.31,0.9:0.1/3"),
    "steep": ("smol.gguf", "0:1.2,0.9:0.15/3"),
    "high_end": ("smol.gguf", "0:0.62,0.9:0.2/3"),
    "dense": ("smol.gguf", "0:0.29,0.9:0/3"),
    "fixed": ("smol.gguf", "0:0.29/3"),
    "middle": ("smol.gguf", "0:0.29,0.7:0.29,0.7:0.01,0.8:0.01,0.8:0.65"),
    "high": ("smol.gguf", "0:1.2,0.9:0"),
    "high_constant": ("smol.gguf", "0:1.2,0.9:0", "constant"),
    "long_anneal": ("smol.gguf", "0:0.62,0.9:0.15/3", "cosine", 1000),
    "long_fixed": ("smol.gguf", "0:0.29/3", "cosine", 1000),
    "second_64k": ("qwen.gguf", "0:0.62,0.9:0.15/3", "cosine", 100),
}
"""Schedules that sentences quote: model, points and threshold, and decay and steps if they are not cosine and
300."""

FIGURES: dict[str, Callable[[], str]] = {
    **{
        f"{name}{end}": lambda row=row, figure=figure: figure(row())
        for name, row in STEPS.items()
        for end, figure in OF_STEP.items()
    },
    "predicted_over_measured_128k": lambda: predicted_over_measured(131072),
    "predicted_over_measured_512k": lambda: predicted_over_measured(524288),
    "step_512k_predicted": lambda: f"{predicted_seconds(524288):.1f} s",
    "step_128k_predicted": lambda: f"{predicted_seconds(131072):.1f} s",
    **{
        f"{name}_{figure}": lambda row=row, model=model, make=make: make(row(model))
        for name, model, row in (
            ("frontier", "smol.gguf", chosen),
            ("second_model", "qwen.gguf", chosen),
            ("frontier_target", "smol.gguf", target),
            ("second_model_target", "qwen.gguf", target),
        )
        for figure, make in OF_RUN.items()
    },
    **{
        f"schedule_{name}_{figure}": lambda kind=kind, make=make: make(with_schedule(*kind))
        for name, kind in SCHEDULES.items()
        for figure, make in OF_RUN.items()
    },
    "fa4_over_cudnn": lambda: f"{fa4_over_cudnn():.2f}",
    "real_price": lambda: real_times(131072, 0.31),
    "real_price_speech": lambda: real_times(131072, 0.31, text="speech"),
    "real_gpu": lambda: gpu_name(real_share(131072, 0.31, 0.0)[0]["gpu"]),
    "real_density": lambda: percent(mean(real_share(131072, 0.31, 0.0), "density")),
    "real_sparser": lambda: real_times(131072, 0.65),
    "real_exact": lambda: real_times(131072, 0.0, 3.0),
    "worst_error": lambda: f"{worst_error():.2f}",
    "ruler_agreement_samples": ruler_agreement_samples,
}  # fmt: skip
"""Figures in sentences, by name."""

TABLES: dict[str, Callable[[], str]] = {
    "steps": steps,
    "steps_two": steps_two,
    "breakdown": breakdown,
    "kernels": kernels,
    "selection": selection,
    "short_layers": short_layers,
    "backward_paths": backward_paths,
    "peers": peers,
    "peers_refused": refused,
    "layers": layers,
    "layers_shorter": layers_shorter,
    "layers_two": layers_two,
    "layers_before": layers_before,
    "rounds": rounds,
    "layouts": layouts,
    "balance": balance,
    "balance_short": balance_short,
    "slow_link": slow_link,
    "patterns": patterns,
    "patterns_long": patterns_long,
    "patterns_smol": patterns_smol,
    "training": training,
    "loss": loss,
    "targets_loss": target_tables.losses,
    "targets_steps": target_tables.steps,
    "targets_layers": target_tables.layers,
    "targets_kernels": target_tables.kernels,
    "targets_backward": target_tables.backward,
    "targets_search": target_tables.search,
    "sparsebalance_ranks": over_ranks,
    "backward_gradient": backward_tables.gradient,
    "backward_times": backward_tables.times,
    "backward_trained": backward_tables.trained,
    "settings": settings,
    "frontier_untrained": untrained,
    "frontier_trained": after_training,
    "frontier_schedules": schedules,
    "frontier_retrieval": retrieval,
    "later_tokens": later_tokens,
    "price_costs": price_costs,
    "real_operands": real_operands,
    "frontier_steps": predicted_steps,
    "ablations_by_loss": ablations_by_loss,
    "ablations_by_time": ablations_by_time,
    "ablations_by_ring": ablations_by_ring,
    "ruler_agreement": ruler_agreement,
}
"""Tables, by name."""
