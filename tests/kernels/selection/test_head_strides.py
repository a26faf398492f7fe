# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The search reads keys whose heads are more than 2^31 elements apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_mtraining.kernels.selection import (
    attention_masses,
    diagonal_masses,
    merge_lse,
    partial_lse,
)
from megatron_mtraining.pattern.sampled_rows import SampledRows, stratified_rows

SEQ, BLOCK, DIM, HEADS = 256, 64, 64, 3
APART = 2**30 + 2**16
"""Elements from a head to the next: the offset of the third does not fit into 32 bits."""


def compare() -> None:
    # Only pages that are written take memory.
    storage = torch.empty((HEADS - 1) * APART + SEQ * DIM, dtype=torch.float16)
    key = storage.as_strided((SEQ, 1, HEADS, DIM), (DIM, HEADS * APART, APART, 1))
    dense = torch.randn(SEQ, 1, HEADS, DIM).half()
    for head in range(HEADS):
        key[:, :, head] = dense[:, :, head]
    rows = stratified_rows(SEQ, 8, 2)
    sampled = SampledRows(
        query=torch.randn(len(rows), 1, HEADS, DIM).half(), rows=rows.int(), rows_per_stratum=2,
        num_selection_rows=1, drop_max_stratum=True, stratified=True, window_blocks=1, seq_length=SEQ,
        rank=0, world=1, inner=1, block_size=BLOCK, softmax_scale=DIM**-0.5,
    )  # fmt: skip
    lse = merge_lse(partial_lse(sampled, dense))
    assert torch.equal(merge_lse(partial_lse(sampled, key)), lse)
    masses = (attention_masses(sampled, each, lse, 4, True) for each in (key, dense))
    for one, other in zip(*masses):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    diagonals = (diagonal_masses(sampled, each, lse, 4, None) for each in (key, dense))
    torch.testing.assert_close(*diagonals, rtol=0, atol=0)


@pytest.mark.slow
def test_offsets_of_heads_have_64_bits():
    """In a process of its own: an offset of 32 bits reads outside of the keys, which ends it."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import compare; compare()"],
        cwd=Path(__file__).parents[3], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
