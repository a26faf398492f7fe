# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Write the pages that are made from the code: ``python docs/generate.py [--check]``.

``--check`` writes nothing and fails where a page is stale. megatron-core must be importable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # this checkout's package, whatever is installed
MADE = "<!-- Made by docs/generate.py from {source}: change that, not this page. -->"


def live_changes() -> str:
    """The page on what is changed in a running Megatron."""
    from megatron_mtraining.megatron.registration import LIVE_STATE
    from megatron_mtraining.megatron.registration import live_changes as rows

    lines = [
        MADE.format(source="megatron_mtraining/megatron/registration.py"),
        "# What is changed in a live Megatron process",
        "",
        "Megatron has no registry of attention backends, of context-parallel layouts or of options, so "
        "`megatron_mtraining.register()` (called by `megatron_mtraining.launch`, or by the patch) replaces "
        "functions of the Megatron that is imported. No file is changed. Each replacement calls the original "
        "unless the run, or the model's config, has chosen attention backend `mtraining`: all other runs "
        "compute what they did. A run that has chosen it prints the list once, on rank 0:",
        "",
        "    [mtraining] replaced 16 functions of Megatron-Core 0.19.0 (...): arguments.parse_args, ...",
        "",
        "If a Megatron version has moved one of them, nothing is replaced, and an error names the function "
        "and the version. `function.__wrapped__` is the original.",
        "",
        "## Functions",
        "",
        "In the order a run meets them. Those of `megatron.training` are replaced where Megatron-LM is "
        "importable, those of `megatron.core` always.",
        "",
        "| function | replaced by | why |",
        "|---|---|---|",
    ]
    for row in rows():
        symbol = f"{row.owner.replace(':', '.')}.{row.name}"
        wrapper = f"{row.wrapper.__module__.rpartition('.')[2]}.{row.wrapper.__name__}"
        lines.append(f"| `{symbol}` | `{wrapper}` | {row.why} |")
    lines += [
        "",
        "## Objects and attributes",
        "",
        "Only in runs with the backend, but for the first.",
        "",
        "| what | where | why |",
        "|---|---|---|",
        *(f"| {state.what} | {state.where} | {state.why} |" for state in LIVE_STATE),
    ]
    return "\n".join(lines) + "\n"


def options() -> str:
    """The page on the options of a run."""
    from megatron_mtraining.config import OPTIONS, REMOVED, RENAMED, option

    lines = [
        MADE.format(source="megatron_mtraining/config/options.py"),
        "# Options",
        "",
        "With `--attention-backend mtraining`. `--help` shows the common ones (first table), "
        "`--mtraining-help-all` all of them. `--mtraining-settings FILE` (JSON or YAML) takes all of them "
        "under the names here without `--mtraining-` and with underscores; the command line must not say "
        "otherwise. In Python, `MTrainingConfig.from_options(price=0.3, ...)` takes the same names.",
    ]
    for title, common in (("Common", True), ("All others", False)):
        lines += ["", f"## {title}", "", "| option | default | what |", "|---|---|---|"]
        for each in OPTIONS:
            if each.common is common:
                text = each.full_help.rpartition(" (default: ")[0]
                lines.append(f"| `{each.flag}` | {each.default} | {text} |")
    lines += ["", "## Options of the last version", ""]
    lines += [
        f"- `{option(old)}` is now `{option(new)}`; the old name is accepted with a warning."
        for old, new in RENAMED.items()
    ]
    lines += [f"- `{option(old)}` is gone: {advice}." for old, advice in REMOVED.items()]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {"live-changes.md": live_changes, "options.md": options}


def stale() -> list[str]:
    """Pages that differ from what the code makes."""
    return [
        name
        for name, make in PAGES.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != make()
    ]


def main() -> int:
    old = stale()
    if "--check" in sys.argv[1:]:
        for name in old:
            print(f"docs/{name} is stale: run python docs/generate.py", file=sys.stderr)
        return 1 if old else 0
    for name in old:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
