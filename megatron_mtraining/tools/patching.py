# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining patch apply|check|revert DIR``: the attention backend in a Megatron-LM checkout.

``patches/megatron_lm.patch`` is applied and reverted by ``git apply``, which changes both files or none and
needs no repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..checkout import PACKAGE_INFO, python_mismatch, read_version
from ..errors import ConfigError

PATCH = Path(__file__).parents[1] / "patches" / "megatron_lm.patch"
MADE_FOR = {"0.16": "0.16.1", "0.17": "0.17.1", "0.18": "0.18.2", "0.19": "0.19.0", "0.20": "main"}
"""Megatron-Core's release lines that the patch fits, each with the version that it was tried on."""
FILES = {
    "megatron/core/transformer/enums.py": "one line: member mtraining of AttnBackend, a choice of "
    "--attention-backend",
    "megatron/training/__init__.py": "fifteen lines at the end, which call megatron_mtraining.register()",
}
"""The files that the patch changes, and how."""
NOT_APPLIED = 1
"""Exit status of ``check`` if the patch is not applied (0: applied, 2: refused)."""
ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_DIR": os.devnull,
    "LC_ALL": "C",
}
"""git's environment: a user's settings, of whitespace for example, change nothing."""


def git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder. It sees no repository: inside of one that is not the checkout's own, ``git apply``
    would leave paths out in silence."""
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    environment |= ENVIRONMENT
    command = ["git", *words]
    # A list of words, no shell.
    return subprocess.run(command, cwd=root, env=environment, capture_output=True)  # noqa: S603


def fits(root: Path, *options: str) -> bool:
    """Whether the patch, or with ``--reverse`` its reversal, can be applied."""
    return git(root, "apply", "--check", *options, str(PATCH)).returncode == 0


def read_release(root: Path) -> dict[str, int]:
    """MAJOR, MINOR and perhaps PATCH of the Megatron-Core in the checkout ``root``.

    Raises:
        ConfigError: not a checkout, or it does not say its version.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder: name a Megatron-LM checkout")
    found = read_version(root)
    if found is None:
        raise ConfigError(
            f"{root} is not a Megatron-LM checkout: it has no {PACKAGE_INFO}; name the folder that "
            "holds pretrain_gpt.py"
        )
    if not {"MAJOR", "MINOR"} <= found.keys():
        raise ConfigError(
            f"{root / PACKAGE_INFO} does not say which version of Megatron-Core this is"
        )
    return found


def find_version(root: Path) -> str:
    """The release line of Megatron-Core in the checkout ``root``, such as 0.16.

    Raises:
        ConfigError: not a checkout, or of a version that the patch does not fit.
    """
    found = read_release(root)
    version = f"{found['MAJOR']}.{found['MINOR']}"
    if version not in MADE_FOR:
        raise ConfigError(
            f"{root} is Megatron-Core {version}.{found.get('PATCH', '?')}, for which there is no patch "
            f"(there is one for {', '.join(MADE_FOR)}): use such a checkout, or python -m "
            "megatron_mtraining.launch, which needs no patch"
        )
    return version


def is_applied(root: Path, version: str) -> bool:
    """Whether the patch is applied.

    Raises:
        ConfigError: files are missing or not as the patch expects them, or only some are patched.
    """
    if shutil.which("git") is None:
        raise ConfigError(
            "git is not installed: install it, or use python -m megatron_mtraining.launch, which needs no "
            "patch"
        )
    for path in FILES:
        if not (root / path).is_file():
            raise ConfigError(f"{root} has no {path}: it is not a whole Megatron-LM checkout")
    if fits(root, "--reverse"):
        return True
    if fits(root):
        return False
    raise ConfigError(
        f"{' and '.join(FILES)} in {root} are not as in Megatron-Core {version}: lines around the change "
        "were edited, or only part of it is there; restore upstream's files (git checkout -- "
        f"{' '.join(FILES)}), or put in by hand what {PATCH.name} does"
    )


def change(root: Path, *options: str) -> None:
    """Apply the patch, or with ``--reverse`` revert it."""
    done = git(root, "apply", *options, str(PATCH))
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().removeprefix("error: ")
        raise ConfigError(f"{root} cannot be written: {reason}")


def add_arguments(parser) -> None:
    """The arguments of ``mtraining patch``."""
    parser.add_argument("action", choices=("apply", "check", "revert"), help="what to do")
    parser.add_argument("tree", type=Path, metavar="CHECKOUT", help="Megatron-LM checkout")
    parser.epilog = (
        "exit status: 0, done or already done (check: the patch is applied); 1, check found no patch; "
        "2, refused, and nothing is changed"
    )


def run(args) -> int:
    """Do it, and say what changes. Returns the exit status."""
    root, action = args.tree, args.action
    version = find_version(root)
    applied = is_applied(root, version)
    mismatch = python_mismatch(read_version(root))
    if mismatch and action != "revert":
        print(f"warning: {mismatch}", file=sys.stderr)

    def told(applied: bool) -> str:
        state = "is applied" if applied else "is not applied"
        return f"{root}: Megatron-Core {version}, {PATCH.name} {state}"

    if action == "check":
        print(told(applied))
        return 0 if applied else NOT_APPLIED
    if applied == (action == "apply"):
        print(f"{told(applied)}; nothing to do")
        return 0
    change(root, *([] if action == "apply" else ["--reverse"]))
    print(told(not applied))
    for path, what in FILES.items():
        print(f"  {path}: {what if action == 'apply' else 'as before'}")
    return 0
