# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The errors of latency profiles on an H200, from the profiles themselves."""

from __future__ import annotations

import json
import statistics

from .common import RESULTS, percent, table

PROFILE = RESULTS.parents[1] / "megatron_mtraining" / "balance" / "profiles" / "nvidia_h200.json"
COMMAND = RESULTS / "profile_command.json"
"""What the command of today wrote, without kernels in Triton's cache."""
NAMES = {
    "total": "search, forward and backward",
    "search": "search",
    "forward": "forward",
    "backward": "backward",
    "vertical_slash": "all three, vertical-slash patterns",
    "dense": "all three, dense attention",
    "block_lists": "all three, block lists",
}


def profile_errors() -> str:
    """Errors of the package's profile on shapes that were not fitted."""
    return _errors(PROFILE)


def profile_command() -> str:
    """Errors of what the command of today wrote."""
    return _errors(COMMAND)


def profile_seconds() -> str:
    """How long it took."""
    return f"{json.loads(COMMAND.read_text(encoding='utf-8'))['seconds']:.0f} s"


def between_profiles(kind: str) -> str:
    """How much the search times of a kind of pattern differ between the two profiles, at equal shapes."""
    first, second = (_searches(path, kind) for path in (PROFILE, COMMAND))
    apart = [abs(second[shape] / first[shape] - 1) for shape in first.keys() & second.keys()]
    return (
        f"{percent(statistics.median(apart))} in the median and by up to {percent(max(apart))} "
        f"({len(apart)} shapes)"
    )


def _searches(path, kind: str) -> dict[tuple, float]:
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    rows = [dict(zip(points["columns"], row)) for row in points["rows"]]
    shape = ("num_heads", "num_kv_heads", "head_dim", "tokens", "documents")
    return {
        tuple(row[name] for name in shape): row["search_ms"] for row in rows if row["kind"] == kind
    }


def _errors(path) -> str:
    profile = json.loads(path.read_text(encoding="utf-8"))
    errors = profile["errors"]
    body = [
        [name, percent(errors[key]["median"]), percent(errors[key]["worst"]), errors[key]["shapes"]]
        for key, name in NAMES.items()
    ]
    versions = profile["versions"]
    return (
        table(["time of", "median error", "worst", "shapes"], body)
        + f"\n\nRows: `{path.name}`; {profile['gpu']}, torch {versions['torch']}, Triton "
        f"{versions['triton']}; commit {profile['commit']}."
    )
