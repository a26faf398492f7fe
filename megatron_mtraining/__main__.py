# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``python -m megatron_mtraining``, the same as ``mtraining``."""

from .tools.cli import main

raise SystemExit(main())
