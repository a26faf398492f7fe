# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings of the backend: dataclasses nested by policy, the table of options, the settings file.

- :mod:`.policies`: one dataclass for each way to select a pattern, and to sample rows.
- :mod:`.settings`: :class:`MTrainingConfig`, which has one of each.
- :mod:`.schedule`: prices, or target recalls, over a run.
- :mod:`.options`: flat names, types and help texts.
- :mod:`.settings_file`: policies that differ for layers and heads, from JSON or YAML.
- :mod:`.validation`: checks of single values.
"""

from ..errors import ConfigError
from .options import (
    BALANCE,
    BY_NAME,
    MEGATRON_ONLY,
    MOVING,
    OPTIONS,
    Option,
)
from .policies import (
    BlockListPolicy,
    FixedPolicy,
    LastRowsSampling,
    MobaPolicy,
    Policy,
    PricePolicy,
    Sampling,
    StratifiedSampling,
    XAttentionPolicy,
    has_price,
)
from .schedule import Schedule, Span
from .settings import BLOCK_SIZES, DENSE, MTrainingConfig
from .settings_content import sets_every_head, settings_of_run
from .settings_file import check_settings_file, head_policies, lookahead_warning
from .validation import option

__all__ = [
    "BALANCE",
    "BLOCK_SIZES",
    "BY_NAME",
    "DENSE",
    "MEGATRON_ONLY",
    "MOVING",
    "OPTIONS",
    "BlockListPolicy",
    "ConfigError",
    "FixedPolicy",
    "LastRowsSampling",
    "MTrainingConfig",
    "MobaPolicy",
    "Option",
    "Policy",
    "PricePolicy",
    "Sampling",
    "Schedule",
    "Span",
    "StratifiedSampling",
    "XAttentionPolicy",
    "check_settings_file",
    "has_price",
    "head_policies",
    "lookahead_warning",
    "option",
    "sets_every_head",
    "settings_of_run",
]
