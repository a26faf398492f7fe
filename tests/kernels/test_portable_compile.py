# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The portable kernels compile for the GPUs they are for, on any machine, their shared memory fits, and no
loop has a number that some versions of Triton lose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Bytes that a program can have, by compute capability: H100, A100, and GPUs such as the A6000 and L40.
SHARED_MEMORY = {90: 227 * 1024, 80: 163 * 1024, 86: 99 * 1024}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "capability"),
    [(128, 86), (128, 90), (128, 80), (64, 86), (256, 90), (256, 80), (256, 86)],
)
def test_shared_memory_fits(tmp_path, head_dim, capability):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    # Lists, documents and marks take most.
    case = dict(head_dim=head_dim, columns=64, block_lists=True, packed=True, pruned=True)
    arguments = ["portable", str(capability), json.dumps(case)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.offline_compile", *arguments],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[:6000]
    kernels = json.loads(run.stdout.splitlines()[-1])
    assert len(kernels) == 4
    for name, kernel in kernels.items():
        assert kernel["shared"] <= SHARED_MEMORY[capability], (name, kernel)
        assert not kernel["lost"], (name, kernel)
