# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How errors name a setting of Megatron's."""


def spelled(name: str, command_line: bool) -> str:
    """The option of Megatron-LM, or the attribute of a TransformerConfig: ``--kv-channels``,
    ``config.kv_channels``."""
    return "--" + name.replace("_", "-") if command_line else f"config.{name}"
