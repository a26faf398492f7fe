# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables and single figures of the docs, from the rows of ``benchmarks/results/*.jsonl``.

``docs/generate.py`` puts them between markers. Of rows of one case the last in its file counts. A ratio is
taken between rows of one commit alone, which were measured in one session; but the dense step beside a step,
which this package does not run, may be of another.
"""

from __future__ import annotations

from collections.abc import Callable

from . import (
    ablation_tables,
    backward_tables,
    compatibility_tables,
    eval_tables,
    frontier_tables,
    kernel_tables,
    long_tables,
    pattern_tables,
    peer_tables,
    plan_tables,
    real_tables,
    ring_tables,
    settings_tables,
    sparsebalance_tables,
    step_tables,
    target_tables,
)
from .common import Row, cell, mean
from .frontier_tables import chosen, with_schedule
from .real_tables import real_share, real_times
from .step_tables import step, step_at_price

STEPS: dict[str, Callable[[], Row]] = {
    "step_512k": lambda: step(524288),
    "step_128k": lambda: step(131072),
    "step_512k_price": lambda: step_at_price(524288),
    "step_128k_price": lambda: step_at_price(131072),
}
"""Steps that sentences quote."""


def seconds_of(seconds: float) -> str:
    return f"{step_tables.seconds_of(seconds)} s"


def dense_kept(row: Row) -> str:
    """The dense step beside a step, of which attention's output is kept."""
    found = step_tables.kept_seconds(row)
    return "" if found is None else ("" if found[1] else "about ") + seconds_of(found[0])


OF_STEP: dict[str, Callable[[Row], str]] = {
    "": lambda row: seconds_of(row["iter_ms"] / 1000),
    "_density": lambda row: cell("{density:share}", row),
    "_recall": lambda row: cell("{recall:share}", row),
    "_rate": lambda row: f"{step_tables.tokens_a_second(row):,.0f}",
    "_mfu": lambda row: f"{100 * step_tables.mfu(row):.0f}%",
    "_gpus": lambda row: cell("{world} {gpu:gpu}", row),
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
    "density": lambda row: cell("{density_trained:share}", row),
    "recall": lambda row: cell("{recall_trained:share}", row),
    "own": lambda row: cell("{trained_own_over_dense:over}", row),
    "dense": lambda row: cell("{trained_dense_over_dense:over}", row),
    "cost": lambda row: cell("{mean_cost:–.3f}", row),
    "times": lambda row: f"{1 / row['mean_cost']:.1f}x cuDNN's dense attention",
    "seeds": lambda row: str(row["seeds"]),
    "own_by_text": lambda row: texts_of(row["trained_own_by_text"]),
    "dense_by_text": lambda row: texts_of(row["trained_dense_by_text"]),
}
"""Figures of a trained setting, by the end of their names."""


def texts_of(losses: dict[str, float]) -> str:
    names = {"code": "code", "book": "book", "speech": "speeches"}
    return ", ".join(
        cell("{name} {x:over}", name=name, x=losses[text]) for text, name in names.items()
    )


