# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Launches: a compiled kernel is reused exactly where Triton would find the same one.

- on a fake kernel: what is looked up once and what again, the order of arguments, the bound on memory, the
  stream, and hooks of a profiler;
- on Triton's classes of compiled kernels and launchers: the direct call is the one that Triton makes;
- the switch to Triton's own launch, by the environment and by Triton's version;
- on a GPU: kernels get the arguments they are given.
"""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from megatron_mtraining.kernels.common import launch as module
from megatron_mtraining.kernels.common.direct_call import direct_call
from megatron_mtraining.kernels.common.launch import (
    Constants,
    ConstantsCache,
    launch,
    launches_directly,
)
from megatron_mtraining.kernels.common.triton_version import is_tested_triton

descriptors_module = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.descriptors")
line_descriptor = descriptors_module.line_descriptor

OPTIONS = dict(num_warps=4)


class Kernel:
    """As Triton's: called with a grid it looks up a compiled kernel, launches and returns it."""

    __name__ = "kernel"

    def __init__(self):
        names = ("x", "n", "WIDE", "BLOCK")
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in names]
        self.lookups, self.launched, self.streams, self.heard = 0, [], [], []

    def __getitem__(self, grid):
        def run(x, n, WIDE, BLOCK, **options):
            self.lookups += 1
            self.launched.append((grid, x, n, WIDE, BLOCK))
            return Compiled(self)

        return run


