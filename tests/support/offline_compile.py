# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Compiles attention kernels without a GPU, and prints what the compiler made of them.

Run as a process of its own, since it replaces Triton's driver and launch::

    python -m tests.support.offline_compile hopper FOLDER '{"head_dim": 128, "columns": 64, ...}'
    python -m tests.support.offline_compile portable 80 '{"head_dim": 128, "columns": 64, ...}'

Prints one JSON object: for each compiled kernel, by a label, the fields of :class:`Compiled` for the Hopper
kernels (sm_90), and those of them that need no machine code for the portable ones (for the compute capability
given).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .loop_numbers import lost_numbers

KERNELS = {"_forward_kernel", "_query_kernel", "_key_kernel", "_column_kernel"}
HEADS, KV_HEADS, BLOCK, LENGTH = 4, 2, 128, 1024


@dataclass(frozen=True)
class Compiled:
    """What a kernel's machine code (SASS) has.

    Attributes:
        products: instructions of matrix products.
        waits: waits for matrix products.
        spills: most stores of registers to memory in one loop over tiles.
        shared: bytes of shared memory.
        lost: numbers of loops that some versions of Triton lose, see :mod:`.loop_numbers`.
    """

    products: int
    waits: int
    spills: int
    shared: int
    lost: list[str]


