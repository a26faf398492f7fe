# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a profile says of where it comes from."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from ...requirements import installed


def device_name(device) -> str:
    import torch

    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def processors(device) -> int:
    """Multiprocessors of a GPU; of a CPU, whose kernels have one program after the other, 1."""
    import torch

    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def versions() -> dict[str, str]:
    import torch

    from ... import __version__

    return {
        "megatron-mtraining": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": installed("triton"),
    }


def command() -> str:
    """This command line, without where files were kept."""
    words = sys.argv[1:]
    for name in ("--output", "--log"):
        while name in words:
            at = words.index(name)
            del words[at : at + 2]
    words = [word for word in words if not word.startswith(("--output=", "--log="))]
    return shlex.join(["mtraining", *words])


def commit() -> str:
    """The commit of a checkout that this runs from, with a "+" if files have changed; MTRAINING_COMMIT where
    there is no history; else "unknown"."""
    given = os.environ.get("MTRAINING_COMMIT")
    root = Path(__file__).resolve().parents[3]
    if given or not (root / ".git").exists():
        return given or "unknown"

    def git(*words: str) -> str:
        try:
            done = subprocess.run(  # noqa: S603 - a list of words, no shell, in our own checkout
                ["git", "-C", str(root), *words],  # noqa: S607
                capture_output=True,
                text=True,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
