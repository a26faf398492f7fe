# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What every benchmark row says of where it was measured, and how rows are kept."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def parser(text: str, file: str | None = None) -> argparse.ArgumentParser:
    """A script's parser, whose help is the script's text; with ``--output``, a file of rows in
    ``results/`` by default, if it is named."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if file:
        made.add_argument("--output", type=Path, default=RESULTS / file)
    return made


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """``--case`` and ``--list``, for :func:`cases_of`."""
    parser.add_argument("--case", nargs="+", metavar="TEXT", help="cases with such a name only")
    parser.add_argument("--list", action="store_true", help="print the cases' names and stop")


def cases_of(parser: argparse.ArgumentParser, options: argparse.Namespace, cases: list) -> list:
    """Those of the cases that have one of the texts of ``--case`` in their ``name``, or all. Ends the process
    after ``--list``, or if there are none."""
    wanted = options.case or [""]
    found = [case for case in cases if any(text in case.name for text in wanted)]
    if not found:
        parser.error(f"no case has any of {options.case} in its name; --list names them")
    if options.list:
        print("\n".join(case.name for case in found))
        parser.exit()
    return found


def provenance() -> dict:
    """GPU, versions, commit and command of this run. A commit with uncommitted changes gets a "+".

    ``MTRAINING_COMMIT`` names the commit where the tree was copied without its history.
    """
    import triton

    commit = os.environ.get("MTRAINING_COMMIT")
    if not commit:

        def git(*words):
            run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
            return run.stdout.strip()

        commit = git("rev-parse", "--short", "HEAD") or "unknown"
        commit += "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "command": command(),
    }


def installed(name: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


SETTINGS = ("NCCL_", "NVTE_", "MTRAINING_")
"""How the names of those settings of the environment begin that change what runs."""


def command() -> str:
    """This run's command, after the settings that it found in its environment, without what says only where
    files were kept: no output, and of the files and folders that models, texts and data came from just their
    names."""
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(ROOT / "benchmarks"):  # python -m gives the path of the module
        module = script.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        words, option = ["python", "-m", module, *sys.argv[1:]], ""
    else:
        words, option = ["python", *sys.argv], ""
    for at in range(2, len(words)):
        if words[at].startswith("--"):
            option = words[at]
        elif option in (
            "--cache",
            "--data",
            "--frontier",
            "--model",
            "--ruler",
            "--text",
            "--weights",
        ):
            words[at] = Path(words[at]).name
    places = ("--output", "--output-folder", "--log", "--folder", "--traces")
    for name in (*places, "--results", "--save", "--scratch"):
        while name in words:
            at = words.index(name)
            del words[at : at + 2]
    found = sorted(
        name
        for name in os.environ
        if name.startswith(SETTINGS)
        and name
        not in ("MTRAINING_COMMIT", "NCCL_VERSION")  # an image's label, which NCCL does not read
        and not name.startswith("MTRAINING_TEST_")
    )
    return " ".join([*(f"{name}={os.environ[name]}" for name in found), *words])


def line(row: dict, *names: str) -> str:
    """Fields of a row, to print."""

    def said(name: str) -> str:
        value = row[name]
        return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"

    return "  " + ", ".join(said(name) for name in names if row[name] is not None)


def append(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file, each with the run's provenance."""
    common = provenance()
    copy(path, [{**row, **common} for row in rows])


def copy(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file as they are, such as another file's, with their own provenance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
