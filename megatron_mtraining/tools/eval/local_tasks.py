# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""LongBench (arXiv 2308.14508) and InfiniteBench (arXiv 2402.13718): lm-eval's tasks on local JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import ConfigError
from ...files import lone_surrogate, size_of
from ...requirements import require
from ..common.digests import digest_of_files
from .harness import made_task
from .options import Options
from .planned import Planned


def planned(options: Options) -> list[Planned]:
    """The tasks of LongBench or InfiniteBench that are asked for, with their data.

    Raises:
        ConfigError: a file or a package is missing, or a file is of another form.
    """
    benchmark = options.benchmark
    if benchmark == "longbench":  # as lm-eval's own extra
        require("jieba", "fuzzywuzzy", "rouge", extra="eval")
    found = []
    for name in options.tasks:
        file = options.data / f"{name}.jsonl"
        size_of(file, f"--tasks {name} needs it")
        rows = read_rows(file, options.samples, FIELDS[benchmark])

        def download(task, rows=rows):
            import datasets

            task.dataset = {task.config.test_split: datasets.Dataset.from_list(rows)}

        task = made_task(benchmark, f"{benchmark}_{name}", {}, download)
        data = {"the file of --data": digest_of_files(file)}
        found.append(Planned(name, None, task, "score", data=data))
    return found


FIELDS = {
    "longbench": {"context": "context", "question": "input", "answers": "answers"},
    "infinitebench": {"context": "context", "input": "input", "answer": "answer"},
}
"""Fields that lm-eval's tasks read, and their names in the files that the benchmark's authors publish."""


def read_rows(file: Path, most: int, fields: dict[str, str]) -> list[dict]:
    """The first samples of a file of JSON lines.

    Args:
        most: samples to read.
        fields: those needed, with another name each may have.

    Raises:
        ConfigError: a line is no object, or lacks a field.
    """
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if len(rows) == most:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                half = lone_surrogate(json.dumps(row, ensure_ascii=False))
            except (ValueError, RecursionError):
                row = half = None
            if not isinstance(row, dict):
                raise ConfigError(f"{file}: line {number} is no JSON object")
            if half:
                raise ConfigError(f"{file}: line {number} is no text: {half}")
            for field, other in fields.items():
                if field not in row and other in row:
                    row[field] = row[other]
                if field not in row:
                    raise ConfigError(f"{file}: line {number} has no {field!r}")
            rows.append(row)
    if not rows:
        raise ConfigError(f"{file} has no samples in it")
    return rows
