# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Run a function on several gloo processes, and bring back what each returns."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_mtraining.ring import shut_down

TIMEOUT = 120  # seconds, of the process group


def _entry(rank, world, folder, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        torch.save(function(rank, world, *arguments), os.path.join(folder, f"result{rank}"))
    finally:
        shut_down()


def run_ranks(world, function, *arguments):
    """Results of ``function(rank, world, *arguments)``, in rank order. A rank's exception is raised
    here. ``function`` must be importable (module level)."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _entry, (world, folder, function, arguments), nprocs=world, start_method="spawn"
        )
        results = [os.path.join(folder, f"result{rank}") for rank in range(world)]
        return [torch.load(path, weights_only=False) for path in results]
