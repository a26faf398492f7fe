# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The error that names a setting."""


class ConfigError(ValueError):
    """A setting that cannot work. The message names the option, its value and what to do."""
