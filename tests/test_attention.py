# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What :func:`attend` is given: refused in one line where it does not fit, and never attended to somehow."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.config import FixedPolicy

TOKENS, HEADS = 256, 4
PRICED = MTrainingConfig.from_options(block_size=64, window=64, sample_strata=8)
ONE = FixedPolicy(20, 4)
WRONG = {
    "policies of fewer heads": (dict(head_policies=[ONE] * 3), "3 head_policies, but 4 heads"),
    "policies of more heads": (dict(head_policies=[ONE] * 5), "5 head_policies, but 4 heads"),
    "policies of no heads": (dict(head_policies=[]), "0 head_policies, but 4 heads"),
    "no policy": (dict(head_policies=[ONE, None, ONE, ONE]), "policy of head 1 is None"),
    "price of nothing": (dict(price=torch.tensor(float("nan"))), "price is nan"),
    "negative price": (dict(price=torch.tensor(-1.0)), "price is -1"),
    "prices of fewer heads": (dict(price=torch.ones(3)), r"shape \[3\]"),
    "price of a float": (dict(price=0.3), "price is 0.3"),
    "infinite scale": (dict(softmax_scale=float("inf")), "softmax_scale is inf"),
    "scale beyond float32": (dict(softmax_scale=1e300), "softmax_scale is 1e"),
    "no settings": (dict(config=None), "config is a NoneType"),
    "no tensor": (dict(key=[1]), "key is a list"),
    "no heads": (dict(query=torch.ones(TOKENS, 1, 0, 64)), "empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    wrong, named = WRONG[case]
    key = torch.randn(TOKENS, 1, 2, 64)
    given = dict(query=torch.randn(TOKENS, 1, HEADS, 64), key=key, value=key, config=PRICED) | wrong
    with pytest.raises(ValueError, match=named):
        attend(given.pop("query"), given.pop("key"), given.pop("value"), **given)
