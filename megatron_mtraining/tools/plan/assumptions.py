# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a plan assumes of a GPU's memory, which it does not compute."""

GIB = 2**30
OVERHEAD_GIB = 2.0
"""CUDA context, kernels, NCCL's buffers and cuBLAS's workspaces: an assumption, not measured."""
SLACK = 0.05
"""Memory that PyTorch's allocator reserves beyond allocated memory: an assumption, not measured."""
