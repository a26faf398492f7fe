# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The Megatron tests run with the plug-in registered; that it changes nothing else is tested too."""

from megatron_mtraining.megatron import register

register()
