# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Schedules of the price in Megatron-LM's own pretrain_gpt.py on CPU (see test_pretrain.py)."""

import re

import pytest

from megatron_mtraining.config.schedule import parse
from tests.support.pretrain_tree import FULL, MOCK, MODEL, SHIM, STEPS, TRAINING, losses
from tests.support.running import torchrun

# Weights are random, whose attention is even.
POINTS = "0:8,0.3:8,0.7:1.5,0.8:0"
SCHEDULED = "--attention-backend mtraining --mtraining-block-size 64".split()
SCHEDULED += [*"--mtraining-window 0 --mtraining-sink 0 --mtraining-schedule".split(), POINTS]
LINE = r"iteration (\d+) \| density (\S+) .*\| price (\S+) \| schedule (\S+)%"


def logged(run) -> dict[int, tuple[float, float, float]]:
    """Density, price and share of the schedule by iteration."""
    found = re.findall(LINE, run.stdout, re.M)
    return {int(step): tuple(map(float, values)) for step, *values in found}


def check_prices(run, first: int = 1, last: int = STEPS, end: int = STEPS, begin: int = 0) -> None:
    """Check the logged prices of iterations against the schedule, and that its dense steps are dense."""
    schedule, found = parse("schedule", POINTS), logged(run)
    assert list(found) == list(range(first, last + 1))
    for iteration, (density, price, share) in found.items():
        wanted = (iteration - 1 - begin) / (end - begin)
        assert share == pytest.approx(100 * wanted, abs=0.06)
        assert price == pytest.approx(schedule.at(wanted), rel=1e-3)
        assert density == 1 if wanted >= 0.8 else density < 0.9


def of_steps(logged_losses: list[float]) -> list[float]:
    """Losses of single steps: the second that a process logs is the mean with the first."""
    first, second, *others = logged_losses
    return [first, 2 * second - first, *others]


@pytest.fixture(scope="module")
def whole(tree):
    """A run that is not interrupted."""
    run = tree.run("launcher", 2, "--context-parallel-size", "2", *SCHEDULED)
    losses(run)
    return run


def test_a_run_follows_its_schedule(whole):
    check_prices(whole)
    assert "of its schedule" not in whole.stdout


def test_a_run_resumed_in_each_phase_in_another_layout_is_the_same(whole, tree, tmp_path):
    """While the price stays, while it falls, and in the dense steps."""
    kept = [*SCHEDULED, "--save", tmp_path, "--load", tmp_path, "--ckpt-format", "torch_dist"]
    found = []
    for first, last, layout in (
        (1, 4, "--context-parallel-size 2"),
        (5, 10, ""),
        (11, 17, "--pipeline-model-parallel-size 2"),
        (18, STEPS, "--context-parallel-size 2 " + FULL),
    ):
        words = [*kept, *layout.split(), *f"--exit-interval {last} --save-interval {last}".split()]
        run = tree.run("launcher", 2 if layout else 1, *words)
        found += of_steps(losses(run, last - first + 1))
        check_prices(run, first, last)
        ended = re.findall(r"warning: training ends after (\S+)% of its schedule", run.stdout)
        assert ended == ([] if last / STEPS >= 0.8 else [f"{100 * last / STEPS:.1f}"])
    assert found == pytest.approx(of_steps(losses(whole)), abs=3e-5, rel=0)


def test_a_run_by_samples_with_growing_batches(tree):
    """The share is of the samples: batches of 2 grow to 4."""
    training = TRAINING.replace(f"--train-iters {STEPS}", "--train-samples 48")
    training = training.replace("--global-batch-size 2", "--global-batch-size 4")
    training += " --rampup-batch-size 2 2 16"
    root = tree.roots["launcher"]
    words = [*MODEL.split(), *training.split(), *MOCK.split(), *SCHEDULED]
    command = [SHIM, "-m", "megatron_mtraining.launch", root / "pretrain_gpt.py", *words]
    run = torchrun(1, *command, timeout=300, PYTHONPATH=str(root))
    assert run.returncode == 0, run.stderr[-4000:]
    found, schedule = logged(run), parse("schedule", POINTS)
    consumed = [int(n) for n in re.findall(r"consumed samples: +(\d+) ", run.stdout)]
    before = [0, *consumed[:-1]]
    assert consumed[-1] == 48 and consumed[-1] - consumed[-2] == 4
    assert consumed[0] in (2, 4), "Megatron-LM ignores the option from 0.19 on"
    for done, (_, price, share) in zip(before, found.values(), strict=True):
        assert share == pytest.approx(100 * done / 48, abs=0.06)
        assert price == pytest.approx(schedule.at(done / 48), rel=1e-3)


def test_a_longer_run_says_what_its_schedule_does(tree, tmp_path):
    kept = [*SCHEDULED, "--save", tmp_path, "--load", tmp_path, "--ckpt-format", "torch_dist"]
    kept += ["--override-opt_param-scheduler", "--save-interval", "1000"]
    first = ["--train-iters", "10"]
    losses(tree.run("launcher", 1, *kept, *first), 10)
    refused = tree.run("launcher", 1, *kept, timeout=120)
    said = [line for line in refused.stderr.splitlines() if "--train-iters is 20" in line]
    assert refused.returncode and "the schedule of the checkpoint is to 10" in said[-1]
    assert "--mtraining-schedule-extension continue" in said[-1]
    ends = ["--exit-interval", "13", "--mtraining-schedule-extension"]
    restarted = tree.run("launcher", 1, *kept, *ends, "restart")
    losses(restarted, 3)
    check_prices(restarted, 11, 13, begin=10)
    again = tree.run("launcher", 1, *kept, "--exit-interval", "15", *ends[2:], "restart")
    check_prices(again, 14, 15, begin=10)  # begins once
    for file in tmp_path.glob("latest_checkpointed_iteration.txt"):
        file.write_text("10")
    check_prices(tree.run("launcher", 1, *kept, *ends, "continue"), 11, 13)
