# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How transformers opens what a folder has: from the folder alone, and without the folder's own code."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import ConfigError
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


REPORTED = dict(output_loading_info=True, ignore_mismatched_sizes=True)
"""Arguments of a ``from_pretrained`` of weights, for :func:`check_whole_model`."""


def check_whole_model(label: str, info: dict, *, unneeded: Collection[str] = ()) -> None:
    """Refuse a model of which weights are missing, too many or of another shape.

    transformers would draw what is missing at random, leave out what is too much, and say so only in its log.

    Args:
        label: how messages call the model.
        info: what ``from_pretrained`` returns of :data:`REPORTED`.
        unneeded: names of weights that may be missing.

    Raises:
        ConfigError: names the first such weight.
    """
    if wrong := sorted(info["mismatched_keys"], key=str):
        name, found, expected = wrong[0]
        raise ConfigError(
            f"{label} has {name} of shape {list(found)}, and its config.json's model {list(expected)}: get "
            "weights and config.json of one model"
        )
    if missing := sorted({*info["missing_keys"]} - {*unneeded}):
        raise ConfigError(f"{label} has no {missing[0]}, which its config.json's model has")
    if more := sorted(info["unexpected_keys"]):
        raise ConfigError(
            f"{label} has {more[0]}, which its config.json's model has not: get weights and config.json of "
            "one model"
        )
