# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron, installed or a checkout: version, patch, and whether all is there that the plug-in replaces.

As a program (``python -m``, with or without a checkout) it imports Megatron and prints :func:`probe`.
"""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ...checkout import python_mismatch, read_version
from ...errors import ConfigError, one_line
from ...requirements import first_line, install_command, last_line
from ..patching import MADE_FOR, find_version, is_applied
from .machine import ABSENT, FAILS, OK, Line, ask

TRAINING = "megatron.training."


def examine(root: Path | None) -> Iterator[Line]:
    """Lines of the Megatron-Core that is installed, or of the checkout ``root``."""
    if root is not None:
        mismatch = python_mismatch(read_version(root))
        if mismatch:
            yield Line(FAILS, "Megatron-LM", f"{mismatch}: use that, or a Megatron-LM for this one")
            return
        yield _patch(root)
        yield _helpers(root)
    done = ask("-m", __name__, *([] if root is None else [str(root.resolve())]))
    try:
        found = json.loads(last_line(done.stdout))
    except ValueError:
        advice = "" if root else f": {install_command(['megatron-core'])}, or give --megatron DIR"
        yield Line(FAILS, "Megatron-Core", last_line(done.stderr) + advice)
        return
    version, training = found["version"], found["training"]
    tried = MADE_FOR.get(".".join(version.split(".")[:2]), "main")
    said = f"{version} in {found['folder']}, " + (
        "a release that was not tested" if tried == "main" else f"release tested with {tried}"
    )
    if found["missing"]:
        yield Line(FAILS, "Megatron-Core", f"{said}: {'; '.join(found['missing'])}")
    else:
        yield Line(
            OK, "Megatron-Core", f"{said}; all {found['count']} functions to replace are there"
        )
    if training:
        advice = ": install it" if training.startswith("ModuleNotFoundError") else ""
        said = (
            f"cannot be imported, so that its own functions were not looked at: {training}{advice}"
        )
        yield Line(FAILS, "Megatron-LM", said, needed=root is not None)
    elif training is None:
        yield Line(ABSENT, "Megatron-LM", "name a checkout by --megatron DIR; its scripts need one")
    else:
        yield Line(OK, "Megatron-LM", "megatron.training can be imported")


def _patch(root: Path) -> Line:
    try:
        if is_applied(root, find_version(root)):
            return Line(OK, "patch", "applied: training scripts can be started directly")
    except ConfigError as error:
        return Line(FAILS, "patch", f"{one_line(str(error))} (the launcher works)", needed=False)
    return Line(
        ABSENT, "patch", f"use the launcher, or mtraining patch apply {shlex.quote(str(root))}"
    )


def _helpers(root: Path) -> Line:
    """Megatron-LM's dataset helpers, which it compiles when training starts."""
    what = "dataset helpers"
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if (root / "megatron/core/datasets" / name).is_file():
        return Line(OK, what, "compiled")
    missing = [tool for tool in ("make", "g++") if shutil.which(tool) is None]
    missing += [] if find_spec("pybind11") else ["pybind11"]
    if missing:
        said = f"Megatron-LM compiles them, and {', '.join(missing)} is not there: install it"
        return Line(FAILS, what, said)
    return Line(OK, what, "Megatron-LM will compile them when training starts")


def probe() -> dict:
    """What the Megatron that is importable has.

    Returns:
        ``version``, ``folder``; the ``count`` of functions to replace; an error for each that is
        ``missing``; ``training``: "" if Megatron-LM can be imported, None if it is not there, or why not.

    Raises:
        ConfigError: it is too old.
        ImportError: there is none, or it cannot be imported.
    """
    from ...megatron.checks import is_from
    from ...megatron.registration import check_version, find_owner, live_changes

    core = importlib.import_module("megatron.core")
    check_version(core.__version__)
    training = None
    if find_spec("megatron.training") is not None:
        try:
            importlib.import_module(f"{TRAINING}training")
            training = ""
        except Exception as error:  # of all that it imports
            training = first_line(error)
    missing, count = [], 0
    for row in live_changes():
        if not is_from(row.since) or (training != "" and row.owner.startswith(TRAINING)):
            continue
        count += 1
        try:
            find_owner(row, core.__version__)
        except (ConfigError, ImportError) as error:
            missing.append(str(error))
    folder = str(Path(core.__file__).parent)
    return dict(
        version=core.__version__, folder=folder, count=count, missing=missing, training=training
    )


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    print(json.dumps(probe()))
