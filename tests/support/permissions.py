# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""File permissions that also hold for root: containers run tests as root, who may read all."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager

VERSION_3 = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: to read, write and search whatever the permissions are."""


@contextmanager
def permissions_hold():
    """Have the permissions of files hold for this thread while the context lasts, root or not."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    before = (
        ctypes.c_uint32 * 6
    )()  # effective, permitted and inheritable, of 32 capabilities each
    assert libc.capget(header, before) == 0
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~OVERRIDES & 0xFFFFFFFF
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
