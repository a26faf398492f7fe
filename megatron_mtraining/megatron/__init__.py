# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""All contact with Megatron: the only package here that imports it.

:func:`register` adds the backend to the Megatron that is installed. The files, in the order a run
meets them: ``backend`` (the enum member), ``arguments`` (options and their validation),
``checks`` (what is refused), ``spec`` and ``model`` (layer specs, ``GPTModel``), ``batch`` and
``rotary`` (the striped layout), ``core_attention`` (the module in each layer), ``recompute`` (its
results under activation recomputation), ``output`` (output layer and loss), ``density`` (the log line).
"""

from .registration import register

__all__ = ["MTrainingAttention", "register", "settings"]


def __getattr__(name: str):
    """``MTrainingAttention`` and ``settings``, imported when first asked for: registering needs
    neither the kernels nor a device."""
    if name == "MTrainingAttention":
        from .core_attention import MTrainingAttention

        return MTrainingAttention
    if name == "settings":
        from .arguments import settings

        return settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
