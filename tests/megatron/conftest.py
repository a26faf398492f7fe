# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The Megatron tests run with the plug-in registered; that it changes nothing else is tested too."""

import pytest
import torch

from megatron_mtraining.megatron import register

register()


@pytest.fixture
def cpu_random(monkeypatch):
    """Megatron's checkpoint keeps the state of the GPU's random generator."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state())
    monkeypatch.setattr(
        random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)
    )
