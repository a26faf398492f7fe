# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The latency model: what it predicts from its coefficients."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_mtraining.balance.coefficients import H200
from megatron_mtraining.balance.latency import (
    AttentionShape,
    predict,
    quantities,
)
from megatron_mtraining.errors import ConfigError

SHAPE = AttentionShape(16, 2, 128)


def visible_pairs(lengths) -> float:
    return sum(length * (length + 1) / 2 for length in lengths)


COEFFICIENTS = {
    "search": {"launch": 0.25, "rows": 0.5, "square": 0.125},
    "forward": {"launch": 0.5, "pairs": 2.0, "query_path": 0.25},
    "backward": {"key_rows": 3.0, "pairs": 4.0, "key_span": 0.5},
}


def test_the_sum_of_terms():
    tokens, density = 1 << 16, 0.25
    pairs = visible_pairs([tokens])
    found = predict(COEFFICIENTS, tokens, pairs, density, SHAPE, packed=False)
    attended = density * pairs
    each = attended / tokens / 1e3
    expected = (
        0.25 + 0.5 * 16 * tokens / 1e6 + 0.125 * 16 * tokens**2 / 1e9,
        0.5 + 2 * 16 * attended / 1e9 + 0.25 * each,
        3 * 2 * tokens / 1e6 + 4.5 * 16 * attended / 1e9,  # 1024 programs: the pairs decide
    )
    assert found == pytest.approx(expected)
    assert found.total_ms == pytest.approx(sum(expected))
    several = np.array([tokens, 0]), pairs, np.array([density, 7.0])
    many = predict(COEFFICIENTS, *several, SHAPE, packed=False)
    assert many.total_ms == pytest.approx([sum(expected), 0])


def test_a_rank_has_its_share():
    pairs = visible_pairs([65536])
    whole, part = (quantities(65536, pairs, 0.5, SHAPE, size, packed=True) for size in (1, 2))
    shared = ("rows", "packed_rows", "key_rows", "pairs", "far_pairs", "key_span", "square")
    assert {name: whole[name] / 2 for name in shared} == pytest.approx({n: part[n] for n in shared})
    for name in ("launch", "heads", "query_path", "candidates"):  # of one query, or every rank's
        assert whole[name] == pytest.approx(part[name])


def test_the_longest_program_of_the_gradient_of_keys():
    """A GPU of 132 multiprocessors, blocks of 128 keys."""
    tokens, pairs = 4096, visible_pairs([4096])
    work = 16 * pairs / 1e9
    # 64 programs, whose longest has twice the mean: 264 of them would keep all busy.
    assert quantities(tokens, pairs, 1, SHAPE, packed=True)["key_span"] == pytest.approx(
        work * 264 / 64
    )
    many = AttentionShape(16, 16, 128)
    assert quantities(tokens, pairs, 1, many, packed=True)["key_span"] == pytest.approx(work)
    # With lists, the queries of 8 heads may all attend to one block, at any density.
    density, lists = np.array([0.0, 0.01, 0.3]), dict(packed=True, kind="block_lists")
    found = quantities(tokens, pairs, density, SHAPE, **lists)
    longest = 128 * 8 * 2 * pairs / tokens / 1e9
    assert found["key_span"] == pytest.approx([0, 132 * min(longest, 0.01 * work), 132 * longest])


def test_packed_documents():
    tokens = np.array([8192, 8192])
    pairs = np.array([visible_pairs([8192]), visible_pairs([4096, 4096])])
    found = quantities(tokens, pairs, 0.1, SHAPE, packed=False)
    assert found["packed_rows"].tolist() == [0, 0]
    # A layer that is given documents has masks, if there is only one.
    packed = quantities(tokens, pairs, 0.1, SHAPE, packed=True)
    assert packed["packed_rows"].tolist() == [16 * 8192 / 1e6] * 2
    assert found["candidates"] == pytest.approx([16 * 8193 / 1e6, 16 * 4097 / 1e6])
    far = found["far_pairs"] / found["pairs"]
    assert far == pytest.approx([8193 / (8193 + 524288), 4097 / (4097 + 524288)])


@pytest.mark.parametrize("kind", ["vertical_slash", "block_lists", "dense"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_coefficients_are_sane(kind, head_dim):
    """Never negative or falling in tokens, pairs, density or heads; work decides at a million tokens."""
    h200, shape = H200[kind, head_dim], AttentionShape(16, 2, head_dim)
    tokens = 2.0 ** np.arange(9, 21)
    pairs, density = tokens * (tokens + 1) / 2, np.linspace(0, 1, 21)[:, None]
    for given in (dict(packed=False), dict(packed=True), dict(packed=True, cp_size=8)):
        found = predict(h200, tokens, pairs, density, shape, kind=kind, **given)
        for part in found:
            assert (part >= 0).all() and np.isfinite(part).all()
            assert (np.diff(part, axis=0) >= 0).all() and (np.diff(part, axis=1) >= 0).all()
    found = predict(h200, tokens, pairs, density, shape, packed=False, kind=kind)
    # Twice the tokens at one density are about four times the work.
    dense = found.forward_ms[-1] + found.backward_ms[-1]
    assert 3.5 < dense[-1] / dense[-2] < 4.5


def test_what_cannot_be_predicted():
    for wrong in (dict(shape=AttentionShape(0, 2, 128)), dict(cp_size=0)):
        with pytest.raises(ConfigError, match="use 1 or more of each"):
            predict(COEFFICIENTS, 4096, 1e6, 0.1, packed=True, **{"shape": SHAPE, **wrong})