class Compiled:
    """As Triton's: called with a grid, or by ``run`` with what that call passes on."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def run(*arguments):
            self.kernel.heard.append(grid)
            self.kernel.launched.append((grid, *arguments))

        return run

    def run(self, x, y, z, *rest):
        stream, function, metadata, for_hooks, enter, leave, *arguments = rest
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert for_hooks is None and enter is None and leave is None
        self.kernel.streams.append(stream)
        self.kernel.launched.append(((x, y, z), *arguments))


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def fresh_switch():
    """``launches_directly`` looks at the environment and the version once: let it look again."""
    launches_directly.cache_clear()
    is_tested_triton.cache_clear()
    yield
    launches_directly.cache_clear()
    is_tested_triton.cache_clear()


@pytest.fixture
def kernel(monkeypatch, fresh_switch):
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "_LAUNCHES", {})
    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: f"stream of {device}"
    )
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.delenv("MTRAINING_TRITON_LAUNCH", raising=False)
    return Kernel()


def test_equal_specializations_are_looked_up_once(kernel):
    x, y = torch.zeros(64), torch.ones(64)
    launch(kernel, (3,), x=x, n=7, WIDE=True, BLOCK=32, **OPTIONS)
    launch(kernel, (5, 2), x=y, n=7, WIDE=True, BLOCK=32, **OPTIONS)
    assert kernel.lookups == 1
    assert kernel.launched[0][0] == (3,) and kernel.launched[1][0] == (5, 2, 1)
    assert kernel.launched[1][1] is y and kernel.launched[1][2:] == (7, True, 32)
    assert kernel.streams == ["stream of 0"]


def test_an_operand_may_be_left_out(kernel):
    """None in place of a tensor, in the first launch or in a later one."""
    x = torch.zeros(64)
    for first in (x, None):
        module._LAUNCHES.clear()
        kernel.lookups = 0
        for value in (first, None, x, None, x):
            launch(kernel, (1,), x=value, n=7, WIDE=True, BLOCK=32, **OPTIONS)
            assert kernel.launched[-1][1] is value
        assert kernel.lookups == 2


def test_orders_of_arguments_that_leave_out_other_operands_are_told_apart(kernel):
    """In the first order ``n`` is an operand, as it is None at first; in the second it is a number."""
    x = torch.zeros(64)
    launch(kernel, (1,), x=x, n=None, WIDE=True, BLOCK=32, **OPTIONS)
    launch(kernel, (1,), n=7, x=x, WIDE=True, BLOCK=32, **OPTIONS)
    launch(kernel, (1,), x=x, n=7, WIDE=True, BLOCK=32, **OPTIONS)
    launch(kernel, (1,), n=None, x=x, WIDE=True, BLOCK=32, **OPTIONS)
    assert [launched[2] for launched in kernel.launched] == [None, 7, 7, None]
    assert kernel.lookups == 4


def test_tensors_of_a_gpu_are_passed_by_address(kernel):
    """Triton takes both; of a tensor on the CPU it says so itself."""
    x = torch.zeros(64).as_subclass(OnGPU)
    for tensor in (x, x[4:], torch.zeros(64)):
        for _ in range(2):
            launch(kernel, (1,), x=tensor, n=7, WIDE=True, BLOCK=32, **OPTIONS)
    assert [given for _, given, *_ in kernel.launched[1:-1]] == [
        x.data_ptr(), x[4:].data_ptr(), x[4:].data_ptr(), kernel.launched[-1][1]
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_hear_of_launches(kernel, monkeypatch, name):
    """A hook gets what Triton makes for it: Triton makes the call."""
    arguments = dict(x=torch.zeros(64), n=7, WIDE=True, BLOCK=32, **OPTIONS)
    x = arguments["x"].as_subclass(OnGPU)
    launch(kernel, (2,), **arguments)
    hooks = getattr(knobs.runtime, name)
    hooks.add(print)
    try:
        launch(kernel, (3,), **dict(arguments, x=x))
    finally:
        hooks.remove(print)
    assert kernel.heard == [(3, 1, 1)] and kernel.launched[-1][1] is x
    monkeypatch.setattr(knobs.runtime, name, print)  # in place of the chain
    launch(kernel, (4,), **arguments)
    assert kernel.heard == [(3, 1, 1), (4, 1, 1)]
    monkeypatch.setattr(knobs.runtime, name, None)
    launch(kernel, (5,), **arguments)
    assert len(kernel.heard) == 2 and kernel.lookups == 1


def triton_launcher(monkeypatch, descriptors: int, **changes):
    """Triton's launcher of a kernel of ``x, descriptors, n, BLOCK``, and what the function in C is given."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    launched, encoded = [], []
    fill = partial(mock_encode, encoded)
    utils = SimpleNamespace(
        # A class, as it has no code that Python could look into: it stands for a function in C.
        launch=type("launch", (), {"__new__": lambda cls, *given: launched.append(given)}),
        fill_tma_descriptor=fill,
        fill_tma_descriptor_tiled=fill,
        build_signature_metadata=lambda signature: b"signature",
    )
    active = SimpleNamespace(
        utils=utils, get_current_device=lambda: 0, get_current_stream=lambda device: 5
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    descriptors_module._at.cache_clear()
    if hasattr(driver, "make_launcher"):  # Triton 3.6 compiles the function for each kernel
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **_: utils)
        monkeypatch.setattr(driver, "library_dirs", list)
    else:
        monkeypatch.setattr(driver, "PyKernelArg", SimpleNamespace, raising=False)
        for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
            monkeypatch.setattr(driver, name, name, raising=False)
    types = ["*fp32", *["tensordesc<fp32[1, 64]>"] * descriptors, "i32", "constexpr"]
    meta = dict(swizzle=0, elem_size=4, elem_type=7, block_size=[1, 64], fp4_padded=False)
    wants = dict(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False, num_warps=4, shared=0,
        tensordesc_meta=[dict(meta, swizzle=place) for place in range(descriptors)],
    )  # fmt: skip
    source = SimpleNamespace(
        constants={}, signature={f"p{at}": kind for at, kind in enumerate(types)}
    )
    metadata = SimpleNamespace(**wants | changes)
    run = driver.CudaLauncher(source, metadata)
    compiled = SimpleNamespace(run=run, function=2, packed_metadata=(4, 1, 0), metadata=metadata)
    return compiled, launched, encoded


def mock_encode(encoded: list, address: int, swizzle: int, *rest):
    encoded.append((address, swizzle))
    return f"map of {address}"


