# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.cli import main
from megatron_mtraining.megatron.patching import (
    edit,
    parse_patch,
    patches_folder,
    supported_lines,
)

ENUMS, SCRIPT = "megatron/core/transformer/enums.py", "pretrain_gpt.py"
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
            rows += [row[1:] for row in hunk.rows if row[0] != "+"] + ["# after"]
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((end.join(rows) + " # no end of line").encode())
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
    assert ENUMS in told and SCRIPT in told, "says what it changes"
    applied = contents(root)
    assert {path for path in before if before[path] != applied[path]} == {ENUMS, SCRIPT}
    assert "mtraining = 6" in applied[ENUMS].decode()
    assert "megatron_mtraining.register()" in applied[SCRIPT].decode()
    assert applied[ENUMS].count(b"\r\n") == applied[ENUMS].count(b"\n") * (end == "\r\n")
    assert patch("check", root) == 0
    assert patch("apply", root) == 0 and contents(root) == applied, "idempotent"
    assert patch("revert", root) == 0
    assert contents(root) == before, "to the byte"


def test_mode_of_a_file_stays(tmp_path):
    root = make_tree(tmp_path, LINES[0])
    (root / SCRIPT).chmod(0o755)
    assert patch("apply", root) == 0
    assert (root / SCRIPT).stat().st_mode & 0o777 == 0o755


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
    clean = (root / SCRIPT).read_bytes()
    assert patch("apply", root) == 0
    (root / SCRIPT).write_bytes(clean)
    refused(root, capsys, "half patched", f"{SCRIPT} clean", f"{ENUMS} applied", action=action)

    root = make_tree(tmp_path / "c", line)
    assert patch("apply", root) == 0
    text = (root / SCRIPT).read_text()
    (root / SCRIPT).write_text(text.replace("megatron_mtraining.register()", "pass"))
    refused(root, capsys, SCRIPT, "not as in", action=action)

    root = make_tree(tmp_path / "d", line)
    (root / SCRIPT).unlink()
    refused(root, capsys, f"no {SCRIPT}", action=action)


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
    file = root / SCRIPT
    file.write_text(file.read_text() + "\n# mine\n")
    refused(root, capsys, SCRIPT, "not committed")
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


def test_edit_needs_exactly_one_place():
    (hunks,) = parse_patch("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n").values()
    assert edit(b"zero\none\ntwo\n", hunks) == b"zero\none\n2\n"
    assert edit(b"zero\none\n2\n", hunks, reverse=True) == b"zero\none\ntwo\n"
    assert edit(b"one\n2\n", hunks) is None
    assert edit(b"one\ntwo\none\ntwo\n", hunks) is None
    odd = b"caf\xe9 \x0c\none\r\ntwo"
    assert edit(odd, hunks) == b"caf\xe9 \x0c\none\r\n2\r\n"


def test_a_folder_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    from megatron_mtraining.megatron import patching

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
    for path in (ENUMS, SCRIPT, "megatron/core/package_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / path, tmp_path / path)
    before = contents(tmp_path)
    assert patch("apply", tmp_path) == 0 and patch("check", tmp_path) == 0
    for path in (ENUMS, SCRIPT):
        compile((tmp_path / path).read_text(), path, "exec")
    assert patch("revert", tmp_path) == 0 and contents(tmp_path) == before
