# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Python, packages and GPUs: whether they are there and fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError
from ...requirements import install_command, installed, is_too_old, last_line
from ...switches import given_switches

OK, ABSENT, FAILS = "ok", "not there", "will not work"
TESTED = {
    "Python": ("3.10", "3.11", "3.12", "3.13"),
    "torch": ("2.11", "2.13", "2.14", "2.15"),
    "triton": ("3.6", "3.8", "3.9"),
    "transformer-engine": ("2.11",),
}
"""Releases that tests or benchmarks ran with, as docs/compatibility.md has them."""
OPTIONAL = (
    ("transformer-engine", "te", "transformer_engine.pytorch", "use --transformer-impl local"),
    ("apex", "", "apex.optimizers", "not needed, Megatron uses other optimizers; not on PyPI"),
    ("transformers", "hf", "", "only needed for models of Hugging Face"),
    ("accelerate", "hf", "", "only needed by Trainer, mtraining inspect and eval"),
)
"""Packages, each with our extra, a module that Megatron imports if it finds it, and what is without it."""


class Line(NamedTuple):
    """What was found of one part: ``said`` has its version; if it fails, why, and what to do."""

    state: str
    what: str
    said: str
    needed: bool = True
    """Whether nothing can be trained if it fails."""

    def __str__(self) -> str:
        return f"{self.state:13}  {self.what}: {self.said}"


def ask(*words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run this Python with ``words``: nothing that is imported there can break this process."""
    command = [sys.executable, *words]
    try:
        # A list of words, no shell.
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)  # noqa: S603
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {seconds:g} s")


def examine(root: Path | None) -> Iterator[Line]:
    """A line for each part; GPUs after torch, which finds them."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Line(OK, "Python", python + tested("Python", python))
    yield _package("torch", "", "torch")
    yield _package("triton", "", "triton")
    yield from _gpus()
    try:
        given_switches()
    except ConfigError as error:
        yield Line(FAILS, "environment", str(error))
    for name, extra, module, without in OPTIONAL:
        yield _package(name, extra, module, without)


def tested(name: str, version: str) -> str:
    """Whether the release of a version is among :data:`TESTED`, as words to append."""
    release = ".".join(version.split(".")[:2])
    if name not in TESTED:
        return ""
    return ", tested" if release in TESTED[name] else ", a release that was not tested"


def gpu_count() -> int:
    """GPUs that torch can use; 0 if it cannot be imported."""
    try:
        import torch
    except Exception:  # of libraries that it loads
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _package(name: str, extra: str, module: str, without: str = "") -> Line:
    """The line of a package; one that is optional says what is ``without`` it."""
    found, install = installed(name), install_command([name], extra)
    if found == "not installed":
        if not without:
            return Line(FAILS, name, f"{found}: {install}")
        return Line(ABSENT, name, without + (f"; or {install}" if extra else ""))
    if is_too_old(name, extra):
        return Line(FAILS, name, f"{found} is too old: {install}", needed=not without)
    if module and (done := ask("-c", f"import {module}")).returncode:
        # Optional ones, too: Megatron imports what it finds.
        why = f"{found} cannot be imported ({last_line(done.stderr)})"
        return Line(FAILS, name, f"{why}: install it anew{', or remove it' if without else ''}")
    return Line(OK, name, found + tested(name, found))


def _gpus() -> Iterator[Line]:
    count, driver = gpu_count(), _driver()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not count and driver and not hidden:
        yield Line(
            FAILS,
            "GPU",
            f"driver {driver}, but torch cannot use it: install torch for its CUDA version",
        )
    elif not count:
        why = "CUDA_VISIBLE_DEVICES hides all; " if hidden else ""
        slow = "the launcher's --cpu runs the PyTorch reference, slowly: for a first try"
        yield Line(ABSENT, "GPU", why + slow)
    for number in range(count):
        yield _gpu(number, driver)


def _gpu(number: int, driver: str) -> Line:
    import torch

    from ...kernels.attention.backends import GLUON_VERSIONS

    properties = torch.cuda.get_device_properties(number)
    capability = properties.major, properties.minor
    said = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}, driver {driver or 'not known'}"
    )
    triton = tuple(int(part) for part in installed("triton").split(".")[:2] if part.isdigit())
    if capability < (8, 0):
        return Line(FAILS, f"GPU {number}", f"{said}: kernels are made for 8.0 and later")
    if capability != (9, 0):
        return Line(OK, f"GPU {number}", f"{said}: portable kernels; this kind was not measured")
    if not GLUON_VERSIONS[0] <= triton <= GLUON_VERSIONS[1]:
        first, last = (f"{major}.{minor}" for major, minor in GLUON_VERSIONS)
        why = f"slower, portable kernels; Hopper kernels need Triton {first} to {last}"
        return Line(OK, f"GPU {number}", f"{said}: {why}")
    return Line(OK, f"GPU {number}", f"{said}: Hopper kernels, tested")


def _driver() -> str:
    """The version of NVIDIA's driver; "" if there is none that works."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    words = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
