# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``python -m megatron_mtraining``, the same as ``mtraining``."""

try:
    from .tools.cli import main

    status = main()
except KeyboardInterrupt:  # during imports
    raise SystemExit(130) from None
raise SystemExit(status)
