# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Where a model runs: device, dtype, and Megatron-Core in a single process, with a GPU or without."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..megatron.missing_names import define_missing_names

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
"""By their names on command lines."""
Result = TypeVar("Result")


def device_of(name: str | None) -> torch.device:
    """The device of ``--device``; with None the GPU if there is one, else the CPU.

    Raises:
        ConfigError: the device is unknown or absent.
    """
    gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if gpu else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ConfigError(f"--device is {name}: use cuda, cuda:1 and so on, or cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if gpu else 0
        if (device.index or 0) >= count:
            found = f"{count} GPUs" if count else "no GPU"
            raise ConfigError(f"--device is {name}, but torch finds {found} here: use --device cpu")
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on devices with bfloat16 matrix instructions, else float32."""
    if device.type == "cuda":
        return torch.bfloat16
    supported = (
        getattr(torch.cpu, name, bool)()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return torch.bfloat16 if any(supported) else torch.float32


def quietly(function: Callable[[], Result]) -> Result:
    """Call a function without Megatron's notices about deprecated or missing optional parts."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()
    finally:
        logger.setLevel(level)


@contextmanager
def single_process(device: torch.device) -> Iterator[None]:
    """Megatron's process groups with this process as the only rank, while the context lasts."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    define_missing_names()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        with megatron_on_cpu(not on_gpu), _without_variables("NVTE_"):
            parallel_state.initialize_model_parallel()
            try:
                model_parallel_cuda_manual_seed(0)
                yield
            finally:
                parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


@contextmanager
def megatron_on_cpu(enabled: bool) -> Iterator[None]:
    """Let Megatron-Core build and run a GPTModel on the CPU while the context lasts.

    Megatron asks CUDA for two things wherever it runs: the current device, for tensors that it makes, and
    the state of the random generator, which it swaps around dropout. Both are answered for the CPU here.
    With ``enabled`` false, as with a GPU, nothing is changed. Only tools use this, never the plug-in.
    """
    with ExitStack() as stack:
        if enabled:
            from megatron.core.tensor_parallel import random

            def replace(owner, name, replacement):
                stack.enter_context(mock.patch.object(owner, name, replacement))

            def get_state(*args, **kwargs):
                return torch.get_rng_state()

            def set_state(state, *args, **kwargs):
                torch.set_rng_state(state)

            replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
            replace(torch.cuda, "get_rng_state", get_state)
            replace(torch.cuda, "set_rng_state", set_state)
            replace(torch.cuda, "manual_seed", torch.manual_seed)
            replace(random, "_get_cuda_rng_state", get_state)
            replace(random, "_set_cuda_rng_state", set_state)
        yield


@contextmanager
def _without_variables(prefix: str) -> Iterator[None]:
    """Remove environment variables with a prefix while the context lasts.

    Megatron-Core sets some by a model's attention backend, and refuses to build the next model if their
    values are not those that it would set.
    """
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(prefix)]:
            del os.environ[name]
        yield
