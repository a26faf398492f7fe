# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""megatron-core's GPTModel with everything kept: losses and gradients of dense attention."""

from pathlib import Path

import pytest

from tests.support import gpt_worker
from tests.support.ranks import run_script

WORKER = Path(gpt_worker.__file__)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The dense results, written by the run with one process."""
    file = tmp_path_factory.mktemp("gpt") / "dense.pt"
    return file, run_script(1, WORKER, file)


@pytest.mark.parametrize(
    "size",
    [
        1,
        2,
        pytest.param(3, marks=[pytest.mark.slow, pytest.mark.repeated]),
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.repeated]),
    ],
)
def test_losses_and_gradients_are_those_of_dense_attention(size, reference):
    file, first = reference
    run = first if size == 1 else run_script(size, WORKER, file)
    assert run.returncode == 0, run.stdout[-4000:]
    done = [line for line in run.stdout.splitlines() if line.startswith("ok: ")]
    assert len(done) == len(gpt_worker.CASES), run.stdout
