# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Opening a model of any supported kind."""

from __future__ import annotations

from ..errors import ConfigError
from .hugging_face import open_folder, open_gguf
from .megatron_checkpoint import MegatronCheckpoint
from .megatron_folder import is_checkpoint
from .types import ModelOptions, Source


def open_model(options: ModelOptions) -> Source:
    """Open the model at ``options.path`` without reading its weights.

    Raises:
        ConfigError: there is no model, or it is not supported; the message says why and what is.
    """
    path, name = options.path, options.name
    if not path.exists():
        raise ConfigError(
            f"{name} is {path}, which does not exist: give a Hugging Face folder, a .gguf file or a "
            "Megatron checkpoint"
        )
    if path.is_file():
        return open_gguf(options)
    if (path / "config.json").is_file():
        return open_folder(options)
    if is_checkpoint(path):
        return MegatronCheckpoint(options)
    inside = sorted(path.glob("*.gguf"))
    if inside:
        raise ConfigError(f"{name} is the folder {path}: give the GGUF file, such as {inside[0]}")
    raise ConfigError(
        f"{name} is the folder {path}, which has no config.json (as a Hugging Face model has), and neither "
        "metadata.json nor latest_checkpointed_iteration.txt (as a Megatron checkpoint has)"
    )
