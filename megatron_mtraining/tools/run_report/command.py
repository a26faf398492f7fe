# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining report``: a page on what a run did."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...config import ConfigError
from ..common.atomic_output import atomic_file, refuse_to_replace_input
from .sources import WANTED, files, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help=f"{WANTED}; or a folder with one of them")
    add("--output", type=Path, default=Path("report.html"), help="(default: %(default)s)")
    add("--title", help="(default: the run's name)")
    what = "a trace of PyTorch's profiler, whose last step is shown (default: one in RUN, if there is one)"
    add("--trace", type=Path, metavar="FILE", help=what)
    add("--png", type=Path, metavar="FOLDER", help="also write each chart there as a picture")
    add("--overwrite", action="store_true", help="replace --output, and pictures of --png")


def run(args) -> int:
    from ..report.themes import png
    from . import charts, timeline
    from .page import page

    if args.output.exists() and not args.overwrite:
        raise ConfigError(f"{args.output} exists: give --overwrite, or another --output")
    found = read(args.run)
    step, trace = None, args.trace or timeline.find(args.run)
    taken = [*files(args.run), *filter(None, [trace])]
    refuse_to_replace_input("--output", args.output, taken)
    try:
        if trace:
            step = timeline.read(trace)
    except ConfigError as error:
        if args.trace:
            raise
        print(f"without a timeline: {error}", file=sys.stderr)
    title = args.title or args.run.resolve().name
    if args.png:  # first, as the page of a run that fails here would be in the way of the next
        _write_pictures(args.png, charts.drawn(found, "light", png, step), args.overwrite)
    with atomic_file(args.output, overwrite=args.overwrite) as file:
        file.write(page(found, title, step).encode())
    print(f"{args.output}: open it in a browser")
    return 0


def _write_pictures(folder: Path, pictures: dict[str, bytes], overwrite: bool) -> None:
    """Write each chart into a folder, or none.

    Raises:
        ConfigError: one is there and may not be replaced, or they cannot be written.
    """
    paths = {folder / f"{_stem_of(name)}.png": content for name, content in pictures.items()}
    there = [path for path in paths if path.exists()]
    if there and not overwrite:
        raise ConfigError(f"--png: {there[0]} exists: give --overwrite, or another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in paths.items():
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"--png {error.filename or folder} cannot be written: {error.strerror}"
        ) from error


def _stem_of(chart: str) -> str:
    return chart.split(" (")[0].lower().replace(" ", "-").replace("/", "-")
