# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How transformers opens what a folder has: from the folder alone, and without the folder's own code."""

from __future__ import annotations

from ..requirements import first_line

LOCAL = dict(local_files_only=True, trust_remote_code=False)
"""Arguments of every ``from_pretrained``. Without the second, transformers asks on standard input whether to
run a repository's code, and takes a ``y`` that was meant for something else."""


def reason(error: BaseException) -> str:
    """Why transformers could not open something, in one line."""
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return (
            "it wants Python code of its own run (auto_map in its JSON files), which mtraining never does: "
            "use a model and a tokenizer of a kind that transformers has itself, such as Llama or Qwen2"
        )
    return first_line(error)
