# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Imported by the server that worker processes are forked from, so that they start quickly."""

from transformers import AutoTokenizer  # noqa: F401
