# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables of other packages' kernels, from rows written out here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from tables import common, peer_tables

ORIGIN = dict(gpu="NVIDIA H200", torch="2.11.0", triton="3.6.0", command="python")


def row(peer, op, ms, seq=65536, **other):
    common = dict(
        peer=peer, op=op, ms=ms, seq=seq, case="64K 16/2 d128 5%", version="x 1.0", heads=16, kv_heads=2,
        dim=128, block="128x128", density=0.0512, tflops=None, share_of_cudnn=None, dense_seq=65536, why="",
        commit="new",
    )  # fmt: skip
    if ms is not None:
        common.update(tflops=100 / ms, share_of_cudnn=0.5)
    return {**common, **ORIGIN, **other}


@pytest.fixture
def found(monkeypatch):
    rows = [
        row("mtraining", "forward", 9.0, commit="old"),
        row("mtraining", "forward", 1.0),
        row("cudnn", "forward", 20.0, block=None, density=1.0),
        row("cudnn_blocks", "forward", 2.0),
        row("fa4", "forward", 8.0, seq=131072, block=None, density=1.0),
        row("flash_msa", "forward", None, density=None, why="takes no blocks | none"),
        row("mtraining", "backward", 2.0),
        row("cudnn", "backward", 50.0, block=None, density=1.0),
        row("cudnn_blocks", "backward", None, why="no groups"),
        row("fa4", "backward", 16.0, seq=131072, block=None, density=1.0),
        row("flash_msa", "backward", None, density=None, why="takes no blocks | none"),
    ]
    monkeypatch.setattr(common, "read", lambda name: tuple(rows))
    return rows


def test_what_ran(found):
    *lines, blank, source = peer_tables.peers().splitlines()
    assert lines[2:] == [
        "| 64K, 16/2, 128 | this package | 5.1% | 128 x 128 | 1 / 2 | 100 / 50 | 0.50 / 0.50 | 1.00 / 1.00 |",
        "| 64K, 16/2, 128 | cuDNN dense | 100% |  | 20 / 50 | 5 / 2 | 0.50 / 0.50 | 20.00 / 25.00 |",
        "| 64K, 16/2, 128 | cuDNN frontend, block-sparse | 5.1% | 128 x 128 | 2 / none | 50 / none "
        "| 0.50 / none | 2.00 / none |",
        "| 128K, 16/2, 128 | FlashAttention-4, dense | 100% |  | 8 / 16 | 12 / 6 | 0.50 / 0.50 |  |",
    ]
    assert source == "Rows: `peers.jsonl`; NVIDIA H200, torch 2.11.0, Triton 3.6.0; commit new."


def test_what_did_not_run(found):
    *lines, blank, source = peer_tables.refused().splitlines()
    assert lines[2:] == [
        "| flash-msa | x 1.0 | forward and backward | takes no blocks \\| none | 64K 16/2 d128 5% |",
        "| cuDNN frontend, block-sparse | x 1.0 | backward | no groups | 64K 16/2 d128 5% |",
    ]


def test_a_case_that_was_not_run_again_stays(found):
    earlier = dict(case="128K 16/2 d128 5%", seq=131072, commit="old")
    found[:0] = [
        row("mtraining", "forward", 3.0, **earlier),
        row("mtraining", "backward", 6.0, **earlier),
    ]
    lines = peer_tables.peers().splitlines()[2:]
    assert lines[0].startswith("| 128K, 16/2, 128 | this package | 5.1% | 128 x 128 | 3 / 6 |")
    assert lines[1].startswith("| 64K, 16/2, 128 | this package | 5.1% | 128 x 128 | 1 / 2 |")


def test_every_peer_has_a_name():
    from benchmarks.kernels.peer_calls import PEERS

    assert peer_tables.NAMES.keys() == PEERS.keys()
