# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Dynamic sparse ring attention as a context-parallel attention backend for Megatron-LM."""

from .config import ConfigError, MTrainingConfig

__version__ = "0.1.0"

__all__ = ["ConfigError", "MTrainingConfig", "__version__", "register"]


def register() -> None:
    """Add the backend ``mtraining`` to the Megatron that is installed; idempotent.

    See :func:`megatron_mtraining.megatron.register`. Imported on call, because only the Megatron
    plug-in may import Megatron.
    """
    from .megatron import register as register_with_megatron

    register_with_megatron()
