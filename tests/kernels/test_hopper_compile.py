# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The Hopper kernels compile for sm_90 on any machine, and the compiler keeps what makes them fast.

- matrix products stay in flight together: ptxas serialises them, silently, when registers run short or it
  cannot follow an accumulator
- registers are not spilled to memory in the loops over tiles
- shared memory fits
- no loop has a number that some versions of Triton lose
- descriptors: the shortcut past Triton's checks makes what Triton makes, and can be switched off; one is used
  again for the same memory alone
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from megatron_mtraining.kernels.attention.backends import GLUON_VERSIONS

ROUNDS = ("inner2-round0", "inner1-round0", "inner1-round1")
GATHERED, FIRST, LAST = ROUNDS
"""Keys of two ranks at once; the first round of a plain ring, and one that goes on with its sums."""
SHARED_MEMORY = 227 * 1024  # bytes of a Hopper multiprocessor that a program can have
# Packed documents take more registers and memory: what is compiled with them is not repeated without.
CASES = {
    "D128-C64-lists-pruned-packed": dict(
        rounds=[LAST], head_dim=128, columns=64, block_lists=True, packed=True, pruned=True
    ),
    "D256-C64-pruned-packed": dict(
        rounds=[FIRST, LAST], head_dim=256, columns=64, packed=True, pruned=True
    ),
    "D256-C64-lists": dict(rounds=[GATHERED], head_dim=256, columns=64, block_lists=True),
    "D128-C64-tiles": dict(
        rounds=[FIRST], head_dim=128, columns=64, packed=True, pruned=True, tile_bytes=16 * 1024
    ),
    "D64-C0-slashes": dict(rounds=[LAST], head_dim=64, columns=0),
    "D128-C64-slashes": dict(rounds=[FIRST], head_dim=128, columns=64),
    "D64-C0-lists-pruned": dict(
        rounds=[GATHERED], head_dim=64, columns=0, block_lists=True, pruned=True
    ),
    "D128-C64-pruned-packed": dict(
        rounds=[LAST], head_dim=128, columns=64, packed=True, pruned=True
    ),
    "D128-C64-one_pass-lists-packed": dict(
        rounds=[GATHERED], head_dim=128, columns=64, block_lists=True, packed=True, one_pass=True
    ),
    "D128-C64-one_pass-chunks": dict(
        rounds=ROUNDS, head_dim=128, columns=64, one_pass=True, chunks=True, only="key"
    ),
    "D64-C64-one_pass-float16": dict(
        rounds=[GATHERED], head_dim=64, columns=64, block_lists=True, one_pass=True,
        dtype="float16",
    ),
    "D64-C64-one_pass-packed": dict(
        rounds=[LAST], head_dim=64, columns=64, packed=True, one_pass=True
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tested_triton():
    triton = pytest.importorskip("triton")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not GLUON_VERSIONS[0] <= version <= GLUON_VERSIONS[1]:
        pytest.skip(f"the Hopper kernels do not run with Triton {triton.__version__}")


def compile_kernels(folder: Path, case: dict) -> dict[str, dict]:
    """What ``tests.support.offline_compile`` prints for a case."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    case = dict(block_lists=False, packed=False) | case
    arguments = ["hopper", str(folder), json.dumps(case)]
    command = [sys.executable, "-m", "tests.support.offline_compile", *arguments]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[:6000]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_stay_in_flight(tmp_path, case):
    kernels = compile_kernels(tmp_path, case)
    names = (
        ("forward", "query", "key", "column") if case["columns"] else ("forward", "query", "key")
    )
    names = names if "only" not in case else (case["only"],)
    # Chunks are launched twice, as are the keys' gradients with heads of more than 128.
    found = {name.removesuffix("-2") for name in kernels}
    assert found == {f"{round_}-{name}" for round_ in case["rounds"] for name in names}
    assert (len(found) < len(kernels)) == (case.get("chunks", False) or case["head_dim"] > 128)
    for name, kernel in kernels.items():
        # A product of 64 x 128 x 128 is 8 instructions; serialised, each has a wait of its own.
        assert kernel["products"] > 0, (name, kernel)
        assert kernel["waits"] * 2 < kernel["products"], (name, kernel)
        # An address or two; operands would be dozens. What is needed once an item may be, outside. With heads
        # of 256 the masks of the tiles that have one do not fit.
        assert kernel["spills"] < (8 if case["head_dim"] <= 128 else 24), (name, kernel)
        assert kernel["shared"] <= SHARED_MEMORY, (name, kernel)
        assert not kernel["lost"], (name, kernel)


def test_descriptor_shortcut(monkeypatch):
    """With and without ``MTRAINING_TRITON_LAUNCH=1`` a descriptor is the same."""
    descriptors = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.descriptors")
    from megatron_mtraining.kernels.common.launch import launches_directly

    def describe():
        launches_directly.cache_clear()
        return [
            descriptors.descriptor(query, [1, 1, 64, 128]),
            descriptors.descriptor(query, (1, 1, 64, 128), 64),
            descriptors.gathered_descriptor(keys, [1, 1, 128, 128]),
            descriptors.gathered_descriptor(one_rank, [1, 1, 128, 128]),
            descriptors.descriptor_heads_first(columns, [1, 1, 64, 128]),
            descriptors.line_descriptor(lse, 64),
            descriptors.sums_descriptor(sums, 128),
        ]

    query = torch.zeros(256, 2, 4, 128, dtype=torch.bfloat16)
    keys = torch.zeros(2, 2, 256, 2, 4, 128, dtype=torch.bfloat16).unbind(1)[0]
    one_rank, columns = keys[1:], torch.zeros(2, 4, 96, 128, dtype=torch.bfloat16)
    lse, sums = torch.zeros(2, 4, 256), torch.zeros(8, 512, 32)
    heads_first = ([2, 4, 256, 128], [512, 128, 1024, 1])
    expected = [
        heads_first,
        heads_first,
        ([2, 4, 3 * 256, 128], [512, 128, 1024, 1]),
        heads_first,
        ([2, 4, 96, 128], [4 * 96 * 128, 96 * 128, 128, 1]),
        ([8, 256], [256, 1]),
        ([8, 512, 32], [512 * 32, 32, 1]),
    ]
    try:
        monkeypatch.delenv("MTRAINING_TRITON_LAUNCH", raising=False)
        describe()
        copies = describe()
        monkeypatch.setenv("MTRAINING_TRITON_LAUNCH", "1")
        checked = describe()
    finally:
        launches_directly.cache_clear()
    for copy, other, views in zip(copies, checked, expected, strict=True):
        assert type(copy) is type(other) and vars(copy).keys() >= vars(other).keys()
        assert copy.base.data_ptr() == other.base.data_ptr()
        assert copy.base.dtype == other.base.dtype and (copy.shape, copy.strides) == views
        for name in ("shape", "strides", "block_shape", "layout"):
            assert getattr(copy, name) == getattr(other, name)
    for cached in (descriptors._checked_state, descriptors._at):
        assert cached.cache_parameters()["maxsize"] is not None
    # Outside the tested versions of Triton, and with the switch, Triton checks every descriptor.
    misaligned = torch.zeros(256 * 8 + 1, dtype=torch.bfloat16)[1:].view(256, 1, 1, 8)
    with pytest.raises(AssertionError):
        descriptors.descriptor(misaligned, [1, 1, 64, 8])


def test_descriptors_of_equal_memory_are_one(monkeypatch):
    """A descriptor, and what it is encoded as, is used again for the same address, shape, strides, dtype and
    tile alone. It does not keep the memory."""
    descriptors = pytest.importorskip("megatron_mtraining.kernels.attention.hopper.descriptors")
    from megatron_mtraining.kernels.common.launch import launches_directly

    monkeypatch.delenv("MTRAINING_TRITON_LAUNCH", raising=False)
    launches_directly.cache_clear()
    memory = torch.zeros(2 * 256 * 4 * 128, dtype=torch.bfloat16)
    query = memory.view(512, 1, 4, 128)[:256]
    tile = [1, 1, 64, 128]
    first = descriptors.descriptor(query, tile)
    assert descriptors.descriptor(memory.view(512, 1, 4, 128)[:256], tuple(tile)) is first
    others = [
        descriptors.descriptor(memory.view(512, 1, 4, 128)[256:], tile),  # address
        descriptors.descriptor(memory.view(512, 1, 4, 128)[:128], tile),  # length
        descriptors.descriptor(memory.view(256, 1, 8, 128)[:, :, :4], tile),  # strides
        descriptors.descriptor(query.view(torch.float16), tile),
        descriptors.descriptor(query, [1, 1, 128, 128]),
        descriptors.descriptor(query, tile, 64),
        descriptors.descriptor_heads_first(query, tile),
    ]
    assert len({id(each) for each in (first, *others)}) == len(others) + 1
    held = weakref.ref(query)
    del query
    assert held() is None
