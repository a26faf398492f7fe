# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What ``mtraining profile`` prints at the end."""

from __future__ import annotations

TARGET = 0.05, 0.15
"""The median and the worst relative error that a good profile has on shapes that were held out."""


def report(model, measured) -> str:
    """Tables: the held-out shapes with their errors, and the figures over them."""
    from ..report.table import table
    from .fit import relative_errors

    rows = []
    for each in measured:
        if not each.case.held_out:
            continue
        parts = (each.search, each.forward, each.backward)
        errors = relative_errors(model, each).values()
        rows.append(
            [str(each.case), *(f"{part.gpu:.3f}" for part in parts), *(f"{e:+.1%}" for e in errors)]
        )
    header = [
        "held out",
        "search ms",
        "forward ms",
        "backward ms",
        "total",
        "search",
        "forward",
        "backward",
    ]
    lines = [table(header, rows)] if rows else []
    rows = [
        [name, f"{error.median:.1%}", f"{error.worst:.1%}", str(error.shapes)]
        for name, error in model.errors.items()
    ]
    lines += [table(["relative error", "median", "worst", "shapes"], rows)] if rows else []
    total = model.errors.get("total")
    if total is not None and (total.median > TARGET[0] or total.worst > TARGET[1]):
        lines.append(
            f"note: a good profile has a median error of at most {TARGET[0]:.0%} and a worst of at most "
            f"{TARGET[1]:.0%}: is the GPU in use by others, or its clock limited?"
        )
    if model.left_out:
        lines.append(f"{len(model.left_out)} shapes left out: " + "; ".join(model.left_out[:20]))
    return "\n\n".join(lines)
