# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Colours of the pictures."""

BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999",
)  # fmt: skip
"""Okabe and Ito's colours."""
