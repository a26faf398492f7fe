# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings of the whole suite: GPU tests are skipped, saying so, where there is no GPU."""

import os

# Before torch starts its threads: several test processes share the cores of the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
import io
import pkgutil
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def import_kernels_interpreted() -> None:
    """Import the kernels' modules under Triton's interpreter, which is chosen as they are imported.

    Else the tests that interpret them pass or fail by what was imported before. The variable does
    not stay set: CPU tensors take the PyTorch references again, except in those tests.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        package = importlib.import_module("megatron_mtraining.kernels")
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def patch_language_once_a_launch() -> None:
    """Have Triton's interpreter put its functions into ``triton.language`` once for each launch.

    It does so again in each call of a device function, with nothing left to do: a third of a kernel's time.
    """
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton, which goes its own way
    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    restore, patched = scope.restore, set()

    def patch_once(function):
        names = function.__globals__.values()
        seen = {each for each in (language, language.core) if any(each is one for one in names)}
        if seen and seen <= patched:
            return scope()
        patched.update(seen)
        return patch(function)

    def restore_all(self):
        patched.clear()
        restore(self)

    interpreter._patch_lang, scope.restore = patch_once, restore_all


if not torch.cuda.is_available():
    import_kernels_interpreted()
    patch_language_once_a_launch()


SHORT = dict(world="cp", inner="I", dim="D", head_dim="D", seq_length="N", length="N", block="B")
"""Parameters that ids name by a letter, as the cases of kernels do: ``N512-cp4-I2-H2-KV1-D64-few-B64``."""


def pytest_make_parametrize_id(config, val, argname):
    """Ids that say what a case is where pytest would number it (``words0``, ``2-1-1``)."""
    found = _case_name(val, argname)
    return found and found.encode("unicode_escape").decode()[:60]


def _case_name(val, argname: str) -> str | None:
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, bool):
        return argname if val else f"no {argname}"
    if isinstance(val, (int, float)):
        return f"{SHORT[argname]}{val}" if argname in SHORT else f"{argname}={val}"
    if argname == "heads" and isinstance(val, tuple):
        return "H{}-KV{}".format(*val)
    if isinstance(val, dict) and val:
        return ",".join(f"{key}={value}" for key, value in val.items())
    if (
        isinstance(val, (list, tuple))
        and val
        and all(isinstance(v, (str, int, float)) for v in val)
    ):
        return " ".join(map(str, val))
    return getattr(val, "name", None) if isinstance(getattr(val, "name", None), str) else None


@pytest.fixture
def fresh_inputs():
    """Different inputs in every run; pytest shows the seed of a failure."""
    print("torch seed", torch.seed())


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter: the kernels run on CPU tensors, as they were imported for it above."""
    if torch.cuda.is_available():
        pytest.skip("the kernels run compiled here: see the GPU tests")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def triton_device(request, monkeypatch):
    """Where the Triton kernels run: on the GPU, or interpreted on the CPU where there is none."""
    if request.param == "compiled":
        return "cuda"
    if torch.cuda.is_available():
        pytest.skip("the kernels run compiled here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"


@pytest.fixture
def backward_path(request, monkeypatch):
    """The way of the backward that a test's cases name, one of ``attention_cases.BACKWARD_PATHS``."""
    from tests.support.attention_cases import BACKWARD_PATHS

    how = BACKWARD_PATHS[request.param]
    if how is not None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("only the Hopper kernels have a choice")
        key = "megatron_mtraining.kernels.attention.hopper.backward_key"
        monkeypatch.setattr(f"{key}.CHUNK", how[0])
        monkeypatch.setattr(f"{key}.ONE_LAUNCH", how[1])
    monkeypatch.setenv("MTRAINING_BACKWARD", "two_kernels" if how is None else "one_pass")
    return request.param


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_report_header(config):
    from importlib.metadata import PackageNotFoundError, version

    def of(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        f"torch {torch.__version__}, megatron-core {of('megatron-core')}, "
        f"triton {of('triton')}, transformer-engine {of('transformer-engine')}, {gpus} GPUs"
    )


@pytest.fixture
def cpu_device(monkeypatch):
    """megatron-core moves rotary tables to the current CUDA device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are made, and their files are there, but nothing is rendered, which takes seconds a page.

    For tests that do not look at pictures. Each command has one that does.
    """
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib")

    def save(self, file, **_):
        if isinstance(file, io.BytesIO):
            file.write(b"<svg></svg>")
        elif isinstance(file, io.StringIO):
            file.write("<svg></svg>")
        else:
            Path(file).write_text("<svg></svg>", encoding="utf-8")

    monkeypatch.setattr(figure.Figure, "savefig", save)


class Group:
    """As much of a process group as layout code asks for."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture
def group():
    return Group


def checkout_paths() -> list[Path]:
    """The Megatron-LM checkouts to test with: MEGATRON_LM_PATH, one or several."""
    given = os.environ.get("MEGATRON_LM_PATH", "")
    return [Path(part).resolve() for part in given.split(os.pathsep) if part]


def pytest_generate_tests(metafunc):
    """Tests that take ``checkout`` run once for each, or are skipped, saying what is missing."""
    if "checkout" in metafunc.fixturenames:
        paths = checkout_paths()
        missing = pytest.mark.skip(reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
        values = paths or [pytest.param(None, marks=missing)]
        names = [path.name for path in paths] or ["no-checkout"]
        metafunc.parametrize("checkout", values, ids=names, scope="session")


@pytest.fixture(scope="session")
def tree(checkout, tmp_path_factory):
    """A ``tests.support.pretrain_tree.Tree`` of a Megatron-LM checkout."""
    from tests.support.pretrain_tree import Tree

    if find_spec("pybind11") is None or not shutil.which("make"):
        pytest.skip("Megatron-LM's data sets need pybind11, make and a C++ compiler")
    return Tree(checkout, tmp_path_factory.mktemp("trees"))
