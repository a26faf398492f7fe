# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What is fuzzed: one function for each kind of input, for hypothesis and for fuzzers of bytes alike.

A target takes an input (bytes, or values for options) and an empty folder, and gives the input to the package
as a user would. It returns if the input was read. It raises ConfigError, or :class:`Refused` for a whole
command that has refused it in the right way. Whatever else it raises is a fault.
"""

from __future__ import annotations

from .checkpoints import (
    INDEX,
    TRACKER,
    common_pt,
    config_json,
    distcp,
    file_seeds,
    gguf,
    gguf_seeds,
    index_json,
    index_seeds,
    indexed_dataset,
    inspect_config,
    integrity,
    metadata,
    safetensors,
    tracker,
)
from .common import Fault, Refused, Target, check_message
from .documents import COMPRESS, jsonl, jsonl_seeds, parquet, parquet_seeds, text, text_seeds
from .settings import (
    HEADS,
    LAYERS,
    command_line,
    options,
    settings_json,
    settings_json_seeds,
    settings_yaml,
    settings_yaml_seeds,
)
from .tokens import GADGETS, JSON_TOKENS, LINES, YAML_TOKENS

TARGETS = {
    "options": Target(options),
    "command_line": Target(command_line),
    "settings_json": Target(settings_json, settings_json_seeds, JSON_TOKENS),
    "settings_yaml": Target(settings_yaml, settings_yaml_seeds, YAML_TOKENS),
    "config_json": Target(config_json, file_seeds(0, "config.json"), JSON_TOKENS),
    "inspect_config": Target(inspect_config, file_seeds(0, "config.json"), JSON_TOKENS),
    "index_json": Target(index_json, file_seeds(0, INDEX), JSON_TOKENS),
    "safetensors": Target(safetensors, file_seeds(0, "model-00001-of-00002.safetensors"), JSON_TOKENS),
    "tracker": Target(tracker, file_seeds(1, TRACKER), (b"release", b"0", b"/", b"..")),
    "metadata": Target(metadata, file_seeds(1, "release/.metadata"), GADGETS),
    "common_pt": Target(common_pt, file_seeds(1, "release/common.pt"), GADGETS),
    "distcp": Target(distcp, file_seeds(1, "release/__0_0.distcp"), GADGETS),
    "integrity": Target(integrity, file_seeds(1, "release/integrity.json"), JSON_TOKENS),
    "gguf": Target(gguf, gguf_seeds, (b"GGUF", b"\x09\0\0\0", b"\x08\0\0\0", b"\xff" * 8)),
    "indexed_dataset": Target(indexed_dataset, index_seeds, (b"MMIDIDX\0\0", b"\xff" * 8)),
    **{
        f"jsonl{suffix}": Target(jsonl(suffix), jsonl_seeds(suffix), () if suffix else LINES)
        for suffix in COMPRESS
    },
    "parquet": Target(parquet, parquet_seeds, (b"PAR1", b"\xff" * 8)),
    "text": Target(text, text_seeds, (b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf")),
}  # fmt: skip

__all__ = ["HEADS", "LAYERS", "TARGETS", "Fault", "Refused", "Target", "check_message"]
