# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Environment variables that choose kernels: a value that none can have is refused."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.attention import attend
from megatron_mtraining.switches import SWITCHES, given_switches, switch
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("name", SWITCHES)
def test_values(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert switch(name) is None
    for value in SWITCHES[name]:
        monkeypatch.setenv(name, value)
        assert switch(name) == value
        assert given_switches()[name] == value
    for value in ("", "on", "-1"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name} is '{value}' in the environment: set it to"):
            given_switches()


def different_switches(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("MTRAINING_BACKWARD", "one_pass")
        query = torch.zeros(128, 1, 2, 64)
        config = MTrainingConfig.from_options(block_size=64, policy="fixed", vertical=4, slash=4)
        with pytest.raises(ConfigError, match="MTRAINING_BACKWARD in the environment") as found:
            attend(query, query, query, config=config, cp_group=torch.distributed.group.WORLD)
        return str(found.value)


def test_ranks_with_different_values_end_together():
    first, second = run_ranks(2, different_switches)
    assert first == second and "unset" in first and "one_pass" in first
