# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""CUDA graphs without a GPU: they record what PyTorch runs, and run it again."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """In place of a CUDA graph: records operations, and runs them again on the same tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)

    def replay(self):
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def fake_cuda(monkeypatch):
    """torch.cuda as far as graphs use it, without a GPU; its stream is returned."""
    stream = SimpleNamespace(
        device_index=0, cuda_stream=7, wait_stream=lambda other: None, synchronize=lambda: None
    )
    fakes = dict(
        CUDAGraph=RecordedGraph,
        Stream=lambda device: stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device=None: stream,
        graph_pool_handle=lambda: (0, 1),
        is_current_stream_capturing=lambda: False,
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return stream
