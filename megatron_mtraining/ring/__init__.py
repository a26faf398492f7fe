# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention: the schedule (pure), the transport (process groups), the autograd function."""

from .attention import ring_attention
from .schedule import RingStep, flat_ring
from .transport import Ring

__all__ = ["Ring", "RingStep", "flat_ring", "ring_attention"]
