# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the host does for a pattern search: launches of kernels, PyTorch's operations, waits for the device.

Each takes 5 to 20 microseconds, and a wait as long as all that the device has still to do. On short sequences
that is the time of a search.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import MobaPolicy, PricePolicy, XAttentionPolicy
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.kernels.common import launch
from megatron_mtraining.pattern import block_list_index, search_pattern
from megatron_mtraining.pattern.constants import made_once
from megatron_mtraining.visibility import VisibleRanges
from tests.support.attention_cases import random_operands


class Operations(TorchDispatchMode):
    """Lists PyTorch's operations that launch a kernel: neither views, nor new memory without contents."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        returned = [each.alias_info for each in func._schema.returns]
        is_view = any(info is not None and not info.is_write for info in returned)
        if not is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted(interpreter, monkeypatch):
    """Counts of a search, by kind. Its kernels do not run: nothing depends on what they would write, and what
    is made once with them is for this test alone."""
    kernels, waits = [], []
    own = made_once(block_list_index._no_slashes.__wrapped__)
    monkeypatch.setattr(block_list_index, "_no_slashes", own)
    original = launch.launch
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_mtraining.") and getattr(module, "launch", None) is original:
            monkeypatch.setattr(
                module, "launch", lambda kernel, *_, **given: kernels.append(kernel)
            )
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name), waits))

    def count(policy, documents=False):
        config = MTrainingConfig(policy=policy, block_size=64)
        query, key, _, _ = random_operands(1024, 1, 4, 2, 64, torch.bfloat16, "cpu")
        starts = torch.zeros(1, 1024, dtype=torch.int32)
        starts[:, 300:] = 300
        visible = VisibleRanges(starts) if documents else None
        for _ in range(2):  # the first makes what all layers share
            kernels.clear(), waits.clear()
            with Operations() as operations:
                search_pattern(query, key, config, CPGroup(None), 0.1, visible=visible)
        return len(kernels), len(operations.names), len(waits)

    return count


def _noting(original, calls):
    def noted(self, *args, **kwargs):
        calls.append(original)
        return original(self, *args, **kwargs)

    return noted


@pytest.mark.parametrize(
    ("policy", "documents", "most_kernels", "most_operations"),
    [
        pytest.param(PricePolicy(), False, 11, 3, id="price"),
        pytest.param(XAttentionPolicy(), False, 10, 10, id="xattention"),
        pytest.param(XAttentionPolicy(), True, 10, 11, id="xattention-documents"),
        pytest.param(MobaPolicy(top_k=3), False, 8, 49, id="moba"),
        pytest.param(MobaPolicy(top_k=3), True, 8, 51, id="moba-documents"),
    ],
)
def test_a_search_has_few_launches(counted, policy, documents, most_kernels, most_operations):
    kernels, operations, waits = counted(policy, documents)
    assert waits == 0
    assert kernels <= most_kernels and operations <= most_operations, (kernels, operations)
