# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A name that Megatron-Core 0.16 uses without having defined it."""

from __future__ import annotations


def define_missing_names() -> None:
    """Let routers of experts run without Transformer Engine in Megatron-Core 0.16.

    Its ``router_gating_linear`` asks whether Transformer Engine's GEMM is None, but has the name only where
    Transformer Engine is, and ends in a NameError elsewhere. Later versions define it as None, as this does.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
