# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining profile --fit``: what this version makes of measurements that are there."""

from __future__ import annotations

from dataclasses import replace

from ...errors import ConfigError
from .report import report


def fit_again(args) -> int:
    """``--fit``: a profile with the coefficients and errors that this version finds from the measurements of
    another; what was measured, when and how stays."""
    for name in ("num_attention_heads", "num_query_groups", "kv_channels", "quick", "log"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of measuring, and --fit does not measure: leave "
                "one out"
            )
    from ...balance import LatencyModel
    from ...balance.profile_file import as_text
    from ..common.atomic_output import atomic_file
    from . import fit, measure

    model = LatencyModel.load(args.fit)
    if not model.points:
        raise ConfigError(f"--fit is {args.fit}, which has no measurements: measure again")
    columns = model.points["columns"]
    try:
        measured = [measure.measurement_of(dict(zip(columns, r))) for r in model.points["rows"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--fit is {args.fit}, which has a measurement that is none ({error}): measure again"
        ) from None
    entries = fit.fit(measured, model.processors)
    if not entries:
        raise ConfigError(
            f"--fit is {args.fit}, which has only held-out measurements, and none to fit: measure again"
        )
    model = replace(model, entries=entries)
    points = {"columns": list(measure.COLUMNS), "rows": [measure.row_of(each) for each in measured]}
    model = replace(model, errors=fit.errors(model, measured), points=points)
    with atomic_file(args.output, overwrite=args.overwrite) as file:
        file.write(as_text(vars(model)).encode())
    print(report(model, measured))
    print(f"{args.output} written")
    return 0
