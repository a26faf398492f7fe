# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Benchmarks: run from the root of a checkout as ``python -m benchmarks.ROOM.SCRIPT``."""
