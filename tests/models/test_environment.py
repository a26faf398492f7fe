# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Device, dtype, and Megatron-Core in a single process."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import ConfigError
from megatron_mtraining.models.environment import (
    device_of,
    megatron_on_cpu,
    quietly,
    single_process,
)


@pytest.mark.parametrize("name", ["abacus", "meta", "cuda:99"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(ConfigError, match=f"--device is {name}"):
        device_of(name)


def test_quietly_holds_back_notices_and_restores_the_log_level():
    logger = logging.getLogger("megatron.core")
    before = logger.level
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert quietly(lambda: warnings.warn("old", stacklevel=1) or logger.level) == logging.ERROR
    assert not seen and logger.level == before


def test_a_single_process_has_megatrons_groups_and_leaves_none(monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    with single_process(torch.device("cpu")):
        assert parallel_state.get_context_parallel_world_size() == dist.get_world_size() == 1
        assert "NVTE_FLASH_ATTN" not in os.environ
    assert not dist.is_initialized() and os.environ["NVTE_FLASH_ATTN"] == "1"


def test_megatron_on_cpu_answers_for_cuda_and_only_if_enabled():
    own = torch.cuda.current_device
    with megatron_on_cpu(True):
        assert torch.cuda.current_device() == torch.device("cpu")
    with megatron_on_cpu(False):
        assert torch.cuda.current_device is own
    assert torch.cuda.current_device is own
