# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Context-parallel groups: which backend and which order of ranks they have."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import ConfigError
from megatron_mtraining.cp_group import CPGroup, RankGroup
from tests.support.ranks import run_ranks


def backends(rank, world, name, config):
    """What groups are made with, and the device of collectives, on a machine with a GPU."""
    made = []
    group = dist.new_group([0, 1])
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 3
    dist.get_backend = lambda group=None: name
    dist.get_backend_config = lambda group=None: config
    dist.new_group = lambda ranks, **given: made.append((ranks, given["backend"])) or group
    CPGroup.communicator.__globals__["_timeout_of"] = lambda group: None
    cp = CPGroup(dist.group.WORLD, 1)
    cp.communicator("keys", [0, 1])
    device = RankGroup(dist.group.WORLD).device
    return made, None if device is None else str(device)


@pytest.mark.parametrize(
    "name,config,backend",
    [
        ("nccl", "cuda:nccl", "nccl"),
        ("undefined", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("gloo", "cpu:gloo,cuda:gloo", None),
    ],
)
def test_kinds_of_transfers_have_communicators_of_their_own_over_nccl(name, config, backend):
    """Also where the process group was made without a backend, or with one for each device."""
    for made, device in run_ranks(2, backends, name, config):
        assert made == ([] if backend is None else [([0, 1], backend)])
        assert device == (None if backend is None else "cuda:3")


def out_of_order(rank, world):
    dist.get_process_group_ranks = lambda group: [1, 0]
    try:
        CPGroup(dist.group.WORLD)
    except ConfigError as error:
        return str(error)


def test_ranks_that_do_not_ascend_are_refused():
    message = "the ranks of the context-parallel group are [1, 0]: give them in ascending order"
    assert run_ranks(2, out_of_order) == [message] * 2


def bound_to_a_device(rank, world):
    """The device that the default group is bound to while a communicator is made, and after it."""
    default, seen, new_group = dist.group.WORLD, [], dist.new_group
    default.bound_device_id = device = torch.device("cuda", 0)
    torch.cuda.is_available = lambda: True
    dist.get_backend = lambda group=None: "nccl"
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    dist.new_group = lambda ranks, **given: seen.append(default.bound_device_id) or default
    CPGroup.communicator.__globals__["_timeout_of"] = lambda group: None
    CPGroup(default, 1).communicator("keys", [0, 1])
    dist.new_group = new_group
    found = [*seen, default.bound_device_id == device]
    default.bound_device_id = None
    return found


def test_communicators_are_not_split_off_a_default_group_bound_to_a_device():
    """NCCL's split needs all ranks of the default group, and only members come."""
    assert run_ranks(2, bound_to_a_device) == [[None, True]] * 2
