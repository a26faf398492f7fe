# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_mtraining
from megatron_mtraining import ConfigError
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.patching import edit, parse_patch, patches_folder, supported_lines

ENUMS, TRAINING = "megatron/core/transformer/enums.py", "megatron/training/__init__.py"
LINES = supported_lines()
GIT = shutil.which("git")


def make_tree(root: Path, line, end: str = "\n") -> Path:
    """A tree as the patch knows it: for each file, the lines its hunks expect, with others."""
    major, minor = line.version.split(".")
    info = root / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 1\n")
    for path, hunks in line.hunks.items():
        rows = ["# first line"]
        for hunk in hunks:
            rows += [row[1:] for row in hunk.rows if row[0] != "+"]
            # A change with nothing after it goes to the file's end, which git minds.
            rows += ["# after"] if hunk.rows[-1][0] == " " else []
        at_the_end = hunks[-1].rows[-1][0] == "+"
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = end.join(rows) + (end if at_the_end else " # no end of line")
        file.write_bytes(text.encode())
    return root


def contents(root: Path) -> dict:
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in root.rglob("*")
        if file.is_file() and ".git" not in file.relative_to(root).parts
    }


def patch(action: str, root: Path) -> int:
    return main(["patch", action, str(root)])


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.version)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_apply_check_revert(line, end, tmp_path, capsys):
    root = make_tree(tmp_path, line, end)
    before = contents(root)
    assert patch("check", root) == 1
    assert patch("revert", root) == 0 and contents(root) == before
    assert "nothing to do" in capsys.readouterr().out
    assert patch("apply", root) == 0
    told = capsys.readouterr().out
    assert ENUMS in told and TRAINING in told, "says what it changes"
    applied = contents(root)
    assert {path for path in before if before[path] != applied[path]} == {ENUMS, TRAINING}
    assert "mtraining = 6" in applied[ENUMS].decode()
    assert "megatron_mtraining.register()" in applied[TRAINING].decode()
    assert applied[ENUMS].count(b"\r\n") == applied[ENUMS].count(b"\n") * (end == "\r\n")
    assert patch("check", root) == 0
    assert patch("apply", root) == 0 and contents(root) == applied, "idempotent"
    assert patch("revert", root) == 0
    assert contents(root) == before, "to the byte"


def test_mode_of_a_file_stays(tmp_path):
    root = make_tree(tmp_path, LINES[0])
    (root / TRAINING).chmod(0o755)
    assert patch("apply", root) == 0
    assert (root / TRAINING).stat().st_mode & 0o777 == 0o755


def refused(root: Path, capsys, *words: str, action: str = "apply") -> None:
    before = contents(root) if root.is_dir() else None
    assert patch(action, root) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert before is None or contents(root) == before, "nothing changed"


def test_unknown_trees(tmp_path, capsys):
    refused(tmp_path / "missing", capsys, "is not a folder")
    refused(tmp_path, capsys, "not a Megatron-LM checkout", "package_info.py")
    root = make_tree(tmp_path / "tree", LINES[0])
    info = root / "megatron/core/package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 9\nPATCH = 2\n")
    refused(root, capsys, "0.9.2", LINES[0].version, LINES[-1].version)
    info.write_text("VERSION = 3\n")
    refused(root, capsys, "does not say which version")


@pytest.mark.parametrize("action", ["apply", "check", "revert"])
def test_edited_half_applied_and_missing_files(tmp_path, capsys, action):
    line = LINES[0]
    root = make_tree(tmp_path / "a", line)
    (root / ENUMS).write_text((root / ENUMS).read_text().replace("local = 4", "local = 44"))
    refused(root, capsys, ENUMS, "not as in", action=action)

    root = make_tree(tmp_path / "b", line)
    clean = (root / TRAINING).read_bytes()
    assert patch("apply", root) == 0
    (root / TRAINING).write_bytes(clean)
    refused(root, capsys, "half patched", f"{TRAINING} clean", f"{ENUMS} applied", action=action)

    root = make_tree(tmp_path / "c", line)
    assert patch("apply", root) == 0
    text = (root / TRAINING).read_text()
    (root / TRAINING).write_text(text.replace("megatron_mtraining.register()", "pass"))
    refused(root, capsys, TRAINING, "not as in", action=action)

    root = make_tree(tmp_path / "d", line)
    (root / TRAINING).unlink()
    refused(root, capsys, f"no {TRAINING}", action=action)


def test_lines_that_somebody_put_at_the_end(tmp_path, capsys):
    root = make_tree(tmp_path, LINES[0])
    (root / TRAINING).write_text((root / TRAINING).read_text() + "import mine\n")
    refused(root, capsys, TRAINING, "not as in")


