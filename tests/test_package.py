# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What is installed, from the tree, editable and from an sdist, and under which names."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import megatron_mtraining

ROOT = Path(__file__).resolve().parents[1]
HEADER = "# Copyright 2026 the megatron-mtraining authors."


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel of ``source`` with the tools of this environment."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", out]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    # From a copy: a build writes into its source, where other tests may be at work.
    copy = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("this tree is not a git checkout, so its own files are not known")
    for name in listed.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return build("sdist", copy, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> list[str]:
    """Names in the wheel that the sdist builds: so both are complete."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    built = build("wheel", source, tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("entry_points.txt"))
        assert "mtraining = megatron_mtraining.tools.cli:main" in archive.read(metadata).decode()
    return names


def test_wheel_has_one_top_level_name(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megatron_mtraining"}


@pytest.mark.parametrize("folder", ["megatron_mtraining", "kernels", "patches"])
def test_wheel_has_every_file(wheel, folder):
    ours = [
        path.relative_to(ROOT)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    inside = "" if folder == "megatron_mtraining" else "megatron_mtraining/"
    missing = [path for path in ours if inside + path.as_posix() not in wheel]
    assert ours and not missing


def test_sdist_has_what_a_reader_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "Makefile", "tests/conftest.py"} <= names


def test_installed_names():
    """In this environment: kernels only inside the package, and the console command in place."""
    code = (
        "import importlib.util as u, megatron_mtraining.kernels as k;"
        "assert k.__name__ == 'megatron_mtraining.kernels';"
        "assert u.find_spec('kernels') is None, u.find_spec('kernels');"
        "assert u.find_spec('patches') is None"
    )
    # Not from the repository's root, where the two folders lie under their own names.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "docs", env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_mtraining.__version__)


@pytest.mark.parametrize("folder", ["megatron_mtraining", "kernels", "tests", "benchmarks"])
def test_source_files_carry_the_licence(folder):
    bare = [
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if HEADER not in path.read_text(encoding="utf-8")[:200]
    ]
    assert not bare
