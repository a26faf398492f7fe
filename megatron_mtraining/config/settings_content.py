# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reading the file of ``--mtraining-settings``, JSON or YAML, and its settings of all layers.

:mod:`.settings_file` says what the file has for layers and heads.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError
from ..files import read_text
from .options import check_known
from .validation import check_type, option

DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.[0-9]))(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def settings_of_run(path: str) -> dict[str, object]:
    """What a settings file says of all layers: flat options by name.

    Raises:
        ConfigError: the file cannot be read, or has an unknown option.
    """
    name = shown(path)
    content = read(path, name)
    found = {}
    for key, value in content.items() if isinstance(content, dict) else ():
        if not isinstance(key, str):  # YAML has other keys, too
            raise ConfigError(f"{name} has {key!r}, which is not a setting: leave it out")
        if key != "layers":
            check_known(key, name)
            found[key] = value
    return found


def sets_every_head(path: str) -> bool:
    """Whether a settings file is a best-pattern file, which has a policy for every head.

    Raises:
        ConfigError: the file cannot be read.
    """
    return isinstance(read(path, shown(path)), list)


def shown(path: str) -> str:
    return f"{option('settings')} {path}"


def read(path: str, name: str):
    """The parsed content, cached until the file changes, because the checks of a run ask several times.
    Callers must not modify it."""
    check_type("settings", path, str)
    try:
        about = os.stat(path)
    except OSError:
        return _read_again(path, name)  # which says what is wrong
    stamp = about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
    return _read_as_of(path, name, stamp)


@lru_cache(maxsize=8)
def _read_as_of(path: str, name: str, stamp: tuple[int, ...]):
    return _read_again(path, name)


def times_read(path: str) -> int:
    """How often the file was read: what was made of it is out of date if it was read since."""
    return _times_read[path]


_times_read: Counter[str] = Counter()


def _read_again(path: str, name: str):
    _times_read[path] += 1
    text = read_text(Path(path), name)
    yaml = Path(path).suffix in (".yaml", ".yml")
    try:
        return _from_yaml(text, name) if yaml else json.loads(text, object_pairs_hook=_each_once)
    except ConfigError:
        raise
    except _Twice as error:
        raise ConfigError(
            f"{name} has {error.args[0]!r} twice in one object: leave one out"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid {'YAML' if yaml else 'JSON'}: {error}") from None


class _Twice(ValueError):
    """A key that one object has twice; parsers silently drop the first."""


def _each_once(pairs: list[tuple]) -> dict:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise _Twice(key)
    return dict(pairs)


def _from_yaml(text: str, name: str):
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{name} is YAML, for which pyyaml is missing: pip install pyyaml, or use JSON"
        ) from None

    class Loader(yaml.SafeLoader):
        """Checks nodes as they are written: what "<<" merges in later may be there twice."""

        def compose_mapping_node(self, anchor):
            node = super().compose_mapping_node(anchor)
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            own = [key for key in keys if not key.tag.endswith(":merge")]
            _each_once([(self.construct_object(key), None) for key in own])
            return node

        def compose_scalar_node(self, anchor):
            node = super().compose_scalar_node(anchor)
            _check_scalar(node, name)
            return node

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_yaml_problem(error)}") from None
    except (KeyError, AttributeError, TypeError):  # PyYAML's, of values under a tag such as !!bool
        raise ConfigError(
            f"{name} is not valid YAML: a value is not of the type that its tag (!!) says"
        ) from None


def _yaml_problem(error) -> str:
    """What is wrong, and where, in one line; PyYAML quotes the lines themselves below."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).split("\n")[0]
    return (
        problem if mark is None else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
    )


def _check_scalar(node, name: str) -> None:
    """Refuse numbers that YAML reads otherwise than they look: 010 is 8, and 1:30 is 90."""
    is_number = node.tag.endswith((":int", ":float")) and node.style is None
    text = node.value.replace("_", "")
    if is_number and not DECIMAL.fullmatch(text) and not re.search(r"\.(inf|nan)$", text, re.I):
        raise ConfigError(
            f"{name} has {node.value[:80]} in line {node.start_mark.line + 1}, which YAML does not read "
            "as a decimal number: write it in decimal digits"
        )
