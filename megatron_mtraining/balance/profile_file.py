# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Files of latency profiles (JSON, with a version), and the profiles of the package."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..files import read_json
from .terms import KINDS, PARTS, Entry, Error, Latency

FORMAT = "megatron-mtraining latency profile"
VERSION = 1
FOLDER = Path(__file__).parent / "profiles"
DEFAULT = "NVIDIA H200"
"""The GPU whose profile is used for GPUs without a profile."""
AGAIN = "measure it again with mtraining profile"
NAMES = {list: "a list", dict: "an object", str: "a text", int: "a whole number"}

Fields: TypeAlias = dict[str, Any]
"""Contents of a profile, by attribute name of :class:`.latency.LatencyModel`."""


def slug(gpu: str) -> str:
    """The name of a GPU as that of a file, such as ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def find(name: str, path: Path | None) -> tuple[Fields, str]:
    """The profile of a GPU, and a warning if it is of another; see :meth:`.latency.LatencyModel.for_gpu`."""
    if path is not None:
        found = read(path)
        if found["gpu"] == name:
            return found, ""
        return found, (
            f"the latency profile {path} is of GPU {found['gpu']}, and this one is {name}: relative times of "
            "the former are used; run mtraining profile on this one"
        )
    own = FOLDER / f"{slug(name)}.json"
    if slug(name) and own.is_file():
        return read(own), ""
    return read(FOLDER / f"{slug(DEFAULT)}.json"), (
        f"no latency profile for GPU {name}: relative times of the {DEFAULT} are used; run mtraining profile "
        "and give --mtraining-profile FILE"
    )


def read(path: Path) -> Fields:
    """See :meth:`.latency.LatencyModel.load`."""
    name = f"the latency profile {path}"
    return from_json(read_json(path, name), name)


def write(model: Fields, path: Path) -> None:
    """See :meth:`.latency.LatencyModel.save`."""
    content = as_text(model).encode()
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def as_text(model: Fields) -> str:
    """The profile as JSON, a measurement a line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "gpu": model["gpu"],
        "processors": model["processors"],
        "versions": dict(model["versions"]),
        "commit": model["commit"],
        "command": model["command"],
        "seconds": round(model["seconds"], 1),
        "errors": {name: error._asdict() for name, error in model["errors"].items()},
        "left_out": list(model["left_out"]),
        "entries": [
            {
                "kind": entry.kind,
                "head_dim": entry.head_dim,
                **{part: dict(entry.coefficients[part]) for part in PARTS},
                "host": dict(zip(PARTS, entry.host)),
            }
            for entry in model["entries"]
        ],
    }
    text = json.dumps(head, indent=1)
    if not model["points"]:
        return text + "\n"
    rows = ",\n".join("   " + json.dumps(row) for row in model["points"]["rows"])
    columns = json.dumps(model["points"]["columns"])
    return (
        f'{text[:-2]},\n "points": {{\n  "columns": {columns},\n  "rows": [\n{rows}\n  ]\n }}\n}}\n'
    )


def from_json(found: Mapping[str, Any], name: str) -> Fields:
    """A profile from the contents of its file.

    Args:
        name: the name of the file in messages.

    Raises:
        ConfigError: it is no profile of this version.
    """
    if found.get("format") != FORMAT:
        raise ConfigError(f"{name} is no latency profile: give a file that mtraining profile wrote")
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{name} is a latency profile of version {found.get('version')!r}, and this is for version "
            f"{VERSION}: {AGAIN}"
        )
    wrong = _Wrong(name)
    entries = tuple(_entry(each, wrong) for each in wrong.of(list, found, "entries"))
    if not entries:
        raise wrong("it has no entries")
    seen = [(entry.kind, entry.head_dim) for entry in entries]
    if len(set(seen)) < len(seen):
        raise wrong("it has two entries of one kind and head dim")
    errors = {
        str(key): Error(
            wrong.number(each, "median"), wrong.number(each, "worst"), wrong.of(int, each, "shapes")
        )
        for key, each in wrong.of(dict, found, "errors").items()
    }
    versions = wrong.of(dict, found, "versions")
    return dict(
        gpu=wrong.of(str, found, "gpu"),
        processors=_processors(found, wrong),
        entries=entries,
        errors=errors,
        versions={str(key): str(value) for key, value in versions.items()},
        commit=wrong.of(str, found, "commit"),
        command=wrong.of(str, found, "command"),
        seconds=wrong.number(found, "seconds"),
        points=_points(found, wrong),
        left_out=tuple(str(each) for each in wrong.of(list, found, "left_out")),
    )


class _Wrong:
    """Errors of one file, and values of a JSON object that are of the right kind."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, what: str) -> ConfigError:
        return ConfigError(f"{self.name} is a damaged latency profile: {what}; {AGAIN}")

    def of(self, kind, found, key: str):
        """The value of a key, which must be of this kind."""
        if not isinstance(found, dict):
            raise self(f"there is {found!r} in place of an object with {key!r}")
        value = found.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self(f"{key!r} is {value!r}, and not {NAMES[kind]}")
        return value

    def number(self, found, key: str) -> float:
        """The value of a key, which must be a finite number of 0 or more."""
        if not isinstance(found, dict):
            raise self(f"there is {found!r} in place of an object with {key!r}")
        value = found.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Not a number is in no order; a whole number may be too large for a float.
        if value is None or not number or not 0 <= value <= 1e300:
            raise self(f"{key!r} is {value!r}, and not a finite number of 0 or more")
        return float(value)


def _processors(found: Mapping[str, Any], wrong: _Wrong) -> int:
    value = wrong.of(int, found, "processors")
    if not 1 <= value <= 1 << 20:
        raise wrong(f"'processors' is {value}, and not a GPU's multiprocessors")
    return value


def _entry(found, wrong: _Wrong) -> Entry:
    kind, head_dim = wrong.of(str, found, "kind"), wrong.of(int, found, "head_dim")
    if kind not in KINDS:
        raise wrong(f"an entry is of kind {kind!r}, which is none of {', '.join(KINDS)}")
    coefficients = {}
    for part, terms in PARTS.items():
        own = wrong.of(dict, found, part)
        unknown = [str(term) for term in own if term not in terms]
        if unknown:
            raise wrong(f"{part!r} has a term {unknown[0]!r}")
        coefficients[part] = {term: wrong.number(own, term) for term in own}
        if not any(coefficients[part].values()) and part != "search":
            raise wrong(f"{part!r} of {kind} and head dim {head_dim} takes no time")
    host = wrong.of(dict, found, "host")
    return Entry(kind, head_dim, coefficients, Latency(*(wrong.number(host, p) for p in PARTS)))


def _points(found: Mapping[str, Any], wrong: _Wrong) -> dict[str, list]:
    if "points" not in found:
        return {}
    points = wrong.of(dict, found, "points")
    columns, rows = (wrong.of(list, points, key) for key in ("columns", "rows"))
    if any(not isinstance(row, list) or len(row) != len(columns) for row in rows):
        raise wrong("a measurement has more or fewer values than there are columns")
    return {"columns": columns, "rows": rows}
