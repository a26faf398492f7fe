# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""docs/how-it-works.md: its worked example is what the code gives, and its pictures can be drawn."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_mtraining.layout import block_at
from megatron_mtraining.pattern.vertical_slash_index import build_index

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
SLASHES, COLUMNS = [0, 1, 4, 7], [3, 70]
BLOCK, BLOCKS, WORLD, INNER = 64, 12, 4, 2


@pytest.fixture(scope="module")
def index():
    """The index of the worked example."""
    distances = torch.zeros(1, 1, BLOCKS, dtype=torch.bool)
    distances[..., SLASHES] = True
    columns = torch.tensor(COLUMNS).view(1, 1, -1)
    return build_index(distances, columns, BLOCK * BLOCKS, BLOCK, WORLD, INNER)


@pytest.fixture(scope="module")
def drawings():
    """docs/drawings.py, imported."""
    pytest.importorskip("matplotlib", reason="docs/drawings.py draws with matplotlib")
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # named tuples look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def lists_on_page() -> dict[tuple[int, int], set[int]]:
    """By (round, query block): the key blocks that the page's example attends to."""
    (text,) = re.findall(r"```text\n(rank 0.*?)```", PAGE, re.DOTALL)
    lists = {}
    for number, line in re.findall(r"round (\d), keys of \([\d, ]+\)(.*)", text):
        for block, keys in re.findall(r"(\d+): \[([\d, ]*)\]", line):
            lists[int(number), int(block)] = set(map(int, keys.split(", "))) if keys else set()
    return lists


def test_worked_example_prints_what_the_page_has():
    command = [sys.executable, str(DOCS / "worked_example.py")]
    environment = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert f"```text\n{done.stdout}```" in PAGE


def test_worked_example_is_the_pattern(index):
    lists = lists_on_page()
    assert len(lists) == BLOCKS * WORLD // INNER
    for i in range(BLOCKS):
        expected = {i - slash for slash in SLASHES if slash <= i}
        assert lists[0, i] | lists[1, i] == expected
        assert not lists[0, i] & lists[1, i]


def test_worked_example_counts(index):
    lists = lists_on_page()
    for rank in range(WORLD):
        blocks = [block_at(a, rank, WORLD, INNER) for a in range(BLOCKS // WORLD)]
        counts = [sum(len(lists[number, i]) for i in blocks) for number in range(2)]
        assert counts[0] == 5
        assert 3 <= counts[1] <= 5
        assert int(index.block_mask(rank).sum()) == sum(counts)


def test_worked_example_columns(index):
    mask = index.token_mask(0, 0)[5 * BLOCK]  # the first query of block 5
    blocks = mask.view(BLOCKS, BLOCK).sum(-1).tolist()
    assert blocks == [1, BLOCK, 0, 0, BLOCK, 1, *[0] * 6]
    assert mask[3]


def test_pictures_are_drawn_and_linked(drawings, tmp_path):
    drawings.main(str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3 and all((DOCS / "images" / name).is_file() for name in names)
    assert all(f"](images/{name})" in PAGE for name in names)


def test_pictured_work_is_that_of_the_index(drawings):
    index = drawings.index_of(drawings.SLASHES, drawings.COLUMNS, drawings.BLOCKS)
    pairs = drawings.pairs_by_rank(index, drawings.block_striped)
    assert pairs.sum(0).tolist() == index.work()[0, 0].sum(-1).tolist()
    others = [drawings.pairs_by_rank(index, layout) for layout in drawings.LAYOUTS.values()]
    assert len({int(each.sum()) for each in others}) == 1
    striped = drawings.imbalance(pairs.sum(0))
    assert all(drawings.imbalance(each.sum(0)) >= striped for each in others)


def test_every_pictured_kernel_waits_for_its_keys(drawings):
    spans = drawings.forward_timeline(0, 2, 3)
    kernels = [span for span in spans if span.text.startswith("round")]
    for span in kernels:
        group = span.text.split()[-1]
        (gather,) = [each for each in spans if each.text == f"gather {group}"]
        assert gather.end <= span.start
        for hop in (each for each in spans if each.text == f"KV of group {group}"):
            assert hop.end <= gather.start
    assert len(kernels) == 3
