# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A file of a layer's queries and keys."""

from __future__ import annotations

import json

import torch


def write_operands(path, tokens: int) -> None:
    """A safetensors file, by hand: 2 query heads and 1 key head of dimension 64, bfloat16."""
    torch.manual_seed(0)
    header, data = {}, b""
    for name, heads in (("query", 2), ("key", 1)):
        tensor = torch.randn(heads, tokens, 64, dtype=torch.bfloat16)
        raw = tensor.view(torch.int16).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = dict(dtype="BF16", shape=list(tensor.shape), data_offsets=offsets)
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
