# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""GPTModel in Megatron's schedules: attention runs once, losses and gradients are those of the
opt-out bit for bit."""

from pathlib import Path

import pytest

from tests.support import recompute_worker
from tests.support.ranks import run_script

WORKER = Path(recompute_worker.__file__)
RUNS = {
    # processes, pipeline stages, chunks of a stage
    "1 process": (1, 1, 1),
    "CP 2": (2, 1, 1),
    "1F1B": (2, 2, 1),
    "interleaved": (2, 2, 2),
    "CP 2, interleaved": (4, 2, 2),
}


SLOW = ("CP 2", "1F1B", "interleaved", "CP 2, interleaved")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            # "CP 2, interleaved" has what these three have.
            marks=[pytest.mark.slow, *[pytest.mark.repeated] * (name in SLOW[:3])]
            if name in SLOW
            else (),
        )
        for name in RUNS
    ],
)
def test_attention_runs_once_and_no_bit_changes(name):
    processes, stages, chunks = RUNS[name]
    run = run_script(processes, WORKER, stages, chunks)
    assert run.returncode == 0, run.stdout[-4000:]
    done = [line for line in run.stdout.splitlines() if line.startswith("ok: ")]
    assert len(done) == len(recompute_worker.CASES), run.stdout
