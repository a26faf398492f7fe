# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Small vectors that are the same in every layer and step."""

from __future__ import annotations

import torch
from torch import Tensor

_CONSTANTS: dict[tuple, Tensor] = {}


def constant(
    numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A vector on the device, ``[len(numbers)]``. Made once, since the host waits for the copy, and kept
    for good: captured searches (:mod:`.search_graph`) read it where it is."""
    at = (numbers, device, dtype)
    if at not in _CONSTANTS:
        with torch.inference_mode(False):
            _CONSTANTS[at] = torch.tensor(numbers, dtype=dtype, device=device)
    return _CONSTANTS[at]
