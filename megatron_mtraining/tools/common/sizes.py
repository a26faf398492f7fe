# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sizes as options take them."""

from __future__ import annotations

import argparse
import re

UNITS = {"": 1, "K": 1024, "M": 1024**2}


def tokens_of(text: str) -> int:
    """A number of tokens: 131072, 128K or 1M."""
    found = re.fullmatch(r"([1-9]\d{0,12})([KM]?)", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens such as 131072, 128K or 1M"
        )
    return int(found[1]) * UNITS[found[2]]
