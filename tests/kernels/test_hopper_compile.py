# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The Hopper kernels compile for sm_90 on any machine, and the compiler keeps what makes them fast:
matrix products in flight together (ptxas serialises them, silently, when registers run short or it cannot
follow an accumulator), and registers that are not spilled to memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_mtraining.kernels.attention.backends import GLUON_VERSIONS

COMPILE = r'''
import json, os, re, subprocess, sys
import torch, triton
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Hopper())
found = {}

def compile_only(function, *arguments, grid, warmup=False, **options):
    kernel = launch(function, *arguments, grid=grid, warmup=True, **options)
    path = os.path.join(sys.argv[1], function.__name__ + ".cubin")
    with open(path, "wb") as file:
        file.write(kernel.asm["cubin"])
    binary = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    sass = subprocess.run([binary, "-sass", path], capture_output=True, text=True, check=True).stdout
    count = lambda pattern, text: len(re.findall(pattern, text))
    found[label + function.__name__] = dict(
        products=count(r" HGMMA", sass), waits=count("WARPGROUP.DEPBAR", sass),
        spills=max([count(r" STL", loop) for loop in inner_loops(sass)], default=0),
        shared=kernel.metadata.shared,
    )

def inner_loops(sass):
    """The walks over tiles: loops with matrix products that hold no other such loop. The walk over items,
    which is laid out in pieces and need not hold them as a whole, has few products for its length."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?);", sass)
    place = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA(?:\.U)? .*?0x([0-9a-f]+)", text)
        first = place.get(int(target[1], 16), i) if target else i
        if any(" HGMMA" in " " + line for _, line in lines[first:i]):
            loops.append((first, i))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    assert inner or " HGMMA" not in sass
    inner = ["\n".join(" " + text for _, text in lines[first:last]) for first, last in inner]
    share = [loop.count(" HGMMA") / len(loop.splitlines()) for loop in inner]
    return [loop for loop, of in zip(inner, share) if of > max(share, default=0) / 2]

launch, JITFunction.run = JITFunction.run, compile_only

from megatron_mtraining.documents import Documents
from megatron_mtraining.kernels import (
    hopper_backward_columns, hopper_backward_key, hopper_backward_query, hopper_forward,
)
from megatron_mtraining.pattern import build_block_index, build_index
from megatron_mtraining.ring import RingStep, rounds

hopper_backward_key.CHAIN = 8  # as if the sequences were long

for dim, columns, lists, packed in json.loads(sys.argv[2]):
    for inner, this in [(2, *rounds(1, 2, 1)), *((1, this) for this in rounds(1, 1, 2))]:
        step = RingStep(1, 1 - this.round_index, inner, 2 // inner)
        label = f"{dim} {columns} {lists} {packed} {inner} {this.round_index} "
        distances = torch.ones(1, 4, 8, dtype=torch.bool)
        picks = torch.arange(columns).expand(1, 4, -1)
        index = build_index(distances, picks, 1024, 128, 2, inner)
        if lists:
            blocks = torch.zeros(1, 4, 4, 8, dtype=torch.bool)
            index = build_block_index(blocks, distances, picks, 1024, 128, 2, inner, 1)
        if packed:
            index = replace(index, documents=Documents.from_lengths([300, 724], 1024))
        q = torch.zeros(512, 1, 4, dim, dtype=torch.bfloat16)
        keys = torch.zeros(inner, 2, 512, 1, 2, dim, dtype=torch.bfloat16).unbind(1)
        k, v = keys[0][0], keys[1][0]
        lse, carry = torch.zeros(1, 4, 512), torch.zeros(512, 1, 4, dim)
        result = q.clone() if this.last else carry
        before = None if this.first else carry
        gathered = torch.zeros(2, 1, 4, columns, dim, dtype=q.dtype) if columns else None
        hopper_forward.forward(q, *keys, gathered, index, this, 0.1, before, result, lse)
        hopper_backward_query.backward_query(
            q, *keys, gathered, q, lse, lse, index, this, 0.1, before, result, range(1, 3)
        )
        sums = None
        if columns:
            sums = hopper_backward_columns.backward_columns(q, gathered, q, lse, lse, index, 0, 0.1)
        moving = torch.zeros(2, *k.shape)
        hopper_backward_key.backward_key(
            q, k, v, q, lse, lse, index, step, 0.1, None if this.first else moving, sums, moving
        )
print(json.dumps(found))
'''


def test_products_stay_in_flight(tmp_path):
    triton = pytest.importorskip("triton")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not GLUON_VERSIONS[0] <= version <= GLUON_VERSIONS[1]:
        pytest.skip(f"the Hopper kernels do not run with Triton {triton.__version__}")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    cases = json.dumps(
        [
            [128, 64, False, False],
            [64, 0, False, False],
            [128, 64, True, False],
            [128, 64, True, True],
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path), cases],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
    found = json.loads(done.stdout.splitlines()[-1])
    kernels = {name: numbers for name, numbers in found.items() if numbers["products"]}
    # One round of two ranks, and two of one; columns have a key kernel of their own.
    assert len(kernels) == 3 * 4 + 3 * 3 + 3 * 4 + 3 * 4, sorted(found)
    for name, numbers in kernels.items():
        # A product of 64 x 128 x 128 is 8 instructions; serialised, each has a wait of its own.
        assert numbers["waits"] * 2 < numbers["products"], (name, numbers)
        # An address or two; operands would be dozens. What is needed once an item may be, outside.
        assert numbers["spills"] < 8, (name, numbers)
        assert numbers["shared"] <= 227 * 1024, (name, numbers)
