# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining patch apply|check|revert DIR``: the backend in a Megatron-LM checkout.

A patch is a genuine unified diff (``git apply`` takes it too); ``table.json`` beside it says which
Megatron lines it is for and what it touches. It is applied here by exact context, so that neither
git nor a repository is needed. One serves all lines so far: where it goes, they have the same text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..config import ConfigError

PACKAGE_INFO = Path("megatron/core/package_info.py")
NOT_APPLIED = 1
"""Exit status of ``check`` on a tree that the patch is not applied to (0: applied, 2: refused)."""


@dataclass(frozen=True)
class Hunk:
    """Rows of a unified diff: a space (stays), ``-`` (goes) or ``+`` (comes), and the line."""

    rows: tuple[str, ...]

    def reversed(self) -> Hunk:
        """The hunk that takes this one back."""
        swap = {" ": " ", "+": "-", "-": "+"}
        return Hunk(tuple(swap[row[0]] + row[1:] for row in self.rows))


@dataclass(frozen=True)
class Line:
    """A supported Megatron line, such as 0.16, and the patch that ``table.json`` has for it."""

    version: str
    patch: str
    touches: dict[str, str]
    hunks: dict[str, tuple[Hunk, ...]]


def patches_folder() -> Path:
    """Where the patches are: inside the package once it is installed, or, in a source checkout
    (used as it is, or by an editable install), the checkout's top folder."""
    inside = Path(__file__).parents[1] / "patches"
    return inside if (inside / "table.json").is_file() else Path(__file__).parents[2] / "patches"


def supported_lines() -> list[Line]:
    """The lines that ``table.json`` has patches for, with these read."""
    folder = patches_folder()
    lines = []
    for entry in json.loads((folder / "table.json").read_text(encoding="utf-8")):
        hunks = parse_patch((folder / entry["patch"]).read_text(encoding="utf-8"))
        lines += [
            Line(version, entry["patch"], entry["touches"], hunks) for version in entry["made_for"]
        ]
    return lines


def parse_patch(text: str) -> dict[str, tuple[Hunk, ...]]:
    """The hunks of a unified diff, by path (``b/`` stripped)."""
    files: dict[str, list[list[str]]] = {}
    hunks: list[list[str]] | None = None
    for line in text.splitlines():
        if line.startswith("+++ "):
            hunks = files.setdefault(line[4:].split("\t")[0].removeprefix("b/"), [])
        elif line.startswith("@@ "):
            hunks.append([])
        elif hunks and line[:1] in (" ", "+", "-") and not line.startswith("--- "):
            hunks[-1].append(line)
    return {path: tuple(Hunk(tuple(rows)) for rows in found) for path, found in files.items()}


def edit(content: bytes, hunks: tuple[Hunk, ...], reverse: bool = False) -> bytes | None:
    """``content`` with every hunk applied (or taken back); None unless each fits at exactly one
    place. One with nothing after its change fits the file's end only, as for git: or else a change
    edited later would pass for one not there. Lines keep their ends, new ones take those of their
    neighbours."""
    lines = content.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    for given in hunks:
        hunk = given.reversed() if reverse else given
        old = [row[1:] for row in hunk.rows if row[0] != "+"]
        bare = [line.rstrip("\r\n") for line in lines]
        size = len(old)
        starts = [i for i in range(len(bare) - size + 1) if bare[i : i + size] == old]
        at_the_end = hunk.rows[-1][0] != " "
        if len(starts) != 1 or (at_the_end and starts[0] + size != len(bare)):
            return None
        found = iter(lines[starts[0] : starts[0] + size])
        end = "\r\n" if lines[starts[0]].endswith("\r\n") else "\n"
        new = []
        for row in hunk.rows:
            if row[0] == "+":
                if new and not new[-1].endswith(("\r", "\n")):
                    return None  # the file's last line has no end: upstream's have one
                new.append(row[1:] + end)
            elif row[0] == " ":
                new.append(next(found))
            else:
                next(found)
        lines[starts[0] : starts[0] + size] = new
    return "".join(lines).encode("utf-8", "surrogateescape")


