# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Probabilities as integers, whose sums do not depend on the order of the additions."""

from __future__ import annotations

import struct


def fixed_point_one(num_rows: int) -> int:
    """The int32 that represents a probability of 1.

    It is exact in float32 (its low 8 bits are 0), and the sum of ``num_rows`` of them fits an int32, with
    room for probabilities that sum to more than 1: the LSE in them is rounded to float32.
    """
    return (2**31 - 2**24) // num_rows & ~255


def float_bits(number: float) -> int:
    """The bits of a positive number as float32. Read as integers, they compare like the numbers."""
    return struct.unpack("i", struct.pack("f", number))[0]
