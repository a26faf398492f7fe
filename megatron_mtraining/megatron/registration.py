# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``register``: every place in Megatron that the plug-in touches, on one page."""

from __future__ import annotations

import importlib

from ..config import ConfigError
from .wrapping import wrap

OLDEST = (0, 16)
"""The first Megatron-Core whose seams are the ones used here."""


def register() -> None:
    """Add attention backend ``mtraining`` to the Megatron that is installed.

    Idempotent; before or after a training script's imports. Each wrapper hands over to the original
    unless a run has chosen the backend, so that other runs are unchanged.

    Without Megatron-LM (``megatron.training``), the parts of megatron-core alone are wrapped.

    Raises:
        ImportError: megatron-core is not importable.
        ConfigError: it is too old.
    """
    check_version(_module("megatron.core").__version__)
    from . import batch, model, output, packing, recompute, rotary
    from .backend import add_member

    add_member()
    core = "megatron.core."
    language_module = _module(core + "models.common.language_module.language_module")
    gpt_model = _module(core + "models.gpt.gpt_model")
    yarn = _module(core + "models.common.embeddings.yarn_rotary_pos_embedding")
    transformer_engine = _module(core + "extensions.transformer_engine")
    vision_module = _module(core + "models.common.vision_module.vision_module")
    wrap(language_module.LanguageModule, "__init__", model.wrap_any_model)
    wrap(vision_module.VisionModule, "__init__", model.wrap_any_model)
    wrap(gpt_model.GPTModel, "__init__", model.wrap_gpt_model)
    wrap(gpt_model.GPTModel, "_postprocess", output.wrap_postprocess)
    wrap(gpt_model.GPTModel, "forward", packing.wrap_forward)
    wrap(yarn.YarnRotaryEmbedding, "_set_cos_sin_cache", rotary.wrap_yarn_cache)
    wrap(_module(core + "tensor_parallel.random"), "checkpoint", recompute.wrap_checkpoint)
    wrap(transformer_engine, "te_checkpoint", recompute.wrap_checkpoint)
    wrap(_module(core + "utils"), "get_batch_on_this_cp_rank", batch.wrap_get_batch)

    try:
        arguments = _module("megatron.training.arguments")
        checkpointing = _module("megatron.training.checkpointing")
        training = _module("megatron.training.training")
    except ImportError:
        # megatron-core alone, or without what Megatron-LM needs: then no script can use it either.
        return
    from . import checkpoint, density
    from .arguments import WRAPPERS

    for name, make in WRAPPERS.items():
        wrap(arguments, name, make)
    wrap(training, "training_log", density.wrap_training_log)
    wrap(checkpointing, "generate_state_dict", checkpoint.wrap_generate_state_dict)
    wrap(checkpointing, "check_checkpoint_args", checkpoint.wrap_check_checkpoint_args)
    wrap(checkpointing, "load_checkpoint", checkpoint.wrap_load_checkpoint)


def check_version(version: str) -> None:
    """Raise :class:`ConfigError` if Megatron-Core ``version`` is older than :data:`OLDEST`."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Megatron-Core is {version}, but megatron-mtraining needs {oldest} or later: use a "
            "newer megatron-core or Megatron-LM checkout"
        )


def _module(name: str):
    return importlib.import_module(name)