def find_line(root: Path) -> Line:
    """The supported line that the checkout ``root`` belongs to.

    Raises:
        ConfigError: not a checkout, or of a version that there is no patch for.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder: name a Megatron-LM checkout")
    info = root / PACKAGE_INFO
    if not info.is_file():
        raise ConfigError(
            f"{root} is not a Megatron-LM checkout: it has no {PACKAGE_INFO}; name the folder that "
            "holds pretrain_gpt.py"
        )
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", info.read_text(), re.MULTILINE))
    if not {"MAJOR", "MINOR"} <= found.keys():
        raise ConfigError(f"{info} does not say which version of Megatron-Core this is")
    version = f"{found['MAJOR']}.{found['MINOR']}"
    lines = supported_lines()
    for line in lines:
        if line.version == version:
            return line
    known = ", ".join(line.version for line in lines)
    raise ConfigError(
        f"{root} is Megatron-Core {version}.{found.get('PATCH', '?')}, for which there is no patch "
        f"(there is one for {known}): use such a checkout, or python -m megatron_mtraining.launch, "
        "which needs no patch"
    )


def tree_state(root: Path, line: Line) -> str:
    """``"clean"`` or ``"applied"``.

    Raises:
        ConfigError: files are missing or not as the patch knows them, or only some are patched.
    """
    states = {}
    for path, hunks in line.hunks.items():
        file = root / path
        if not file.is_file():
            raise ConfigError(f"{root} has no {path}: it is not a whole Megatron-LM checkout")
        content = file.read_bytes()
        applied = edit(content, hunks, reverse=True) is not None
        clean = edit(content, hunks) is not None
        states[path] = "applied" if applied else "clean" if clean else "unknown"
    unknown = [path for path, state in states.items() if state == "unknown"]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)} in {root} {'is' if len(unknown) == 1 else 'are'} not as in "
            f"Megatron-Core {line.version}: the lines around the change were edited, or only part "
            f"of it is there; restore upstream's file, or put in by hand what {line.patch} does"
        )
    if len(set(states.values())) > 1:
        told = ", ".join(f"{path} {state}" for path, state in states.items())
        raise ConfigError(
            f"{root} is half patched ({told}): restore upstream's files (git checkout -- "
            f"{' '.join(line.hunks)}), then apply again"
        )
    return next(iter(states.values()))


def dirty_files(root: Path, line: Line) -> list[str]:
    """The files of the patch that git says have changes not committed; none where the tree is not
    a repository (a release's archive), where only the patch's exact context protects edits."""
    if shutil.which("git") is None:
        return []
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--"]
    status = subprocess.run([*command, *line.hunks], capture_output=True, text=True)
    return [row[3:] for row in status.stdout.splitlines()] if status.returncode == 0 else []


def change(root: Path, line: Line, reverse: bool) -> None:
    """Write the changed files: all of them, or, on an error, none."""
    before = {path: (root / path).read_bytes() for path in line.hunks}
    after = {path: edit(before[path], hunks, reverse) for path, hunks in line.hunks.items()}
    written = []
    try:
        for path, content in after.items():
            _replace(root / path, content)
            written.append(path)
    except OSError as error:
        for path in written:
            _replace(root / path, before[path])
        raise ConfigError(f"{error.filename or root} cannot be written: {error.strerror}") from None


def _replace(file: Path, content: bytes) -> None:
    file = file.resolve()
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(descriptor, "wb") as temporary:
            temporary.write(content)
        shutil.copymode(file, name)
        os.replace(name, file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def add_arguments(parser) -> None:
    """The arguments of ``mtraining patch``."""
    parser.add_argument("action", choices=("apply", "check", "revert"))
    parser.add_argument("tree", type=Path, metavar="DIR", help="a Megatron-LM checkout")
    parser.epilog = (
        "exit status: 0 done, or nothing to do (check: applied); 1 (check) not applied; "
        "2 refused, nothing changed"
    )


def run(args) -> int:
    """Do it, and say what changes. Returns the exit status."""
    root, action = args.tree, args.action
    line = find_line(root)
    state = tree_state(root, line)
    if action == "check":
        print(f"{root}: Megatron-Core {line.version}, {line.patch} {_told(state)}")
        return 0 if state == "applied" else NOT_APPLIED
    target = "applied" if action == "apply" else "clean"
    if state == target:
        print(f"{root}: Megatron-Core {line.version}, {line.patch} {_told(state)}; nothing to do")
        return 0
    dirty = dirty_files(root, line) if action == "apply" else []
    if dirty:
        raise ConfigError(
            f"{', '.join(dirty)} in {root} {'has' if len(dirty) == 1 else 'have'} changes that are "
            "not committed: commit or stash them first"
        )
    change(root, line, reverse=action == "revert")
    print(f"{root}: Megatron-Core {line.version}, {line.patch} {_told(target)}")
    for path, what in line.touches.items():
        print(f"  {path}: {what if action == 'apply' else 'as before'}")
    return 0


def _told(state: str) -> str:
    return "is applied" if state == "applied" else "is not applied"
