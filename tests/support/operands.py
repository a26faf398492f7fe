# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A file of a layer's queries and keys."""

from __future__ import annotations

import torch


def write_operands(path, tokens: int) -> None:
    """A safetensors file: 2 query heads and 1 key head of dimension 64, bfloat16."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    heads = {"query": 2, "key": 1}
    save_file({n: torch.randn(h, tokens, 64, dtype=torch.bfloat16) for n, h in heads.items()}, path)
