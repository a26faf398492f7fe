# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron-LM's own training scripts on a machine without a GPU: gloo, and CPU tensors for CUDA's.

For a first try and for tests (``python -m megatron_mtraining.launch --cpu``). What a script asks of ``cuda``
is answered for the CPU; streams and events do nothing. Nothing here knows of attention or of this backend.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sysconfig
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError
from ..relayout import zigzag_owner

CPU = torch.device("cpu")
ARGUMENTS = {
    "--transformer-impl": "local",
    "--distributed-backend": "gloo",
    "--use-cpu-initialization": None,
    "--no-rope-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-dropout-fusion": None,
}
"""Megatron-LM's arguments that a run on the CPU needs, with their values; None for a flag."""
GPU_ONLY = {
    "--fp8-format": "FP8",
    "--fp4-format": "FP4",
    "--use-flash-attn": "FlashAttention",
    "--tp-comm-overlap": "userbuffers",
}
"""Arguments that need a GPU, with what they switch on."""


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

    def record_event(self, event=None):
        return event or Stream()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def _always(value):
    return lambda *args, **kwargs: value


def _uncompiled(function=None, **kwargs):
    """torch.compile, which needs a compiler and would trace into all of this."""
    return function if function is not None else lambda wrapped: wrapped


def arguments(given: list[str]) -> list[str]:
    """The arguments of :data:`ARGUMENTS` that are not given, to be added to the command line.

    Raises:
        ConfigError: an argument is given that cannot run on the CPU.
    """
    names = [word.partition("=")[0] for word in given]
    for name, what in GPU_ONLY.items():
        if name in names:
            raise ConfigError(f"{name} needs a GPU ({what}): leave it out with --cpu")
    added = []
    for name, value in ARGUMENTS.items():
        if name not in names:
            added += [name] if value is None else [name, value]
            continue
        at = names.index(name)
        found = given[at].partition("=")[2] or "".join(given[at + 1 : at + 2])
        if value is not None and found != value:
            raise ConfigError(f"{name} is {found}: --cpu needs {name} {value}")
    return added


def compile_helpers() -> None:
    """Compile Megatron's dataset helpers for the Python that runs; its own makefile asks ``python3-config``,
    which may be another Python's.

    Raises:
        SystemExit: the compiler fails.
    """
    from megatron.core import datasets

    includes = f"-I{sysconfig.get_path('include')}"
    if find_spec("pybind11") is not None:
        import pybind11

        includes += f" -I{pybind11.get_include()}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    folder = Path(next(iter(datasets.__path__)))
    if (folder / f"helpers_cpp{suffix}").is_file():
        return
    command = ["make", "-s", "-C", str(folder), f"LIBEXT={suffix}", f"CPPFLAGS={includes}"]
    if subprocess.run(command).returncode != 0:  # noqa: S603 - Megatron's own makefile
        raise SystemExit(f"Megatron-LM's dataset helpers do not compile: {' '.join(command)}")


def install() -> None:
    """Answer for CUDA on the CPU, in this process. Imports Megatron-LM, which must be importable."""
    # Megatron asks for it wherever it computes on several ranks; it has no meaning without CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    install_torch()
    install_core()
    install_training()


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
    # Interleaved pipelines empty an output (deallocate_output_tensor) before its send has ended. Streams of
    # a GPU order the two; gloo would send what comes into that memory next, unless it holds a tensor there.
    isend = torch.distributed.isend

    def isend_alias(tensor, *args, **kwargs):
        return isend(tensor.detach(), *args, **kwargs)

    # torch compares operations of a batch with the second name.
    torch.distributed.isend = torch.distributed.distributed_c10d.isend = isend_alias
    # Megatron ends right after its last collective, and gloo's threads must not outlive Python: see
    # megatron_mtraining.ring.shut_down.
    atexit.register(time.sleep, 0.2)


def install_core() -> None:
    """megatron-core's random states, from the one generator that there is, sizes of all-to-alls, and the one
    function of Transformer Engine that packed sequences need."""
    from megatron.core import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def get_state(device="cuda", clone=False, graph_safe=False):
        return torch.get_rng_state()

    def set_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    def on_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    # Megatron's own leaves CPU tensors as they are, and the all-to-all of experts takes no tensors as sizes.
    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = on_host

    def thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank):
        rank, at = zigzag_owner(cu_seqlens.diff().tolist(), cp_size)
        own = (rank == cp_rank).nonzero().flatten()
        return own[at[own].argsort()]

    if getattr(utils, "tex", None) is None:
        utils.tex = SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
        # Megatron after 0.19 asks for layers of Transformer Engine's, which are no classes without it.
        if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
            multi_token_prediction.is_inference_column_parallel_linear = _always(False)


def install_training() -> None:
    """Megatron-LM's initialisation, without asking for a GPU."""
    from megatron.core.datasets import utils
    from megatron.training import initialize, training

    original = initialize.initialize_megatron

    def initialize_megatron(*args, **kwargs):
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    initialize.initialize_megatron = initialize_megatron
    training.initialize_megatron = initialize_megatron
    utils.compile_helpers = compile_helpers
    # It draws from the generator that the model's initialisation shares here.
    initialize._warmup_jit_function = _always(None)
    if hasattr(initialize, "fused_kernels"):
        initialize.fused_kernels.load = _always(None)  # looks for nvcc
