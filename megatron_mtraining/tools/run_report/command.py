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
    add("--overwrite", action="store_true", help="replace --output")


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
    with atomic_file(args.output, overwrite=args.overwrite) as file:
        file.write(page(found, title, step).encode())
    if args.png:
        pictures = charts.drawn(found, "light", png, step)
        try:
            args.png.mkdir(parents=True, exist_ok=True)
            for name, content in pictures.items():
                stem = name.split(" (")[0].lower().replace(" ", "-").replace("/", "-")
                (args.png / f"{stem}.png").write_bytes(content)
        except OSError as error:
            raise ConfigError(
                f"--png {error.filename or args.png} cannot be written: {error.strerror}"
            ) from error
    print(f"{args.output}: open it in a browser")
    return 0
