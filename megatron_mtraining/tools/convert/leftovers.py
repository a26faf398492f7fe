# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Folders beside a target while it is made, and what killed runs have left of them.

``.NAME.partial-PID-*-HOST`` is being written, or removed; ``.NAME.old-PID-*-HOST`` is what was there before,
while the new folder takes its name.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path


def make(target: Path, kind: str) -> Path:
    """A new empty folder beside ``target`` of a name that says who made it; ``kind`` is partial or old."""
    return Path(
        tempfile.mkdtemp(
            prefix=f".{target.name}.{kind}-{os.getpid()}-",
            suffix=f"-{socket.gethostname()}",
            dir=target.parent,
        )
    )


def clear(target: Path) -> None:
    """Put a target back that a run was killed between taking away and replacing, and remove what else runs
    have left that are no more.

    Says on standard error what it did, and what it left because it cannot know whether its run still goes on.
    """
    found = []
    name = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-(\d+)-[a-z0-9_]+-(.+)")
    if target.parent.is_dir():
        for path in sorted(target.parent.iterdir()):
            if match := name.fullmatch(path.name):
                found.append((path, match[1], int(match[2]), match[3]))
    for path, kind, process, host in found:
        if host != socket.gethostname() or _lives(process):
            _say(
                f"{path} is of a run with process {process} on {host}: if that has ended, rm -r {path}"
            )
        elif kind == "old" and not (target.exists() or target.is_symlink()):
            path.rename(target)
            _say(f"put back {target}, which a run that was killed had taken away")
        else:
            shutil.rmtree(path)
            _say(f"removed {path}, which a run that was killed had left")


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _say(what: str) -> None:
    print(f"mtraining convert: {what}", file=sys.stderr)
