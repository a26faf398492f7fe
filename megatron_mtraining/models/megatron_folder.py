# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a Megatron-LM checkpoint in the format torch_dist: finding it, and reading all but weights."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from enum import Enum
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import ConfigError
from ..files import read_json, read_text, size_of
from ..requirements import first_line
from .environment import quietly
from .model_sizes import EXPERTS, check_size, short
from .untrusted import nothing_runs, read_metadata

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"release|[0-9]{1,18}", re.ASCII)
"""What Megatron-LM writes into its tracker."""
FIX = "save it with --ckpt-format torch_dist"


SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
}
"""Arguments that are sizes, with config.json's names of these."""
COMMON_IS_SHARDED = (0, 19)
"""The first version of Megatron-Core that saves a run's arguments among the sharded entries."""
NUMBERS = (
    "rotary_base", "rotary_percent", "rotary_scaling_factor", "rope_scaling_factor", "yarn_beta_fast",
    "yarn_beta_slow", "mscale", "mscale_all_dim", "norm_epsilon", "layernorm_epsilon", "softmax_scale",
    "rotary_seq_len_interpolation_factor", "moe_router_topk_scaling_factor",
)  # fmt: skip
"""Arguments that are numbers."""


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a Megatron checkpoint in any format, or the parent of its iterations."""
    names = (TRACKER, "metadata.json", "common.pt", ".metadata")
    return any((folder / name).exists() for name in names) or any(
        True for pattern in ("mp_rank_*", "iter_*") for _ in folder.glob(pattern)
    )


def find_iteration(folder: Path, name: str = "MODEL") -> Path:
    """The folder of the latest iteration if ``folder`` is the parent of several, else ``folder``.

    Args:
        name: what the command line calls the folder.

    Raises:
        ConfigError: there is no checkpoint, or it is in another format.
    """
    tracker = folder / TRACKER
    if os.path.lexists(tracker):
        word = read_text(tracker, f"{name} is {folder}, whose {TRACKER}", limit=1 << 16).strip()
        if not ITERATION.fullmatch(word):
            raise ConfigError(
                f"{name} is {folder}, whose {TRACKER} says {word[:80]!r}, which is neither an iteration's "
                "number nor release: name an iteration's folder"
            )
        iteration = word if word == "release" else f"iter_{int(word):07d}"
        if not (folder / iteration).is_dir():
            raise ConfigError(
                f"{name} is {folder}, whose {TRACKER} says {word!r}, but there is no folder {iteration}: "
                "name an iteration's folder"
            )
        folder = folder / iteration
    elif iterations := sorted(folder.glob("iter_*")):
        raise ConfigError(
            f"{name} is {folder}, without {TRACKER}: name an iteration's folder, such as {iterations[-1]}"
        )
    if any(folder.glob("mp_rank_*")):
        raise ConfigError(
            f"{name} is {folder}, a Megatron checkpoint in the format torch: {FIX}, which Megatron-LM does "
            "when it loads this one and saves it again (--ckpt-convert-format torch_dist)"
        )
    try:
        kind = read_json(folder / "metadata.json").get("sharded_backend")
    except ConfigError:
        kind = None
    kind = kind[:80] if isinstance(kind, str) else None
    if kind != "torch_dist" or not (folder / ".metadata").is_file():
        what = f"in the format {kind}" if kind not in (None, "torch_dist") else "that is not whole"
        raise ConfigError(
            f"{name} is {folder}, a Megatron checkpoint {what} (it needs .metadata, and metadata.json with "
            f"sharded_backend torch_dist): {FIX}"
        )
    return folder


def read_common(folder: Path, label: str) -> dict:
    """Everything in an iteration's folder that is not a tensor, such as the run's arguments.

    Args:
        label: what error messages call the folder.

    Raises:
        ConfigError: it cannot be read.
    """
    if os.path.lexists(folder / "common.pt"):
        size_of(folder / "common.pt", "")
    else:
        _check_that_megatron_is_new_enough(label)

    def load():
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_common_state_dict(str(folder))

    try:
        with nothing_runs():
            return quietly(load)
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:
        raise ConfigError(
            f"the arguments in {label} cannot be read by the Megatron-Core that is installed: "
            f"{reason(error)}"
        ) from error


def _check_that_megatron_is_new_enough(label: str) -> None:
    """Of a folder without ``common.pt``, which Megatron-Core 0.19 has among the sharded entries."""
    from megatron.core import __version__ as version

    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < COMMON_IS_SHARDED:
        raise ConfigError(
            f"{label} has no common.pt: it was saved by Megatron-Core 0.19 or later, or is not whole, and "
            f"{version} is installed, which cannot read it: install 0.19 or later"
        )


def args_in(common: dict, label: str) -> Namespace:
    """The arguments of the training run in :func:`read_common`'s result.

    Raises:
        ConfigError: there are none.
    """
    args = common.get("args")
    if not isinstance(args, Namespace):
        raise ConfigError(
            f"{label} has no arguments of a training run (it has {', '.join(sorted(common))}): "
            "checkpoints of Megatron-LM's pretrain_gpt.py are supported"
        )
    for name, size in SIZES.items():
        value = getattr(args, name, None)
        if value is not None and not (size in EXPERTS and type(value) is int and value == 0):
            check_size(size, value, f"{name} among the arguments in {label}")
    for name in NUMBERS:
        value = getattr(args, name, None)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and abs(value) < 1 << 62):
            raise ConfigError(
                f"{name} among the arguments in {label} is {short(value)}: a finite number is needed"
            )
    return _Arguments(args, label)


class _Arguments(Namespace):
    """A run's arguments. One that is no plain value is refused where it is read, and else passed over."""

    def __init__(self, args: Namespace, label: str):
        plain = {name: value for name, value in vars(args).items() if _is_plain(value)}
        super().__init__(**plain)
        self._strange = {
            name: (type(value).__name__, label)
            for name, value in vars(args).items()
            if name not in plain
        }

    def __getattr__(self, name: str):
        if name in self.__dict__.get("_strange", {}):
            kind, label = self._strange[name]
            raise ConfigError(
                f"{name} among the arguments in {label} is a {kind}, and no value that Megatron-LM saves"
            )
        raise AttributeError(name)


def _is_plain(value, depth: int = 0) -> bool:
    """Whether a value compares and prints as the options of a command line do."""
    if isinstance(value, (list, tuple)):
        return (
            depth < 4 and len(value) < 1 << 20 and all(_is_plain(each, depth + 1) for each in value)
        )
    return value is None or isinstance(value, (bool, int, float, str, Enum, torch.dtype))


def read_keys(folder: Path) -> set[str]:
    """The names of all sharded entries, which are mostly tensors.

    Raises:
        ConfigError: they cannot be read.
    """
    return set(read_metadata(folder).state_dict_metadata)


def reason(error: BaseException) -> str:
    """An error in one line; for a CheckpointException the last line of the traceback that it quotes."""
    if isinstance(error, CheckpointException):
        return str(error).strip().splitlines()[-1].strip()
    return first_line(error)