def test_a_place_that_is_there_twice_is_refused(tmp_path, capsys):
    root = make_tree(tmp_path, LINES[0])
    text = (root / ENUMS).read_text()
    (root / ENUMS).write_text(text + "\n" + text)
    refused(root, capsys, ENUMS)


@pytest.mark.skipif(GIT is None, reason="needs git")
def test_changes_that_are_not_committed(tmp_path, capsys):
    root = make_tree(tmp_path, LINES[0])

    def git(*words):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run([GIT, "-C", str(root), *who, *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "upstream")
    file = root / TRAINING
    file.write_text("# mine\n" + file.read_text())
    refused(root, capsys, TRAINING, "not committed")
    git("commit", "-qam", "mine")
    (root / "other.py").write_text("# not touched by the patch\n")
    assert patch("apply", root) == 0
    assert patch("check", root) == 0 and patch("apply", root) == 0
    assert patch("revert", root) == 0
    status = subprocess.run([GIT, "-C", str(root), "diff", "--stat"], capture_output=True)
    assert status.stdout == b""


@pytest.mark.skipif(GIT is None, reason="needs git")
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.version)
def test_git_accepts_the_same_patches(line, tmp_path):
    root = make_tree(tmp_path, line)
    given = patches_folder().joinpath(line.patch).read_text()
    # Line numbers are those of the real files.
    command = [GIT, "apply", "--check", "--unidiff-zero", "-"]
    subprocess.run(command, cwd=root, input=given, text=True, check=True)
    twin = make_tree(tmp_path / "twin", line)
    subprocess.run([GIT, "apply", "-"], cwd=twin, input=given, text=True, check=True)
    assert patch("check", twin) == 0


def test_one_patch_for_each_line():
    versions = [line.version for line in LINES]
    assert versions == ["0.16", "0.17", "0.18", "0.19", "0.20"]
    for line in LINES:
        assert set(line.touches) == set(line.hunks) == {ENUMS, TRAINING}


def test_edit_needs_exactly_one_place():
    (hunks,) = parse_patch("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n").values()
    assert edit(b"zero\none\ntwo\n", hunks) == b"zero\none\n2\n"
    assert edit(b"zero\none\n2\n", hunks, reverse=True) == b"zero\none\ntwo\n"
    assert edit(b"one\n2\n", hunks) is None
    assert edit(b"one\ntwo\none\ntwo\n", hunks) is None
    odd = b"caf\xe9 \x0c\none\r\ntwo"
    assert edit(odd, hunks) == b"caf\xe9 \x0c\none\r\n2\r\n"
    (at_the_end,) = parse_patch("--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n one\n+two\n").values()
    assert edit(b"zero\none\n", at_the_end) == b"zero\none\ntwo\n"
    assert edit(b"one\nzero\n", at_the_end) is None
    assert edit(b"zero\none", at_the_end) is None, "nothing to put a line after"


def test_a_folder_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    from megatron_mtraining.tools import patching

    root = make_tree(tmp_path, LINES[0])
    before, replace = contents(root), patching.os.replace
    calls = []

    def fails_on_the_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(patching.os, "replace", fails_on_the_second)
    assert patch("apply", root) == 2
    assert "No space left" in capsys.readouterr().err
    assert contents(root) == before


def added(path: str) -> str:
    """What the patch puts into a file, alone."""
    hunks = LINES[-1].hunks[path]
    return "\n".join(row[1:] for hunk in hunks for row in hunk.rows if row[0] == "+")


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


def test_the_package_of_patches():
    """However it is installed here; not from the repository's root, which has ``patches`` too."""
    code = "import megatron_mtraining.patches as p; assert p.__doc__, p"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


@pytest.mark.parametrize("place", ["megatron_mtraining/patches", "patches"])
def test_where_the_patches_are(place, tmp_path):
    """Inside the package, as in a wheel, and beside it, as in a checkout, installed or not."""
    package = Path(megatron_mtraining.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__", "patches")
    shutil.copytree(package, tmp_path / "megatron_mtraining", ignore=ignore)
    shutil.copytree(patches_folder(), tmp_path / place)
    code = "from megatron_mtraining.tools import patching as p; print(p.patches_folder())"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; assert p.supported_lines()"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(tmp_path / place), done.stderr


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


def test_a_config_error_is_a_message_not_a_traceback(capsys, tmp_path):
    assert isinstance(ConfigError("x"), ValueError)
    assert main(["patch", "apply", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("mtraining patch: ")


def test_real_checkouts(checkout, tmp_path):
    for path in (ENUMS, TRAINING, "megatron/core/package_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / path, tmp_path / path)
    before = contents(tmp_path)
    assert patch("apply", tmp_path) == 0 and patch("check", tmp_path) == 0
    for path in (ENUMS, TRAINING):
        compile((tmp_path / path).read_text(), path, "exec")
    assert patch("revert", tmp_path) == 0 and contents(tmp_path) == before
