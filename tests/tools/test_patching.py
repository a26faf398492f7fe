# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining patch``: applied and reverted to the byte, refused where the checkout is not as expected, and
what the patch does to training scripts with and without the package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_mtraining
from megatron_mtraining.tools import patching
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.patching import FILES, MADE_FOR, PATCH

ENUMS, TRAINING = FILES
OLDEST, *_, NEWEST = MADE_FOR
GIT = shutil.which("git")

pytestmark = pytest.mark.skipif(GIT is None, reason="needs git")


def side(path: str, sign: str) -> list[str]:
    """The lines that the patch has for a file before (sign -) or after (sign +), or adds (only +)."""
    lines = PATCH.read_text().split(f"+++ b/{path}\n")[1].split("\n--- ")[0].splitlines()
    return [line[1:] for line in lines if line[:1] in (" ", sign)]


def make_tree(root: Path, version: str = OLDEST, before: int = 10) -> Path:
    """A checkout whose files have the lines around the changes, and others before."""
    major, minor = version.split(".")
    info = root / patching.PACKAGE_INFO
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\n")
    for path in FILES:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        lines = [f"# {number}" for number in range(before)] + side(path, "-")
        lines += ["# after"] if path == ENUMS else []
        (root / path).write_text("\n".join(lines) + "\n")
    return root


def contents(root: Path) -> dict:
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in root.rglob("*")
        if file.is_file() and ".git" not in file.relative_to(root).parts
    }


def patch(action: str, root: Path) -> int:
    return main(["patch", action, str(root)])


@pytest.mark.parametrize("version", MADE_FOR)
@pytest.mark.parametrize("before", [2, 500])
def test_apply_check_revert(version, before, tmp_path, capsys):
    root = make_tree(tmp_path, version, before)
    clean = contents(root)
    assert patch("check", root) == 1
    assert patch("revert", root) == 0 and contents(root) == clean
    assert "nothing to do" in capsys.readouterr().out
    assert patch("apply", root) == 0
    told = capsys.readouterr().out
    assert ENUMS in told and TRAINING in told, "says what it changes"
    applied = contents(root)
    assert {path for path in clean if clean[path] != applied[path]} == {ENUMS, TRAINING}
    assert "mtraining = 6" in applied[ENUMS].decode()
    assert "megatron_mtraining.register()" in applied[TRAINING].decode()
    assert patch("check", root) == 0
    assert patch("apply", root) == 0 and contents(root) == applied, "idempotent"
    assert patch("revert", root) == 0
    assert contents(root) == clean, "to the byte"


def refused(root: Path, capsys, *words: str, action: str = "apply") -> None:
    before = contents(root) if root.is_dir() else None
    assert patch(action, root) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert before is None or contents(root) == before, "nothing changed"


def test_unknown_trees(tmp_path, capsys):
    refused(tmp_path / "missing", capsys, "is not a folder")
    refused(tmp_path, capsys, "not a Megatron-LM checkout", "package_info.py")
    root = make_tree(tmp_path / "tree")
    info = root / "megatron/core/package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 9\nPATCH = 2\n")
    refused(root, capsys, "0.9.2", OLDEST, NEWEST)
    info.write_text("VERSION = 3\n")
    refused(root, capsys, "does not say which version")


@pytest.mark.parametrize("action", ["apply", "check", "revert"])
def test_edited_half_applied_and_missing_files(tmp_path, capsys, action):
    root = make_tree(tmp_path / "a")
    (root / ENUMS).write_text((root / ENUMS).read_text().replace("local = 4", "local = 44"))
    refused(root, capsys, ENUMS, "not as in", action=action)

    root = make_tree(tmp_path / "b")
    clean = (root / TRAINING).read_bytes()
    assert patch("apply", root) == 0
    (root / TRAINING).write_bytes(clean)
    refused(root, capsys, TRAINING, "only part of it", action=action)

    root = make_tree(tmp_path / "c")
    assert patch("apply", root) == 0
    text = (root / TRAINING).read_text()
    (root / TRAINING).write_text(text.replace("megatron_mtraining.register()", "pass"))
    refused(root, capsys, TRAINING, "not as in", action=action)

    root = make_tree(tmp_path / "d")
    (root / TRAINING).unlink()
    refused(root, capsys, f"no {TRAINING}", action=action)


def commit(root: Path) -> None:
    """A repository of the checkout, with all committed."""
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([GIT, "-C", str(root), *who, *words], check=True, capture_output=True)


def test_a_checkout_inside_of_another_repository(tmp_path):
    """Where git apply would take paths as the outer repository's, and leave them out in silence."""
    root = make_tree(tmp_path / "third_party" / "megatron")
    commit(tmp_path)
    for action in ("apply", "check", "revert"):
        assert patch(action, root) == 0
    assert patch("check", root) == 1


def test_the_files_that_are_named_are_those_of_the_patch():
    named = [line[6:] for line in PATCH.read_text().splitlines() if line.startswith("+++ b/")]
    assert named == list(FILES)


def test_git_is_missing(tmp_path, capsys, monkeypatch):
    root = make_tree(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(root, capsys, "git is not installed", "megatron_mtraining.launch")


def added(path: str) -> str:
    """What the patch puts into a file, alone."""
    old = side(path, "-")
    return "\n".join(side(path, "+")[len(old) :])


def test_the_package_registers(monkeypatch):
    calls = []
    monkeypatch.setattr(megatron_mtraining, "register", lambda: calls.append("registered"))
    exec(added(TRAINING), {})
    assert calls == ["registered"]


WITHOUT_THE_PACKAGE = {
    "--lr 1 --attention-backend mtraining --mtraining-slash 8": True,
    "--attention-backend=mtraining": True,
    "--attention-back mtraining": True,  # argparse takes the start of an option's name
    "--attention-backend flash": False,
    "--attention-backend flash --wandb-project mtraining": False,
    "--attention-backend auto --save mtraining-runs": False,
    "": False,
}


@pytest.mark.parametrize("words", WITHOUT_THE_PACKAGE)
def test_without_the_package(words, monkeypatch):
    """One message on a node for our backend; nothing at all for others."""
    monkeypatch.setitem(sys.modules, "megatron_mtraining", None)
    monkeypatch.setattr(sys, "argv", ["pretrain_vlm.py", *words.split()])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if not WITHOUT_THE_PACKAGE[words]:
        exec(added(TRAINING), {})
        return
    with pytest.raises(SystemExit, match="^error: .* needs the package megatron-mtraining"):
        exec(added(TRAINING), {})
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        exec(added(TRAINING), {})
    assert stopped.value.code == 1


def test_the_package_of_patches(tmp_path):
    """However it is installed here; not from the repository's root, which has ``patches`` too, nor from the
    folder of this file, whose ``inspect`` hides Python's."""
    code = "import megatron_mtraining.patches as p; assert p.__doc__, p"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_command_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        main(["patch", "--help"])
    assert stopped.value.code == 0 and "exit status" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["patch", "undo", "."])
    assert stopped.value.code == 2


def test_real_checkouts(checkout, tmp_path):
    for path in (ENUMS, TRAINING, "megatron/core/package_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / path, tmp_path / path)
    before = contents(tmp_path)
    assert patch("apply", tmp_path) == 0 and patch("check", tmp_path) == 0
    for path in (ENUMS, TRAINING):
        compile((tmp_path / path).read_text(), path, "exec")
    assert patch("revert", tmp_path) == 0 and contents(tmp_path) == before
