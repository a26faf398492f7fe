# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Write what the docs take from the code and from measurements: ``python docs/generate.py [--check]``.

- docs/options.md and docs/live-changes.md, whole pages (``PAGES``);
- tables and figures in any page, from ``benchmarks/results/*.jsonl`` (``tables``), between the markers
  ``<!-- rows: NAME -->``, ``<!-- figure: NAME -->`` and ``<!-- end -->``;
- the pictures of docs/performance.md (``pictures``).

``--check`` writes nothing and fails where something is stale. Needs megatron-core and matplotlib.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]  # this checkout's package, whatever is installed

import pictures  # noqa: E402
import tables  # noqa: E402

MARKED = ("README.md", "docs/**/*.md", "examples/**/*.md")
"""Pages that may have markers."""
TABLE = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (\w+) -->).*?(<!-- end -->)", re.DOTALL)
MADE = "<!-- Made by docs/generate.py from {source}: change that, not this page. -->"


def live_changes() -> str:
    """The page on what is changed in a running Megatron."""
    from megatron_mtraining.megatron.registration import LIVE_STATE, OLDEST
    from megatron_mtraining.megatron.registration import live_changes as rows

    lines = [
        MADE.format(source="megatron_mtraining/megatron/registration.py"),
        "# What is changed in a live Megatron process",
        "",
        "Megatron has no registry of attention backends, of context-parallel layouts or of options, so "
        "`megatron_mtraining.register()` (called by `megatron_mtraining.launch`, or by the patch) replaces "
        "functions of the imported Megatron. No file is changed. Each replacement calls the original "
        "function unless the run, or the model's config, selects attention backend `mtraining`: other runs "
        "do not change. A run with this backend prints the list once, on rank 0:",
        "",
        f"    [mtraining] replaced {len(rows())} functions of Megatron-Core 0.19.0 (...): "
        "arguments.parse_args, ...",
        "",
        "If a Megatron version does not have one of them, nothing is replaced, and an error names the "
        "function and the version. `function.__wrapped__` is the original.",
        "",
        "## Functions",
        "",
        "In the order in which a run calls them. Functions of `megatron.training` are replaced if "
        "Megatron-LM is importable, functions of `megatron.core` always.",
        "",
        "| function | replaced by | why |",
        "|---|---|---|",
    ]
    for row in rows():
        symbol = f"{row.owner.replace(':', '.')}.{row.name}"
        wrapper = f"{row.wrapper.__module__.rpartition('.')[2]}.{row.wrapper.__name__}"
        later = (
            f" From Megatron-Core {'.'.join(map(str, row.since))} on." if row.since > OLDEST else ""
        )
        lines.append(f"| `{symbol}` | `{wrapper}` | {row.why}{later} |")
    lines += [
        "",
        "## Objects and attributes",
        "",
        "Only in runs with the backend, except the first two rows, which are always there.",
        "",
        "| what | where | why |",
        "|---|---|---|",
        *(f"| {state.what} | {state.where} | {state.why} |" for state in LIVE_STATE),
    ]
    return "\n".join(lines) + "\n"


def options() -> str:
    """The page on the options of a run."""
    from megatron_mtraining.config import OPTIONS

    lines = [
        MADE.format(source="megatron_mtraining/config/options.py"),
        "# Options",
        "",
        "With `--attention-backend mtraining`. `--help` shows the common ones (first table), "
        "`--mtraining-help-all` all of them. `--mtraining-settings FILE` (JSON or YAML) takes all of them "
        "under the names here without `--mtraining-` and with underscores; an option that is on the "
        "command line, too, must have the same value there. In Python, "
        "`MTrainingConfig.from_options(price=0.3, ...)` takes the same names.",
    ]
    for title, common in (("Common", True), ("All others", False)):
        lines += ["", f"## {title}", "", "| option | default | what |", "|---|---|---|"]
        for each in OPTIONS:
            if each.common is common:
                text = each.full_help.rpartition(" (default: ")[0]
                lines.append(f"| `{each.flag}` | {each.default} | {text} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {"live-changes.md": live_changes, "options.md": options}


def filled(text: str) -> str:
    """A page with its tables and figures as the rows have them now.

    Raises:
        KeyError: a marker names no table or figure.
    """

    def put(makers: dict[str, Callable[[], str]], ends: str):
        return lambda found: f"{found[1]}{makers[found[2]]()}{ends}{found[3]}"

    return FIGURE.sub(put(tables.FIGURES, ""), TABLE.sub(put(tables.TABLES, "\n"), text))


def marked_pages() -> list[Path]:
    """Pages that have markers."""
    pages = sorted({path for pattern in MARKED for path in ROOT.glob(pattern)})
    return [page for page in pages if "<!-- end -->" in page.read_text(encoding="utf-8")]


def stale() -> dict[str, Callable[[], object]]:
    """What differs from what the code and the rows make: how to write it, by its path."""
    found: dict[str, Callable[[], object]] = {}
    for name, make in PAGES.items():
        page = DOCS / name
        if not page.is_file() or page.read_text(encoding="utf-8") != make():
            found[f"docs/{name}"] = lambda page=page, make=make: page.write_text(make(), "utf-8")
    for page in marked_pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            found[str(page.relative_to(ROOT))] = lambda page=page, text=text: page.write_text(
                filled(text), "utf-8"
            )
    for name in pictures.PICTURES:
        if pictures.is_stale(name):
            found[f"docs/images/{name}"] = lambda name=name: pictures.draw(name)
    return found


def main() -> int:
    old = stale()
    if "--check" in sys.argv[1:]:
        for name in old:
            print(f"{name} is stale: run python docs/generate.py", file=sys.stderr)
        return 1 if old else 0
    for name, write in old.items():
        write()
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
