# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Types of weights, and which changes of them keep every value."""

from __future__ import annotations

import torch

from ...config import ConfigError

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
}


def check_loss(name: str, place, stored: torch.dtype, wanted: torch.dtype, allowed: bool) -> None:
    """Raise :class:`ConfigError` if a change of type loses digits, and that was not allowed."""
    if stored == wanted or (stored, wanted) in EXACT or allowed:
        return
    raise ConfigError(
        f"{place}: {name} is {_name(stored)}, and --dtype {_name(wanted)} would lose digits of it: leave "
        "--dtype out, or add --allow-dtype-loss"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
