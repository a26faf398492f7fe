# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Ring attention: the schedule (pure data), the transfers, the autograd function.

:func:`megatron_mtraining.attention.attend` is the public entry, which validates operands and searches the
pattern; :func:`.attention.ring_attention` is private to it.
"""

from ..kernels.types import RingStep, Round
from .schedule import rounds
from .transport import Ring, ring_of

__all__ = ["Ring", "RingStep", "Round", "ring_of", "rounds"]
