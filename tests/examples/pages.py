# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the pages of examples/ quote from ``mtraining plan memory`` and from measured rows.

    python -m tests.examples.pages      # write it, between the markers

A marker names what stands behind it, up to ``<!-- end -->``:

- ``<!-- plan: gib=79 RECALL=0.95 NODES=2 GPUS=8 -->``: the plan of this folder's recipe with them;
- ``<!-- losses: file=long.jsonl tokens=131072 -->``: the first losses of the rows with these values;
- ``<!-- memory -->``: the table of :data:`SIZES`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from functools import cache
from pathlib import Path

from megatron_mtraining.tools.cli import main as mtraining
from tests.support.recipes import EXAMPLES, stand_in, start

ROWS = EXAMPLES.parent / "benchmarks/results"
MARKED = re.compile(
    r"(<!-- (plan|losses|memory)(?:: ([^\n]*?))? -->\n).*?(<!-- end -->)", re.DOTALL
)
STEPS = 10
"""Losses that a page shows at most."""
SIZES = (
    ("qwen2.5-0.5b-128k", 1, 1, {}, "29.0 on one H200"),
    ("qwen2.5-7b-256k", 2, 8, {}, "not measured"),
    ("qwen2.5-7b-256k", 2, 8, {"TP": 4}, "not measured"),
    ("qwen2.5-7b-256k", 2, 8, {"TP": 1}, "not measured"),
    ("qwen2.5-3b-512k", 1, 4, {}, "80.0 on H200"),
    ("qwen2.5-3b-512k", 4, 8, {}, "not measured"),
)
"""Recipe, nodes, GPUs of each, variables, measured memory."""


@cache
def command(recipe: str, words: tuple[str, ...]) -> str:
    """What ``run.sh --dry-run`` of a recipe prints, with the variables ``words``."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = stand_in(Path(folder) / "Megatron-LM")
        given = dict(word.split("=") for word in words)
        script = EXAMPLES / recipe / "run.sh"
        run = start(script, "--dry-run", checkout, commands=Path(folder), **given)
    assert run.returncode == 0, run.stderr
    return run.stdout


def planned(recipe: str, words: tuple[str, ...], *options: str) -> str:
    """What ``mtraining plan memory`` prints on that command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "command"
        file.write_text(command(recipe, words))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            mtraining(["plan", "memory", *options, "--flags-file", str(file)])
    return out.getvalue()


def plan(page: Path, words: list[str]) -> str:
    """The plan, without the flags that it lists."""
    gib = [word.removeprefix("gib=") for word in words if word.startswith("gib=")]
    words = tuple(word for word in words if not word.startswith("gib="))
    text = planned(page.parent.name, words, "--gpu-memory-gib", *gib)
    lines = [line.rstrip() for line in text.splitlines()]
    last = max(i for i, line in enumerate(lines) if line.startswith("It "))
    return "\n".join(["```", *lines[: last + 1], "```"]) + "\n"


def memory(page: Path, words: list[str]) -> str:
    """The plans of all recipes."""
    rows = [
        "| recipe | tokens | GPUs | TP x CP | inner x outer groups | planned peak, GiB | planned need, GiB | "
        "measured peak, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe, nodes, gpus, more, measured in SIZES:
        given = (
            "RECALL=0.95",
            f"NODES={nodes}",
            f"GPUS={gpus}",
            *(f"{k}={v}" for k, v in more.items()),
        )
        found = json.loads(planned(recipe, given, "--json"))
        flags = command(recipe, given).replace("\\\n", " ")
        sizes = re.search(r"--hierarchical-context-parallel-sizes (\d+) (\d+)", flags)
        gib = [found["allocated"] / 2**30, found["needed"] / 2**30]
        named = "".join(f", `{k}={v}`" for k, v in more.items())
        rows.append(
            f"| [`{recipe}`]({recipe}/README.md){named} | {found['seq_length'] >> 10}K | {nodes} x {gpus} | "
            f"{found['tensor_parallel']} x {found['context_parallel']} | "
            f"{' x '.join(sizes.groups()) if sizes else '-'} | {gib[0]:.1f} | {gib[1]:.1f} | {measured} |"
        )
    return "\n".join(rows) + "\n"


def rows_of(words: list[str]) -> tuple[str, list[dict]]:
    """The file and the rows that ``words`` name, of each policy the newest."""
    (file,) = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    rows = [json.loads(line) for line in (ROWS / file).read_text().splitlines()]
    for name, value in (word.split("=") for word in words if not word.startswith("file=")):
        rows = [row for row in rows if str(row.get(name)) == value]
    assert rows, f"{words} name no row"
    if all("policy" in row for row in rows):
        rows = [*{row["policy"]: row for row in rows}.values()]
    else:
        assert len(rows) == 1, f"{words} name {len(rows)} rows"
    return file, rows


def losses(page: Path, words: list[str]) -> str:
    """The first losses of a row, or of the policies that several have."""
    file, rows = rows_of(words)
    count = min(STEPS, *(len(row["losses"]) for row in rows))
    lines = [
        "| step | " + " | ".join(map(str, range(1, count + 1))) + " |",
        "|---" * (count + 1) + "|",
    ]
    said = []
    for row in rows:
        name = row.get("policy", "loss")
        lines.append(f"| {name} | " + " | ".join(f"{x:.4f}" for x in row["losses"][:count]) + " |")
        ms, recall = row.get("iter_ms") or row["step_ms"], f"recall {row['recall']}, "
        said.append(
            ("" if name == "loss" else f"{name}: ")
            + f"density {row['density']}, {recall if row['recall'] else ''}"
            f"{ms / 1000:.2f} s a step, peak {row['max_alloc_gb']:.1f} GiB"
        )
    first = rows[0]
    where = f"commit {first['commit']}, {first.get('world') or first['gpus']} x {first['gpu']}"
    lines += ["", f"{'Row' if len(rows) == 1 else 'Rows'}: `{file}`, {where}; {'; '.join(said)}."]
    return "\n".join(lines) + "\n"


MAKERS = {"plan": plan, "losses": losses, "memory": memory}


def pages() -> list[Path]:
    return sorted(EXAMPLES.glob("**/*.md"))


def filled(page: Path) -> str:
    """A page as it should be."""

    def put(found: re.Match) -> str:
        return found[1] + MAKERS[found[2]](page, (found[3] or "").split()) + found[4]

    return MARKED.sub(put, page.read_text(encoding="utf-8"))


def main() -> None:
    for page in pages():
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
