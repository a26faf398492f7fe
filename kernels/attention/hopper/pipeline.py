# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Shared memory and mbarriers between warps that load tiles and warpgroups that compute with them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import SharedMemory, aggregate


@aggregate
class Barriers:
    """mbarriers used in turn: tile n has barrier ``n % STAGES``, in its phase ``n // STAGES``."""

    mbarriers: SharedMemory  # [STAGES, 1]
    STAGES: gl.constexpr

    @gluon.jit
    def of(self, n):
        return self.mbarriers.index(n % self.STAGES)

    @gluon.jit
    def phase(self, n):
        return (n // self.STAGES) & 1

    @gluon.jit
    def wait(self, n, pred=True):
        """Wait for the phase of tile n to complete."""
        mbarrier.wait(self.of(n), self.phase(n), pred=pred)

    @gluon.jit
    def wait_previous(self, n):
        """Wait for the phase of tile ``n - STAGES`` to complete. The first STAGES tiles need not wait."""
        mbarrier.wait(self.of(n), self.phase(n) ^ 1)

    @gluon.jit
    def arrive(self, n, pred=True):
        mbarrier.arrive(self.of(n), count=1, pred=pred)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr):
    """Barriers in shared memory, to be initialized with the number of arrivals that completes a phase."""
    mbarriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Barriers(mbarriers, STAGES)


@aggregate
class TilePipeline:
    """Matrices that one warp loads and the computing warpgroups read, STAGES at a time. Tiles are numbered
    over a program's whole life."""

    buffers: SharedMemory  # [STAGES, 1, 1, ROWS, D]
    full: Barriers  # the tile has landed
    empty: Barriers  # all warpgroups have released it
    ROWS: gl.constexpr
    D: gl.constexpr

    @gluon.jit
    def slot(self, n):
        """Which of the buffers tile n is in."""
        return n % self.full.STAGES

    @gluon.jit
    def tile(self, slot):
        """The tile in a buffer: [ROWS, D]."""
        return self.buffers.index(slot).reshape([self.ROWS, self.D])

    @gluon.jit
    def wait_full(self, n, pred=True):
        self.full.wait(n, pred)

    @gluon.jit
    def wait_empty(self, n):
        self.empty.wait_previous(n)

    @gluon.jit
    def release(self, n, pred=True):
        self.empty.arrive(n, pred)
