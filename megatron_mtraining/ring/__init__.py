# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention: the schedule (pure), the transport (process groups), the autograd function."""

from .attention import ring_attention
from .schedule import RingStep, flat_ring, ring_steps
from .transport import Ring, check_hosts, ring_of

__all__ = [
    "Ring",
    "RingStep",
    "check_hosts",
    "flat_ring",
    "ring_attention",
    "ring_of",
    "ring_steps",
]
