# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How upstream functions are wrapped: once, everywhere they are bound, and recognisably."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable

MARK = "_mtraining_wrapper"


def is_wrapped(function) -> bool:
    """Whether ``function`` is one of our wrappers."""
    return getattr(function, MARK, False) is True


def wrap(owner, name: str, make: Callable[[Callable], Callable]) -> bool:
    """Replace ``owner.name`` by ``make(original)``, unless it is a wrapper already.

    Args:
        owner: a module or class.
        name: the attribute; a function.
        make: takes the original, returns the wrapper, which hands over to the original unless
            the run's backend is ``mtraining``. Its own docstring is kept: it says why it exists.

    Returns:
        True if it was wrapped by this call.
    """
    original = getattr(owner, name)
    if is_wrapped(original):
        return False
    wrapper = make(original)
    assigned = [part for part in functools.WRAPPER_ASSIGNMENTS if part != "__doc__"]
    functools.update_wrapper(wrapper, original, assigned=assigned)
    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)
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
    """Whether this process speaks for its node (``LOCAL_RANK``, as torchrun sets it)."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0
