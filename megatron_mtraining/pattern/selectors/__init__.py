# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The selectors: one module for each policy, imported here to be registered (:func:`..selector.selects_for`).

:mod:`.candidates` and :mod:`.key_blocks` have what several share.
"""

from . import fixed, moba, price, xattention
from .key_blocks import select_key_blocks

__all__ = ["fixed", "moba", "price", "select_key_blocks", "xattention"]
