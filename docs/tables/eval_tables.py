# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Agreement of ``mtraining eval ruler`` with lm-eval's own run."""

from __future__ import annotations

from .common import Row, last, rows, table

SAME = ("prompts", "answers", "scores")


def agreement_rows() -> list[Row]:
    """The last row of each task, with and without chat template."""
    return list(last(rows("ruler_agreement"), "model", "task", "length", "dtype", "chat").values())


def ruler_agreement() -> str:
    found = agreement_rows()
    header = ["task", "samples", "tokens, at most", *(f"same {name}" for name in SAME)]
    header += ["mean score", "of lm-eval"]
    body = [
        [
            f"`{row['task']}`" + (", `--chat`" if row["chat"] else ""),
            row["samples"],
            f"{row['tokens']:,}",
            *(row[f"same_{name}"] for name in SAME),
            f"{row['score']:.3f}",
            f"{row['score_lm_eval']:.3f}",
        ]
        for row in found
    ]

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in found))

    return (
        table(header, body)
        + f"\n\nRows: `ruler_agreement.jsonl`; {all_of('model')}, {all_of('dtype')}, "
        f"{all_of('device').upper()}, lm-eval {all_of('lm_eval')}, transformers {all_of('transformers')}, "
        f"torch {all_of('torch')}; commit {all_of('commit')}."
    )


def ruler_agreement_samples() -> str:
    """How many of the samples have the same prompts, answers and scores."""
    found = agreement_rows()
    same = sum(min(row[f"same_{name}"] for name in SAME) for row in found)
    return f"{same} of {sum(row['samples'] for row in found)} samples"
