# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention: the schedule (pure), the transport (process groups), the autograd function."""

from .attention import KeysAndValues, ring_attention
from .schedule import RingStep, Round, rounds
from .transport import Ring, advise_on_hosts, check_hosts, ring_of, shut_down

__all__ = [
    "KeysAndValues",
    "Ring",
    "RingStep",
    "Round",
    "advise_on_hosts",
    "check_hosts",
    "ring_attention",
    "ring_of",
    "rounds",
    "shut_down",
]
