# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What masks a tile of scores: values of the kernels' constant ``MASK``."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

UNMASKED = gl.constexpr(0)
CAUSAL = gl.constexpr(1)  # 0 or -inf for each score, to add
PER_KEY = gl.constexpr(2)  # 0 or -inf for each key, to add
RANGE = gl.constexpr(3)  # positions of keys: masked before the first key that the row sees
CAUSAL_RANGE = gl.constexpr(4)  # both CAUSAL and RANGE
