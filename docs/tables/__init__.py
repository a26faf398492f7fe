# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables and single figures of the docs, from the rows of ``benchmarks/results/*.jsonl``.

``docs/generate.py`` puts them between markers. Of rows of one case the last in its file counts, and a ratio
is taken between rows of one commit alone, which were measured in one session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import backward_tables
from .common import Row, percent, rows
from .eval_tables import ruler_agreement, ruler_agreement_samples
from .frontier_docs import (
    ablations_by_loss,
    ablations_by_ring,
    ablations_by_time,
    after_training,
    chosen,
    dense_loss_by_text,
    predicted_over_measured,
    predicted_seconds,
    predicted_steps,
    untrained,
)
from .kernel_tables import backward_paths, kernels, selection, short_layers, worst_error
from .pattern_tables import patterns, patterns_long, patterns_smol
from .peer_tables import peers, refused
from .profile_tables import (
    between_profiles,
    profile_command,
    profile_errors,
    profile_seconds,
)
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
from .sparsebalance_tables import (
    by_gpus,
    by_waits,
    denser,
    measured,
    over_ranks,
    recorded,
    simulated,
    trained_with,
)
from .step_tables import (
    breakdown,
    dense_of,
    layouts,
    loss,
    over_dense,
    signed,
    step,
    step_at_price,
    steps,
    steps_before,
    trained,
    training,
    training_earlier,
)
from .target_tables import targets


def ratio_of_step(seq: int) -> str:
    return f"{over_dense(step(seq)):.1f}x"


def seconds_of(row: Row) -> str:
    seconds = row["iter_ms"] / 1000
    return f"{seconds:.2f} s" if seconds < 50 else f"{seconds:.1f} s"


def wire_errors() -> str:
    found = [row for row in rows("wire") if row["gpu"] != "none"]
    sent = [percent(row["error_bf16"], 2) for row in found]
    return f"{' and '.join(sent)} (bfloat16), {percent(found[-1]['error_float32'], 2)} (float32)"


def layer_of_dense(label: str, row: Row) -> str:
    """How many times as fast as cuDNN's dense attention: search, forward and backward of one layer."""
    return (
        f"{row[f'dense_ms_{label}'] / (row[f'layer_ms_{label}'] + row[f'search_ms_{label}']):.1f}x"
    )


def target(model: str) -> Row:
    """The row of a model that was trained with a target recall of 0.95."""
    return chosen(model, "target", 0.95)


def of_target(model: str, figure: str) -> str:
    """A figure of that row."""
    row = target(model)
    if figure in ("own", "dense"):
        return signed(row[f"trained_{figure}_over_dense"])
    return percent(row[f"{figure}_trained"])


FIGURES: dict[str, Callable[[], str]] = {
    "profile_seconds": profile_seconds,
    "profile_moba": lambda: between_profiles("block_lists"),
    "profile_slashes": lambda: between_profiles("vertical_slash"),
    "step_512k": lambda: seconds_of(step(524288)),
    "step_512k_dense": lambda: seconds_of(dense_of(step(524288))),
    "step_512k_ratio": lambda: ratio_of_step(524288),
    "step_512k_density": lambda: percent(step(524288)["density"]),
    "step_512k_recall": lambda: percent(step(524288)["recall"]),
    "step_512k_price": lambda: seconds_of(step_at_price(524288)),
    "step_512k_price_ratio": lambda: f"{over_dense(step_at_price(524288)):.1f}x",
    "predicted_over_measured_128k": lambda: predicted_over_measured(131072),
    "predicted_over_measured_512k": lambda: predicted_over_measured(524288),
    "step_512k_predicted": lambda: f"{predicted_seconds(524288):.1f} s",
    "step_128k_predicted": lambda: f"{predicted_seconds(131072):.1f} s",
    "step_512k_price_density": lambda: percent(step_at_price(524288)["density"]),
    "step_512k_price_recall": lambda: percent(step_at_price(524288)["recall"]),
    "step_128k": lambda: seconds_of(step(131072)),
    "step_128k_dense": lambda: seconds_of(dense_of(step(131072))),
    "step_128k_ratio": lambda: ratio_of_step(131072),
    "step_128k_density": lambda: percent(step(131072)["density"]),
    "step_128k_recall": lambda: percent(step(131072)["recall"]),
    "trained_density": lambda: percent(trained()["overrides"]["density"]),
    "trained_recall": lambda: percent(trained()["overrides"]["recall"]),
    "trained_own": lambda: signed(trained()["overrides"]["held_out_after_over_dense"]),
    "trained_dense": lambda: signed(
        trained()["overrides"]["held_out_after_dense"] / trained()["dense"]["held_out_after"] - 1
    ),
    "frontier_density": lambda: percent(chosen()["density_trained"]),
    "frontier_recall": lambda: percent(chosen()["recall_trained"]),
    "frontier_own": lambda: signed(chosen()["trained_own_over_dense"]),
    "frontier_dense": lambda: signed(chosen()["trained_dense_over_dense"]),
    "second_model_density": lambda: percent(chosen("qwen.gguf")["density_trained"]),
    "second_model_recall": lambda: percent(chosen("qwen.gguf")["recall_trained"]),
    "second_model_own": lambda: signed(chosen("qwen.gguf")["trained_own_over_dense"]),
    "second_model_by_text": lambda: dense_loss_by_text("qwen.gguf"),
    "second_model_dense": lambda: signed(chosen("qwen.gguf")["trained_dense_over_dense"]),
    **{
        f"{name}_target_{figure}": partial(of_target, model, figure)
        for name, model in (("frontier", "smol.gguf"), ("second_model", "qwen.gguf"))
        for figure in ("density", "recall", "own", "dense")
    },
    "frontier_target_layer_128k": lambda: layer_of_dense("128k", target("smol.gguf")),
    "frontier_target_layer_512k": lambda: layer_of_dense("512k", target("smol.gguf")),
    "second_model_target_layer": lambda: layer_of_dense("128k", target("qwen.gguf")),
    "frontier_layer_128k": lambda: layer_of_dense("128k", chosen()),
    "frontier_layer_512k": lambda: layer_of_dense("512k", chosen()),
    "worst_error": lambda: f"{worst_error():.2f}",
    "wire_errors": wire_errors,
    "ruler_agreement_samples": ruler_agreement_samples,
}  # fmt: skip
"""Figures in sentences, by name."""

TABLES: dict[str, Callable[[], str]] = {
    "steps": steps,
    "breakdown": breakdown,
    "steps_before": steps_before,
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
    "training_earlier": training_earlier,
    "loss": loss,
    "targets": targets,
    "sparsebalance_patterns": recorded,
    "sparsebalance_sets": simulated,
    "sparsebalance_gpus": by_gpus,
    "sparsebalance_dense": denser,
    "sparsebalance_waits": by_waits,
    "sparsebalance_measured": measured,
    "sparsebalance_ranks": over_ranks,
    "sparsebalance_loss": trained_with,
    "profile_errors": profile_errors,
    "profile_command": profile_command,
    "backward_gradient": backward_tables.gradient,
    "backward_times": backward_tables.times,
    "backward_trained": backward_tables.trained,
    "settings": settings,
    "frontier_untrained": untrained,
    "frontier_trained": after_training,
    "frontier_steps": predicted_steps,
    "ablations_by_loss": ablations_by_loss,
    "ablations_by_time": ablations_by_time,
    "ablations_by_ring": ablations_by_ring,
    "ruler_agreement": ruler_agreement,
}
"""Tables, by name."""
