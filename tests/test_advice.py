# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a run is told of its pattern, and which heads are at a cap."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.advice import Caps, warnings_of
from megatron_mtraining.config import FixedPolicy, MTrainingConfig, PricePolicy
from megatron_mtraining.pattern.vertical_slash_index import build_index


@pytest.mark.parametrize(
    "step, recall, target, capped, expected",
    [
        (50, 0.9, 0.95, None, {"recall"}),
        (49, 0.9, 0.95, None, set()),
        (50, 0.9, 0.91, None, set()),
        (50, 0.9, None, None, set()),
        (1, 0.9, None, 0.25, {"capped"}),
        (1, 0.9, None, 0.05, set()),
        (50, 0.9, 0.95, 0.25, {"recall"}),
    ],
)
def test_what_is_told(step, recall, target, capped, expected):
    found = warnings_of(step, 0.5, 0.3, recall, target, capped)
    assert set(found) == expected
    if "recall" in found:
        assert "recall is 0.9000, and --mtraining-target-recall 0.95" in found["recall"]
    if "capped" in found:
        assert (
            "25.0% of the heads" in found["capped"]
            and "--mtraining-vertical-cap" in found["capped"]
        )


@pytest.mark.parametrize(
    "price, density, told", [(0.5, 0.96, 1), (0.5, 0.9, 0), (0, 1, 0), (None, 1, 0)]
)
def test_a_price_that_keeps_all(price, density, told):
    assert ("density" in warnings_of(1, price, density, 1.0)) == bool(told)


def test_heads_that_reach_their_own_caps():
    config = MTrainingConfig.from_options(
        window=64, block_size=64
    )  # its window has distances 0 and 1
    policies = [
        PricePolicy(vertical_cap=3), PricePolicy(vertical_cap=4), PricePolicy(slash_cap=2),
        PricePolicy(slash_cap=3), PricePolicy(slash_cap=0), FixedPolicy(vertical=3, slash=2),
    ]  # fmt: skip
    distances = torch.zeros(1, 6, 8, dtype=torch.bool)
    distances[..., [0, 1, 4, 6]] = True
    columns = torch.tensor([0, 70, 200, 512]).expand(1, 6, 4)  # the last is none
    caps = Caps.of(policies, config)
    reached = caps.reached(build_index(distances, columns, 512, 64, 1))
    assert reached.tolist() == [[True, False, True, False, False, False]]
    assert Caps.of(policies[5:], config) is None
