# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Run a Megatron-LM training script with the attention backend registered, without a patch.

    torchrun --nproc-per-node 8 -m megatron_mtraining.launch /path/to/pretrain_gpt.py ARGUMENTS

In place of ``torchrun ... /path/to/pretrain_gpt.py ARGUMENTS``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from .config import ConfigError
from .megatron.wrapping import is_first_local_rank

USAGE = "python -m megatron_mtraining.launch /path/to/pretrain_gpt.py [ARGUMENT ...]"


def main(argv: list[str] | None = None) -> None:
    """Register the backend, then run ``argv[0]`` as ``__main__`` with the rest as its arguments.

    Raises:
        SystemExit: with a message (once on each node): the script is missing, or Megatron is not
            importable or too old. What the script raises passes through.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    if not argv:
        _stop(f"name the training script: {USAGE}")
    script = Path(argv[0])
    if not script.is_file():
        _stop(f"there is no training script {script}: {USAGE}")
    # What Python does for a script: its folder comes first, so that the checkout's own megatron,
    # gpt_builders and so on are found.
    sys.path.insert(0, str(script.resolve().parent))
    try:
        core = importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        _stop(
            f"Megatron is not importable ({error}): {script} is not in a Megatron-LM checkout and "
            "megatron-core is not installed"
        )
    from .megatron import register

    try:
        register()
    except ConfigError as error:
        _stop(f"{error} (found at {Path(core.__file__).parent})")
    sys.argv = [str(script), *argv[1:]]
    runpy.run_path(str(script), run_name="__main__")


def _stop(message: str) -> None:
    raise SystemExit(f"megatron_mtraining.launch: {message}" if is_first_local_rank() else 2)


if __name__ == "__main__":
    main()
