# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the index.json of a folder of Mosaic data shards (MDS) says of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...errors import ConfigError

INDEX = "index.json"
PACKED = ("", ".zstd", ".gz", ".br", ".bz2", ".snappy")
"""Endings of a shard's file. Compressed ones are refused where they are found, with what to do."""


def is_index(index: Path) -> bool:
    """Whether an index.json lists shards of MDS: a folder of source files may have a file of this name.

    Raises:
        OSError: it cannot be read.
        ConfigError: a shard is not there, as in a copy that was broken off.
    """
    try:
        shards = json.loads(index.read_bytes())["shards"]
        names = [one["raw_data"]["basename"] for one in shards if one["format"] == "mds"]
        paths = [os.path.join(index.parent, name) for name in names]
    except (KeyError, RecursionError, TypeError, ValueError):
        return False
    missing = [path for path in paths if not any(os.path.lexists(path + end) for end in PACKED)]
    if missing:
        raise ConfigError(
            f"INPUT has {index}, which lists {len(missing)} shards that are not there, such as "
            f"{missing[0]}: copy the folder again"
        )
    return bool(paths)


def entry(file: Path) -> dict:
    """What the index.json beside an MDS shard says of it.

    Raises:
        ConfigError: there is none, it cannot be read, or the shard is not as it says.
    """
    index = file.with_name(INDEX)
    try:
        shards = json.loads(index.read_bytes())["shards"]
        (found,) = [one for one in shards if one["raw_data"]["basename"] == file.name]
        expected, size = found["raw_data"]["bytes"], file.stat().st_size
        lengths = {len(found[f"column_{what}"]) for what in ("names", "encodings", "sizes")}
        supported = (found["format"], found["version"], len(lengths)) == ("mds", 2, 1)
    except FileNotFoundError:
        raise ConfigError(f"INPUT has {file} without {index.name} beside it") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"INPUT has {file}, but {index} does not say how to read it ({error!r})"
        ) from None
    if not supported:
        raise ConfigError(
            f"INPUT has {file}, but {index} does not describe it as MDS of version 2: that is supported"
        )
    if size != expected:
        raise ConfigError(
            f"INPUT has {file} of {size} bytes, but {index} says {expected}: it is broken"
        )
    return found
