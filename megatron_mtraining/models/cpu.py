# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What megatron-core needs to run without a GPU. For the quickstart and inspect, never for
the plug-in."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch


@contextmanager
def megatron_on_cpu(enabled: bool):
    """Let megatron-core build and run a GPTModel on the CPU while the context lasts.

    Megatron asks CUDA for two things wherever it runs: the current device, for tensors it makes,
    and the state of the random generator, which it swaps around dropout. Both questions are
    answered for the CPU here. With ``enabled`` false, as with a GPU, nothing is changed.
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
