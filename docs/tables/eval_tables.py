# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Agreement of ``mtraining eval ruler`` with lm-eval's own run."""

from __future__ import annotations

from .common import Row, Table

SAME = ("prompts", "answers", "scores")

ruler_agreement = Table(
    "ruler_agreement",
    {
        "task": lambda row: f"`{row['task']}`" + (", `--chat`" if row["chat"] else ""),
        "samples": "{samples}",
        "tokens, at most": "{tokens:,}",
        **{f"same {name}": f"{{same_{name}}}" for name in SAME},
        "mean score": "{score:.3f}",
        "of lm-eval": "{score_lm_eval:.3f}",
    },
    newest=("model", "task", "length", "dtype", "chat"),
    origin="{model}, {dtype}, {device}, lm-eval {lm_eval}, transformers {transformers}, torch {torch}",
)
"""The last row of each task, with and without chat template."""


def ruler_agreement_samples() -> str:
    """How many of the samples have the same prompts, answers and scores."""
    found: list[Row] = ruler_agreement.shown()
    same = sum(min(row[f"same_{name}"] for name in SAME) for row in found)
    return f"{same} of {sum(row['samples'] for row in found)} samples"
