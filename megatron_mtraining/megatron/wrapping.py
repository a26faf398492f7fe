# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How a function of Megatron is replaced: once, everywhere it is bound, and recognisably."""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from collections.abc import Callable

from ..cp_group import RankGroup

MARK = "_mtraining_wrapper"
_replaced: list[str] = []
"""What this process has replaced, in order; emptied by :func:`log_replaced`."""


def is_wrapped(function) -> bool:
    """Whether ``function`` is one of our wrappers."""
    return getattr(function, MARK, False) is True


def wrap(owner, name: str, make: Callable[[Callable], Callable]) -> bool:
    """Replace ``owner.name`` by ``make(original)``, unless it is a wrapper already.

    Args:
        owner: a module or class.
        name: the attribute; a function.
        make: takes the original and returns the wrapper, which calls the original unless the run's
            attention backend is ``mtraining``.

    Returns:
        True if this call replaced it.
    """
    original = getattr(owner, name)
    if is_wrapped(original):
        return False
    wrapper = functools.update_wrapper(make(original), original)
    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)
    _replaced.append(f"{owner.__name__.rpartition('.')[2]}.{name}")
    if isinstance(owner, types.ModuleType):
        _rebind(original, wrapper)
    return True


def _rebind(original: Callable, wrapper: Callable) -> None:
    """Replace ``original`` in every loaded module that imported it by name, ``__main__`` too:
    ``register`` may run before or after a training script's imports."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if value is original:
                vars(module)[key] = wrapper


def is_first_local_rank() -> bool:
    """Whether this process prints for its host (``LOCAL_RANK``, as torchrun sets it)."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


PATIENCE = 30.0
"""Seconds that other ranks of a host leave the first one to end the run. torchrun stops all as soon as one
ends, when the first may not have said why."""


class EndOfRun(SystemExit):
    """Uncaught, it ends the process with status 1 and the message in place of a traceback: once on each host,
    by the first rank, or by another if that goes on."""

    prefix = ""

    @property
    def code(self) -> str:  # type: ignore[override]  # read as the process ends
        if not is_first_local_rank():
            time.sleep(PATIENCE)
        return f"{self.prefix}{self}"


def is_first_rank() -> bool:
    """Whether this process prints for the run; before process groups exist too."""
    everyone = RankGroup.everyone()
    return (int(os.environ.get("RANK", "0")) if everyone.group is None else everyone.rank) == 0


def log(message: str) -> None:
    """Print a line of the plug-in's on the first rank."""
    if is_first_rank():
        print(f"[mtraining] {message}", flush=True)


def log_replaced() -> None:
    """Print once, in a run that has chosen the backend, which functions of Megatron it replaced."""
    if _replaced:
        from megatron.core import __version__

        log(
            f"replaced {len(_replaced)} functions of Megatron-Core {__version__} "
            f"(docs/live-changes.md says why): {', '.join(_replaced)}"
        )
        _replaced.clear()
