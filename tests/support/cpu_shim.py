# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Runs Megatron on a machine without a GPU, for tests: unmodified scripts, gloo, CPU tensors.

    python cpu_shim.py SCRIPT ARGUMENTS              a training script, as a plain run
    python cpu_shim.py -m MODULE SCRIPT ARGUMENTS    through a module such as the launcher

Everything that says "cuda" means the CPU here. Megatron must be importable (PYTHONPATH). Nothing of
this knows of attention or of the plug-in.
"""

from __future__ import annotations

import atexit
import contextlib
import runpy
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(device) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


class EverythingOnCpu(TorchFunctionMode):
    """Sends what is meant for a CUDA device to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers choose by this name, "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        args = tuple(CPU if _is_cuda(part) else part for part in args)
        return func(*args, **kwargs)


class Stream:
    """A stream or event that has always finished."""

    def __init__(self, *args, **kwargs):
        self.device = CPU

    def __getattr__(self, name):
        return lambda *args, **kwargs: 0.0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def _always(value):
    return lambda *args, **kwargs: value


def _uncompiled(function=None, **kwargs):
    """torch.compile, which needs a compiler and would trace into all of this."""
    return function if function is not None else lambda wrapped: wrapped


def install_torch() -> None:
    """CPU tensors for "cuda", and no-ops for what has no meaning without a device."""
    EverythingOnCpu().__enter__()
    torch.compile = _uncompiled
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.get_device_capability = _always((9, 0))
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1 << 30)
    cuda.get_device_properties = _always(properties)
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.manual_seed_all = _always(None)  # torch.manual_seed calls it
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _always(None))
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, _always(0))
        setattr(cuda, "max_" + name, _always(0))
    cuda.memory_stats = _always(defaultdict(int))
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *args: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _always(None)

    init_process_group = torch.distributed.init_process_group

    def without_device(*args, **kwargs):
        kwargs.pop("device_id", None)
        return init_process_group(*args, **kwargs)

    torch.distributed.init_process_group = without_device
    # Megatron ends right after its last collective, and gloo's threads must not outlive Python: see
    # megatron_mtraining.ring.shut_down.
    atexit.register(time.sleep, 0.2)


def install_core() -> None:
    """megatron-core's random states, from the one generator that there is."""
    from megatron.core.tensor_parallel import random

    def get_state(device="cuda", clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


def install_zigzag() -> None:
    """megatron-core's slice of the rotary table, which pins memory, for dense runs."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings import rotary_pos_embedding as rope
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    def zigzag(table, dim, cp_group):
        rank, size = cp_group.rank(), cp_group.size()
        halves = table.chunk(2 * size, dim)
        return torch.cat([halves[rank], halves[2 * size - 1 - rank]], dim)

    for module in (rope_utils, rope, yarn):
        module.get_pos_emb_on_this_cp_rank = zigzag


def install_training() -> None:
    """Megatron-LM's initialisation, without asking for a GPU."""
    from megatron.core.datasets import utils
    from megatron.training import initialize, training

    original = initialize.initialize_megatron

    def initialize_megatron(*args, **kwargs):
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    initialize.initialize_megatron = initialize_megatron
    training.initialize_megatron = initialize_megatron
    utils.compile_helpers = _always(None)  # compiled once by the tests, not by every run
    # It draws from the generator that the model's initialisation shares here.
    initialize._warmup_jit_function = _always(None)
    if hasattr(initialize, "fused_kernels"):
        initialize.fused_kernels.load = _always(None)  # looks for nvcc


def main(argv: list[str]) -> None:
    install_torch()
    install_core()
    install_training()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
