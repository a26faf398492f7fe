# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Writing settings files."""

from __future__ import annotations

import json
from pathlib import Path


def settings_bytes(path: Path, settings: dict) -> bytes:
    """The content of a settings file, YAML or JSON by its name."""
    if path.suffix in (".yaml", ".yml"):
        import yaml

        return yaml.safe_dump(settings, sort_keys=False).encode()
    return (json.dumps(settings, indent=1) + "\n").encode()
