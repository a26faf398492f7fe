# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What several modules of these tests run over."""

from __future__ import annotations

import pytest
import torch

from tests.support.transformers_cases import SEQ


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 97, (2, SEQ), generator=torch.Generator().manual_seed(1))
