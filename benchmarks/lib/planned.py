# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``mtraining plan layouts`` predicts for steps that were measured."""

from __future__ import annotations

from megatron_mtraining.tools.plan.layouts import COMMON, DENSE, FULL, OURS, words_of
from megatron_mtraining.tools.plan.options import read
from megatron_mtraining.tools.plan.rates import GPUS
from megatron_mtraining.tools.plan.setting import setting_of
from megatron_mtraining.tools.plan.shapes import shape_of
from megatron_mtraining.tools.plan.step_time import Hosts, StepTime, step_time

SAME = "model seq batch world attention gpu price vertical slash_cap backward_threshold".split()
SAME += ["target_recall", "schedule"]
"""What rows of the same measurement have alike."""
OF_ROWS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100-80g"}

SHAPES = {"Qwen2.5-Coder-0.5B-Instruct": "qwen2.5-0.5b"}
"""The built-in shape of a model's own name."""


def is_planned(row: dict) -> bool:
    """Whether the planner models a row of ``pretrain.jsonl``: one sequence over all GPUs, or one GPU; dense
    attention that is recomputed with its layer."""
    is_one = row.get("batch") == 1 or row.get("world") == 1
    return bool(is_one and row.get("layers") and row.get("dense_recompute") != "output kept")


def planned(row: dict) -> StepTime:
    """The predicted step of such a row, at its density."""
    model, ours = shape_of(SHAPES.get(row["model"], row["model"])), row["attention"] == "mtraining"
    words = [*words_of(model, row["seq"]), "--seq-length", str(row["seq"]), *COMMON, *FULL]
    words += ["--vocab-size", str(model.vocab), "--context-parallel-size", str(row["world"])]
    words += ["--global-batch-size", str(row["batch"]), *(OURS if ours else DENSE[0])]
    if "--mtraining-recompute-attention" in row["command"]:
        words.append("--mtraining-recompute-attention")
    gpu = GPUS[OF_ROWS[row["gpu"]]]
    return step_time(setting_of(read(words)[0], row["world"]), gpu, Hosts(8, 50), row["density"])


def newest(rows: list[dict]) -> list[dict]:
    """Of rows that measured the same, the last: older ones are of older code."""
    found = {}
    for row in filter(is_planned, rows):
        again = "--mtraining-recompute-attention" in row["command"]
        found[(*map(row.get, SAME), again)] = row
    return list(found.values())