SCHEDULES = {
    "second_anneal": ("qwen.gguf", "0:0.62,0.9:0.15/3"),
    "second_low": ("qwen.gguf", "0:0.31,0.9:0.1/3"),
    "second_steep": ("qwen.gguf", "0:1.2,0.9:0.15/3"),
    "second_dense": ("qwen.gguf", "0:0.31,0.9:0/3"),
    "second_fixed": ("qwen.gguf", "0:0.31/3"),
    "second_middle": ("qwen.gguf", "0:0.31,0.7:0.31,0.7:0.01,0.8:0.01,0.8:0.65/3"),
    "second_sparser": ("qwen.gguf", "0:0.65,0.9:0/3"),
    "anneal": ("smol.gguf", "0:0.62,0.9:0.15/3"),
    "anneal_unpruned": ("smol.gguf", "0:0.62,0.9:0.15"),
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
    "predicted_over_measured_128k": lambda: frontier_tables.predicted_over_measured(131072),
    "predicted_over_measured_512k": lambda: frontier_tables.predicted_over_measured(524288),
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
    "step_of_two_gpus": lambda: seconds_of(
        step_tables.of_two_gpus("qwen2.5-3b", 65536)["iter_ms"] / 1000
    ),
    "fa4_over_cudnn": lambda: f"{peer_tables.fa4_over_cudnn():.2f}",
    "fa4_over_cudnn_64": lambda: f"{peer_tables.fa4_over_cudnn_on_operands():.2f}",
    "real_price": lambda: real_times(131072, 0.31),
    "real_price_speech": lambda: real_times(131072, 0.31, text="speech"),
    "real_gpu": lambda: cell("{gpu:gpu}", real_share(131072, 0.31, 0.0)[0]),
    "real_density": lambda: cell("{x:share}", x=mean(real_share(131072, 0.31, 0.0), "density")),
    **{f"layer_prices_{name}": value for name, value in real_tables.LAYER_PRICES.items()},
    **plan_tables.FIGURES,
    **long_tables.FIGURES,
    **step_tables.LOGGING,
    **step_tables.OFFLOAD,
    "short_layer_host": lambda: kernel_tables.host_ms(kernel_tables.shortest_host()),
    "short_layer_dense_host": lambda: kernel_tables.host_ms(
        *kernel_tables.dense_host(kernel_tables.shortest_host())
    ),
    "worst_error": lambda: f"{kernel_tables.worst_error():.2f}",
    "ruler_agreement_samples": eval_tables.ruler_agreement_samples,
}  # fmt: skip
"""Figures in sentences, by name."""

TABLES: dict[str, Callable[[], str]] = {
    "steps": step_tables.steps,
    "steps_two": step_tables.steps_two,
    "breakdown": step_tables.breakdown,
    "predicted": plan_tables.predicted,
    "layouts": step_tables.layouts,
    "sft": step_tables.sft,
    "sequences": step_tables.sequences,
    "sequences_shapes": step_tables.sequences_shapes,
    "training": step_tables.training,
    "kernels": kernel_tables.kernels,
    "selection": kernel_tables.selection,
    "short_layers": kernel_tables.short_layers,
    "backward_paths": kernel_tables.backward_paths,
    "loss": kernel_tables.loss,
    "peers": peer_tables.peers,
    "peers_operands": peer_tables.operands,
    "peers_refused": peer_tables.refused,
    "matrix": compatibility_tables.matrix,
    "refusals": compatibility_tables.refusals,
    "borders": ring_tables.borders,
    "layers": ring_tables.layers,
    "layers_shorter": ring_tables.layers_shorter,
    "layers_two": ring_tables.layers_two,
    "rounds": ring_tables.rounds,
    "balance": ring_tables.balance,
    "balance_short": ring_tables.balance_short,
    "slow_link": ring_tables.slow_link,
    "patterns": pattern_tables.patterns,
    "patterns_long": pattern_tables.patterns_long,
    "patterns_smol": pattern_tables.patterns_smol,
    "targets_loss": target_tables.losses,
    "targets_steps": target_tables.steps,
    "targets_layers": target_tables.layers,
    "targets_kernels": target_tables.kernels,
    "targets_backward": target_tables.backward,
    "targets_search": target_tables.search,
    "sparsebalance_ranks": sparsebalance_tables.over_ranks,
    "backward_gradient": backward_tables.gradient,
    "backward_times": backward_tables.times,
    "backward_trained": backward_tables.trained,
    "settings": settings_tables.settings,
    "long": long_tables.short,
    "long_whole": long_tables.whole,
    "frontier_untrained": frontier_tables.untrained,
    "frontier_trained": frontier_tables.after_training,
    "frontier_schedules": frontier_tables.schedules,
    "frontier_retrieval": frontier_tables.retrieval,
    "frontier_steps": frontier_tables.predicted_steps,
    "later_tokens": real_tables.later_tokens,
    "price_costs": real_tables.price_costs,
    "real_operands": real_tables.real_operands,
    "dense_kernels": real_tables.dense_kernels,
    "layer_prices": real_tables.layer_prices,
    "real_block_lists": real_tables.block_lists,
    "ablations_by_loss": ablation_tables.by_loss,
    "ablations_by_time": ablation_tables.by_time,
    "ablations_by_ring": ablation_tables.by_ring,
    "ruler_agreement": eval_tables.ruler_agreement,
}
"""Tables, by name."""
