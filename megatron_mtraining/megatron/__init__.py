# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The plug-in: all contact between attention and Megatron.

The files, in the order a run meets them:

- ``registration``: :func:`register`, and the table of what is replaced in Megatron; ``wrapping``: how
- ``backend``: the enum member ``AttnBackend.mtraining``
- ``options``: the options ``--mtraining-*``; ``arguments``: refused before Megatron's validation, filled in
  after it; with ``checks`` (the table of what is unsupported) and ``rotary_options`` (context extension)
- ``missing_names``: a name that Megatron-Core 0.16 uses without having defined it
- ``gpt_model``: construction of ``GPTModel``; with ``layer_spec`` (where core attention is put),
  ``rotary_embedding`` (in the striped layout), ``output_layer`` (output layer and loss in chunks) and
  ``main_grad`` (where the weight's gradient goes)
- ``checkpoint``: what checkpoints save and restore
- ``decoder``: a forward of the layers, with ``borders`` (hidden states between Megatron's layout of tokens
  and the striped one) and ``packed_documents`` (documents, from the batch to the layers)
- ``core_attention``: :class:`MTrainingAttention`, the module in each layer
- ``recompute``: its results under activation recomputation
- ``run_state``: what layers share: the steering of their prices, and the step
- ``balance``: data-parallel ranks that take equally long: batching, and multipliers of the price
- ``hosts``: whether inner groups fit the hosts
- ``density``: the end of a step, and the line in the log
"""

from .registration import register

__all__ = ["MTrainingAttention", "register", "settings"]


def __getattr__(name: str):
    """``MTrainingAttention`` and ``settings``, imported when first asked for: :func:`register` names the
    version of a Megatron that is too old to import them."""
    if name == "MTrainingAttention":
        from .core_attention import MTrainingAttention

        return MTrainingAttention
    if name == "settings":
        from .arguments import settings

        return settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
