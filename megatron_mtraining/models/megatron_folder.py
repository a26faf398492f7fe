# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The files of a Megatron-LM checkpoint in the format torch_dist: finding it, and reading all but weights."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from ..errors import ConfigError
from ..files import read_json, read_text
from ..requirements import first_line
from .environment import quietly
from .untrusted import nothing_runs, read_metadata

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"release|[0-9]{1,18}", re.ASCII)
"""What Megatron-LM writes into its tracker."""
FIX = "save it with --ckpt-format torch_dist"
COMMON_IS_SHARDED = (0, 19)
"""The first version of Megatron-Core that saves a run's arguments among the sharded entries."""


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
    if tracker.exists():
        word = read_text(tracker, f"{name} is {folder}, whose {TRACKER}").strip()
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
    if not (folder / "common.pt").exists():
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
    return args


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