@pytest.mark.parametrize("descriptors", [0, 2])
def test_the_direct_call_is_tritons(monkeypatch, fresh_switch, descriptors):
    """The function in C gets from both what it gets from Triton's launcher."""
    compiled, launched, encoded = triton_launcher(monkeypatch, descriptors)
    lines = [torch.zeros(1, 2, 128) for _ in range(descriptors)]
    arguments = ["x", *[line_descriptor(each, 64) for each in lines], 7, 64]
    compiled.run(3, 2, 1, 5, 2, (4, 1, 0), None, None, None, *arguments)
    call = direct_call(compiled, arguments)
    with monkeypatch.context() as patch:  # not called again
        patch.setattr(type(compiled.run), "__call__", None)
        for _ in range(3):
            call((3, 2, 1), 5, [*arguments])
    theirs, *ours = launched
    assert len(ours) == 3
    for each in ours:
        assert [*map(listed, each)] == [*map(listed, theirs)]
    # Once by each: a descriptor keeps its encoding.
    expected = [(each.data_ptr(), place) for place, each in enumerate(lines)]
    assert sorted(encoded) == sorted(2 * expected)


def listed(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("change", ["global_scratch_size", "profile_scratch_size", "launcher"])
def test_other_launchers_are_called_themselves(monkeypatch, fresh_switch, change):
    """A kernel that wants memory, and a launcher of another kind."""
    changes = {} if change == "launcher" else {change: 64}
    compiled, launched, _ = triton_launcher(monkeypatch, 1, **changes)
    calls = []
    with monkeypatch.context() as patch:
        if change == "launcher":
            compiled.run.__class__ = type("OtherLauncher", (type(compiled.run),), {})
        patch.setattr(type(compiled.run), "__call__", lambda _, *given: calls.append(given))
        arguments = ["x", line_descriptor(torch.zeros(1, 2, 128), 64), 7, 64]
        direct_call(compiled, arguments)((3, 2, 1), 5, arguments)
    assert calls == [(3, 2, 1, 5, 2, (4, 1, 0), None, None, None, *arguments)]
    assert not launched


def test_the_call_without_hooks_is_tritons(kernel, monkeypatch):
    calls = []
    compiled = object.__new__(CompiledKernel)
    state = dict(
        module=1, function=2, packed_metadata=(4, 1, 0), name="kernel", src=None, metadata=None,
        _run=lambda *arguments: calls.append(arguments), hash="", metadata_group={},
    )  # fmt: skip
    vars(compiled).update(state)
    monkeypatch.setattr(triton.compiler.compiler, "driver", module.driver)
    direct_call(compiled, ["x", 7])((3, 2, 1), "stream of 0", ["x", 7])
    compiled[(3, 2, 1)]("x", 7)
    compiled.module = None  # nothing to unload
    ours, theirs = calls
    assert ours[:6] == theirs[:6] == (3, 2, 1, "stream of 0", 2, (4, 1, 0))
    assert ours[6:9] == (None, None, None) and ours[9:] == theirs[9:] == ("x", 7)
    assert theirs[7:9] == (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)


def test_other_specializations_are_looked_up(kernel):
    """Dtype, alignment, numbers, constants, options and their names."""
    x = torch.zeros(64)
    usual = dict(x=x, n=7, WIDE=True, BLOCK=32, num_warps=4)
    variants = [
        usual,
        dict(usual, x=x.half()),
        dict(usual, x=x[1:]),
        dict(usual, n=16),
        dict(usual, BLOCK=64),
        dict(usual, WIDE=False),
        dict(usual, num_warps=8),
        dict(x=x, n=7, WIDE=True, BLOCK=32, num_stages=4),
    ]
    for _ in range(2):
        for arguments in variants:
            launch(kernel, (1,), **arguments)
    assert kernel.lookups == len(variants)


def test_arguments_may_come_in_any_order(kernel):
    x = torch.zeros(64)
    launch(kernel, (1,), x=x, n=7, WIDE=True, BLOCK=32, **OPTIONS)
    launch(kernel, (1,), BLOCK=32, n=7, **OPTIONS, x=x, WIDE=True)
    assert kernel.lookups == 1 and kernel.launched[1][1:] == (x, 7, True, 32)


def test_constants_are_told_apart_by_the_object(kernel):
    """In launches in turns, too; and where a number comes by name in place of with the constants."""
    x = torch.zeros(64)
    some, others = (Constants(n=n, WIDE=True, BLOCK=32, **OPTIONS) for n in (7, 9))
    for _ in range(2):
        for constants in (some, others):
            launch(kernel, (1,), constants, x=x)
            assert kernel.launched[-1][1:] == (x, *constants.values[:3])
    launch(kernel, (1,), some, x=x[1:])
    assert kernel.lookups == 3
    launch(kernel, (1,), Constants(WIDE=True, BLOCK=32), x=x, n=8, **OPTIONS)
    launch(kernel, (1,), x=x, **dict(some.arguments, n=8))
    assert kernel.lookups == 5 and kernel.launched[-1][2] == 8
    with pytest.raises(TypeError, match="missing arguments: WIDE, BLOCK"):
        launch(kernel, (1,), Constants(n=7), x=x)


def test_constants_are_made_once(monkeypatch):
    monkeypatch.setattr(module, "_MAX_CACHED", 3)
    cache, made = ConstantsCache(), []

    def make():
        made.append(n)
        return dict(n=n)

    for n in (1, 1, 2, 1, 3, 4):
        assert cache.get((n,), make).arguments == dict(n=n)
        assert len(cache._found) <= 3
    assert made == [1, 2, 3, 4]


def test_a_missing_argument_is_named(kernel):
    with pytest.raises(TypeError, match="missing arguments: n, BLOCK"):
        launch(kernel, (1,), x=torch.zeros(64), WIDE=True)


def test_constants_before_other_parameters_are_refused(kernel):
    kernel.params.reverse()
    with pytest.raises(TypeError, match="constexpr parameters must come after"):
        launch(kernel, (1,), x=torch.zeros(64), n=7, WIDE=True, BLOCK=32)


def test_remembered_launches_are_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MAX_CACHED", 3)
    for n in range(10):
        launch(kernel, (1,), x=torch.zeros(64), n=n, WIDE=True, BLOCK=32, **OPTIONS)
        assert len(module._LAUNCHES[id(kernel)].last.found) <= 3
    for n in range(10):
        launch(kernel, (1,), Constants(n=n, WIDE=True, BLOCK=32), x=torch.zeros(64), **OPTIONS)
        assert len(module._LAUNCHES[id(kernel)]._orders) <= 3


def launched_twice(kernel) -> int:
    """How often Triton looked the kernel up in two equal launches."""
    for _ in range(2):
        launch(kernel, (1,), x=torch.zeros(64), n=7, WIDE=True, BLOCK=32, **OPTIONS)
    return kernel.lookups


def test_the_environment_switches_to_tritons_launch(kernel, monkeypatch):
    monkeypatch.setenv("MTRAINING_TRITON_LAUNCH", "1")
    assert launched_twice(kernel) == 2


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.9.0+git", "3.10.0", "4.0.0"])
def test_untested_triton_versions_launch_themselves(kernel, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    if version.startswith(("3.6", "3.9")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert launched_twice(kernel) == 1
    else:
        with pytest.warns(
            UserWarning, match=f"Triton {version} is not tested.*3.6 to 3.9"
        ) as caught:
            assert launched_twice(kernel) == 2
        assert len(caught) == 1


@triton.jit
def _shift_kernel(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + by, mask=at < n)


@pytest.mark.gpu
def test_kernels_get_their_arguments():
    x = torch.randn(1000, device="cuda")
    for offset in (0, 1, 0, 4, 1):  # aligned and not
        for n in (900, 512, 900):
            y = torch.zeros_like(x)
            arguments = dict(x_ptr=x[offset:], y_ptr=y, n=n, by=2.5, BLOCK=128)
            launch(_shift_kernel, (8,), **arguments, num_warps=4)
            assert torch.equal(y[:n], x[offset : offset + n] + 2.5) and not y[n:].any()
