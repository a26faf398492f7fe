# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The errors of the H200's latency profile, from the profile itself."""

from __future__ import annotations

import json

from .common import RESULTS, percent, table

PROFILE = RESULTS.parents[1] / "megatron_mtraining" / "balance" / "profiles" / "nvidia_h200.json"
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
    """Errors on shapes that were not fitted."""
    profile = json.loads(PROFILE.read_text(encoding="utf-8"))
    errors = profile["errors"]
    body = [
        [name, percent(errors[key]["median"]), percent(errors[key]["worst"]), errors[key]["shapes"]]
        for key, name in NAMES.items()
    ]
    versions = profile["versions"]
    return (
        table(["time of", "median error", "worst", "shapes"], body)
        + f"\n\nRows: `{PROFILE.name}`; {profile['gpu']}, torch {versions['torch']}, Triton "
        f"{versions['triton']}; commit {profile['commit']}."
    )
