# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""See :mod:`megatron_mtraining.requirements`, which ``models/`` uses too."""

from ...requirements import first_line, require

__all__ = ["first_line", "require"]
