# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which backend attention takes: by device, environment, GPU, operands and Triton's version."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_mtraining.kernels.attention import backends, reference

pytest.importorskip("triton")
from megatron_mtraining.kernels.attention.portable import backend as portable

OPERATIONS = ("forward", "backward_query", "backward_columns", "backward_key")
INDEX = SimpleNamespace(block_size=128)


def gpu_tensor(shape=(1024, 1, 4, 64), stride=None, dtype=torch.bfloat16, address=4096):
    """As much of a tensor on a GPU as the choice of a backend looks at."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    return SimpleNamespace(
        is_cuda=True,
        device=torch.device("cuda", 0),
        shape=like.shape,
        element_size=like.element_size,
        stride=lambda dim=None: (stride or like.stride())[slice(None) if dim is None else dim],
        data_ptr=lambda: address,
    )


@pytest.fixture
def hopper_gpu(monkeypatch):
    """A Hopper GPU and a Triton version that the Hopper kernels are tested with."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.delenv("MTRAINING_PORTABLE_KERNELS", raising=False)
    for cached in (backends._is_hopper, backends.is_tested_triton):
        cached.cache_clear()
    yield
    for cached in (backends._is_hopper, backends.is_tested_triton):
        cached.cache_clear()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["reference", "portable.{}", "hopper.{}"])
def test_backends_have_the_signatures_of_the_protocol(name, operation):
    """Read in the source: the Hopper kernels cannot be imported with every Triton."""
    folder = Path(backends.__file__).parent
    protocol = definition(folder / "backends.py", operation)
    assert protocol.args.args.pop(0).arg == "self"
    backend = definition(folder / (name.format(operation).replace(".", "/") + ".py"), operation)
    assert ast.dump(backend.args) == ast.dump(protocol.args)
    assert ast.dump(backend.returns) == ast.dump(protocol.returns)


def definition(file: Path, name: str) -> ast.FunctionDef:
    """The one function or method of this name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def test_cpu_tensors_take_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backends.backend_for(INDEX, torch.empty(128, 1, 4, 64)) is reference


def test_interpreted_cpu_tensors_take_the_portable_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.backend_for(INDEX, torch.empty(128, 1, 4, 64)) is portable


def test_hopper_gpus_take_the_hopper_kernels(hopper_gpu):
    hopper = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.backend")
    gathered_keys = gpu_tensor((2, 1024, 1, 2, 64))
    assert backends.backend_for(INDEX, gpu_tensor(), gathered_keys, gathered_keys) is hopper


@pytest.mark.parametrize(
    ("query", "key"),
    [
        (gpu_tensor(dtype=torch.float32), gpu_tensor()),
        (gpu_tensor((1022, 1, 4, 64)), gpu_tensor()),
        (gpu_tensor(), gpu_tensor(stride=(260, 260, 65, 1))),
        (gpu_tensor(), gpu_tensor(address=4104)),
    ],
    ids=["float32", "length", "strides", "address"],
)
def test_operands_that_tma_cannot_address_take_the_portable_kernels(hopper_gpu, query, key):
    assert backends.backend_for(INDEX, query, key) is portable


def test_each_operand_is_looked_at_again(hopper_gpu):
    """Strides are checked once: another address, or other strides of the same shape, are not forgotten."""
    hopper = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.backend")
    backends._strides_fit.cache_clear()
    assert backends._strides_fit.cache_parameters()["maxsize"] is not None
    for _ in range(2):
        for operand, expected in [
            (gpu_tensor(), hopper),
            (gpu_tensor(address=4104), portable),
            (gpu_tensor(stride=(260, 260, 65, 1)), portable),
            (gpu_tensor(stride=(512, 512, 128, 2)), portable),
            (gpu_tensor(stride=(512, 0, 128, 1)), portable),  # expanded
            (gpu_tensor(), hopper),
        ]:
            assert backends.backend_for(INDEX, operand) is expected
    assert backends._strides_fit.cache_info().misses == 4


def test_small_blocks_take_the_portable_kernels(hopper_gpu):
    assert backends.backend_for(SimpleNamespace(block_size=64), gpu_tensor()) is portable


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_one_pass_is_for_heads_of_up_to_128(hopper_gpu, monkeypatch, head_dim):
    monkeypatch.setenv("MTRAINING_BACKWARD", "one_pass")
    index, query = (
        SimpleNamespace(block_size=128, is_dense=True),
        gpu_tensor((1024, 1, 4, head_dim)),
    )
    path = backends.choose_backward(index, query, query).value
    assert path == ("one_pass" if head_dim <= 128 else "two_kernels")


def test_other_gpus_take_the_portable_kernels(hopper_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert backends.backend_for(INDEX, gpu_tensor()) is portable


def test_the_environment_disables_the_hopper_kernels(hopper_gpu, monkeypatch):
    monkeypatch.setenv("MTRAINING_PORTABLE_KERNELS", "1")
    assert backends.backend_for(INDEX, gpu_tensor()) is portable


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0"])
def test_untested_triton_versions_take_the_portable_kernels(hopper_gpu, monkeypatch, version):
    monkeypatch.setattr("triton.__version__", version)
    with pytest.warns(UserWarning, match=f"Triton {version} is not tested.*portable kernels"):
        assert backends.backend_for(INDEX, gpu_tensor()) is portable
