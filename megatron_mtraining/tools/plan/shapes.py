# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Models that a plan knows by name: what it reads of their config.json."""

from __future__ import annotations

from pathlib import Path

from ...config import ConfigError
from ...files import read_json
from ..convert.families import Model, model_of
from ..convert.fields import wrong_types_refused

FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
QWEN2, QWEN3, LLAMA = (f"{name}ForCausalLM" for name in ("Qwen2", "Qwen3", "Llama"))
SHAPES = {
    "qwen2.5-0.5b": (QWEN2, (896, 4864, 24, 14, 2, 151936, True)),
    "qwen2.5-1.5b": (QWEN2, (1536, 8960, 28, 12, 2, 151936, True)),
    "qwen2.5-3b": (QWEN2, (2048, 11008, 36, 16, 2, 151936, True)),
    "qwen2.5-7b": (QWEN2, (3584, 18944, 28, 28, 4, 152064, False)),
    "qwen2.5-14b": (QWEN2, (5120, 13824, 48, 40, 8, 152064, False)),
    "qwen2.5-32b": (QWEN2, (5120, 27648, 64, 40, 8, 152064, False)),
    "qwen2.5-72b": (QWEN2, (8192, 29568, 80, 64, 8, 152064, False)),
    "qwen3-8b": (QWEN3, (4096, 12288, 36, 32, 8, 151936, False)),
    "llama-3.1-8b": (LLAMA, (4096, 14336, 32, 32, 8, 128256, False)),
}


def shape_of(name: str) -> Model:
    """The model of ``--hf``: a Hugging Face folder, its config.json, or a name in :data:`SHAPES`.

    Raises:
        ConfigError: it is none of these.
    """
    path, known = Path(name), name.rsplit("/", 1)[-1].lower()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        config = read_json(file)
        with wrong_types_refused(file):
            return model_of(config, file)
    if known not in SHAPES:
        raise ConfigError(
            f"--hf is {name}: give a folder with a config.json, or one of {', '.join(SHAPES)}"
        )
    return model_of(config_of(known), path)


def config_of(known: str) -> dict:
    """The fields of config.json of a model in :data:`SHAPES`."""
    architecture, sizes = SHAPES[known]
    config = dict(zip(FIELDS, sizes), architectures=[architecture], rms_norm_eps=1e-6)
    if architecture == QWEN3:
        config["head_dim"] = 128
    return config
