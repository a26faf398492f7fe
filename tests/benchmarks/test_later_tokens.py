# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/later_tokens.py: texts with another future, after what counts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.model import later_tokens

SEQ, BLOCK = 1024, 64


def test_what_is_replaced_comes_after_what_counts():
    windows = torch.arange(2 * (SEQ + 1)).view(2, -1)
    for pairs in (
        later_tokens.cuts(windows, windows.roll(1, 0), BLOCK),
        later_tokens.copies(windows, windows.roll(1, 0), BLOCK, 9),
    ):
        for own, other, tokens in pairs:
            same = own == other
            assert same[: tokens.stop + 1].all() and not same[tokens.stop + 1 :].any()
    for own, _, tokens in later_tokens.copies(windows, windows, BLOCK, 9):
        block = own[tokens.start : tokens.start + BLOCK]
        source = int((own == block[0]).nonzero()[0])
        assert torch.equal(block, own[source : source + BLOCK])
        assert 2 * BLOCK <= tokens.start - source <= later_tokens.FARTHEST * BLOCK