class OfflineDriver:
    """What Triton asks of the driver to compile for a GPU of a compute capability."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def hopper(folder: str, case: dict) -> None:
    from megatron_mtraining.kernels.attention.hopper import backend, backward_key, item_arguments

    if case.pop("chunks", False):
        backward_key.CHUNK = 2
    item_arguments.TILE_BYTES = case.pop("tile_bytes", item_arguments.TILE_BYTES)
    only, rounds = case.pop("only", None), case.pop("rounds", None)

    def describe(kernel):
        sass = disassemble(kernel.asm["cubin"], os.path.join(folder, "kernel.cubin"))
        return asdict(measure(sass, kernel.metadata.shared, lost_numbers(kernel.asm["source"])))

    print(json.dumps(compile_all(90, backend, describe, case, only=only, labels=rounds)))


def portable(capability: str, case: dict) -> None:
    from megatron_mtraining.kernels.attention.portable import backend
    from megatron_mtraining.kernels.common import tiles

    if capability == "90":
        tiles._SMALL = tiles._HOPPER  # tensors on the CPU take the small tiles

    def describe(kernel):
        return dict(shared=kernel.metadata.shared, lost=lost_numbers(kernel.asm["source"]))

    # The first round of several ranks has every loop over tiles.
    print(json.dumps(compile_all(int(capability), backend, describe, case, inner_sizes=(2,))))


def compile_all(
    capability: int,
    backend,
    describe,
    case: dict,
    inner_sizes=(2, 1),
    only: str | None = None,
    labels: Sequence[str] | None = None,
) -> dict:
    """``describe(kernel)`` of the kernels, or of one of them, of one round of two ranks, and of two rounds of
    one rank, or of those of these rounds with ``labels``."""
    from megatron_mtraining.kernels.attention import launch_args
    from megatron_mtraining.kernels.attention.portable import segments
    from megatron_mtraining.ring import rounds

    # As if the sequences were long.
    launch_args.CHAIN = 8
    segments.SEGMENT_BLOCKS = 2
    compiled = {}
    driver.set_active(OfflineDriver(capability))
    launch = JITFunction.run

    def compile_only(function, *arguments, grid, warmup=False, **options):
        if only is not None and function.__name__ != f"_{only}_kernel":
            return
        kernel = launch(function, *arguments, grid=grid, warmup=True, **options)
        if function.__name__ in KERNELS:
            name = function.__name__.strip("_").removesuffix("_kernel")
            name = f"{label}-{name}"
            compiled[f"{name}-2" if name in compiled else name] = describe(kernel)

    JITFunction.run = compile_only
    for inner in inner_sizes:
        for round_ in rounds(1, inner, 2 // inner):
            label = f"inner{inner}-round{round_.round_index}"
            if labels is None or label in labels:
                launch_all(backend, inner, round_, **case)
    return compiled


def launch_all(
    backend,
    inner,
    round_,
    *,
    head_dim,
    columns,
    block_lists,
    packed,
    pruned=False,
    one_pass=False,
    dtype="bfloat16",
) -> None:
    """Launch the four kernels as rank 1 of 2 does in a round: with a pruned backward, the forward marks
    blocks, and the gradient of queries sums what it attends to."""
    from megatron_mtraining.kernels.attention import (
        BackwardInputs,
        ForwardInputs,
        RoundKeys,
        StepKeys,
        new_marks,
    )
    from megatron_mtraining.pattern import build_block_index, build_index
    from megatron_mtraining.ring import RingStep
    from megatron_mtraining.visibility import VisibleRanges

    blocks = LENGTH // BLOCK
    distances = torch.ones(1, HEADS, blocks, dtype=torch.bool)
    positions = torch.arange(columns).expand(1, HEADS, -1)
    if block_lists:
        own_blocks = torch.zeros(1, HEADS, blocks // 2, blocks, dtype=torch.bool)
        index = build_block_index(own_blocks, distances, positions, LENGTH, BLOCK, 2, inner, 1)
    else:
        index = build_index(distances, positions, LENGTH, BLOCK, 2, inner)
    if packed:
        index = replace(index, visible=VisibleRanges.from_lengths([300, LENGTH - 300], LENGTH))

    marks = new_marks((1, HEADS, blocks // 2, blocks), torch.ones(1)) if pruned else None
    local = LENGTH // 2
    query = torch.zeros(local, 1, HEADS, head_dim, dtype=getattr(torch, dtype))
    kv = torch.zeros(inner, 2, local, 1, KV_HEADS, head_dim, dtype=query.dtype)
    lse = torch.zeros(1, HEADS, local)
    accumulator = torch.zeros(query.shape)
    result = query.clone() if round_.last else accumulator
    column_kv = torch.zeros(2, 1, HEADS, columns, head_dim, dtype=query.dtype) if columns else None
    keys = RoundKeys(*kv.unbind(1), column_kv, round_)
    before = None if round_.first else accumulator
    sums = torch.zeros(HEADS, local // 64 * 2 * head_dim, 32) if one_pass else None
    seen = torch.zeros_like(lse) if pruned else None
    backend.forward(ForwardInputs(query, keys, index, 0.1, lse, before, marks), result)
    inputs = BackwardInputs(query, query, lse, lse, index, 0.1, seen, sums)
    backend.backward_query(inputs, keys, result, before, range(1, 3))
    column_gradients = backend.backward_columns(inputs, column_kv, 0) if columns else None
    grad_kv = torch.zeros(2, *kv[0, 0].shape)
    ring_step = RingStep(1, 1 - round_.round_index, inner, 2 // inner)
    backend.backward_key(
        inputs,
        StepKeys(*kv[0], ring_step),
        grad_kv,
        None if round_.first else grad_kv,
        column_gradients,
    )


def disassemble(cubin: bytes, path: str) -> str:
    with open(path, "wb") as file:
        file.write(cubin)
    binaries = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    command = [os.path.join(binaries, "cuobjdump"), "-sass", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure(sass: str, shared: int, lost: list[str]) -> Compiled:
    return Compiled(
        products=len(re.findall(r" HGMMA", sass)),
        waits=len(re.findall("WARPGROUP.DEPBAR", sass)),
        spills=max([len(re.findall(r" STL", loop)) for loop in tile_loops(sass)], default=0),
        shared=shared,
        lost=lost,
    )


def tile_loops(sass: str) -> list[str]:
    """The loops over tiles: loops with matrix products that hold no other such loop. The loop over work items
    is laid out in pieces, need not hold them as a whole, and has few products for its length."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?);", sass)
    line_of = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for last, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA(?:\.U)? .*?0x([0-9a-f]+)", text)
        first = line_of.get(int(target[1], 16), last) if target else last
        if any(" HGMMA" in " " + line for _, line in lines[first:last]):
            loops.append((first, last))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    assert inner or " HGMMA" not in sass
    texts = ["\n".join(" " + text for _, text in lines[first:last]) for first, last in inner]
    shares = [text.count(" HGMMA") / len(text.splitlines()) for text in texts]
    return [text for text, share in zip(texts, shares) if share > max(shares) / 2]


if __name__ == "__main__":
    {"hopper": hopper, "portable": portable}[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]))
