# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balanced runs of Megatron-LM's own pretrain_gpt.py on CPU: batching has the losses of one process with the
same samples, and tuning says what it does.

MEGATRON_LM_PATH=/path/to/Megatron-LM[:/another] pytest tests/megatron/test_pretrain_balance.py
"""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.support.balance_cases import EOD, long_tailed, write_documents
from tests.support.pretrain_tree import FULL, INTER_DOCUMENT, SEQUENCE, check_same, losses

STEPS, BATCH = 5, 8
BALANCE = f"""
    --attention-backend mtraining --mtraining-block-size 64 --global-batch-size {BATCH} --lr 1e-3
    --train-iters {STEPS} --num-workers 1
""".split()
APART = "--reset-attention-mask "
MEANS = APART + "--eod-mask-loss --mtraining-slash all "
PER_TOKEN = MEANS + "--calculate-per-token-loss "
BY_LENGTHS = f"{INTER_DOCUMENT} --eod-mask-loss --mtraining-slash all --calculate-per-token-loss "
SPARSE = f"{APART} --eod-mask-loss --calculate-per-token-loss "
SPARSE += "--mtraining-price 0.5 --mtraining-vertical-cap 64 "
CP, TP, PP = (
    f"--{kind}-parallel-size 2 " for kind in ("context", "tensor-model", "pipeline-model")
)
COST = "--mtraining-batching cost "


@pytest.fixture(scope="module")
def packed(tree, tmp_path_factory):
    """``run(processes, words)`` over packed documents, or over a sequence for each; ``alone`` runs once."""
    folder = tmp_path_factory.mktemp("packed")
    lengths = long_tailed(900, 700)
    assert sum(lengths) // SEQUENCE > STEPS * BATCH
    write_documents(folder / "packed", lengths, SEQUENCE)
    write_documents(folder / "documents", lengths)
    found = {}

    def run(processes: int, words: str):
        tree.skip_without(words)
        name = "packed" if APART in words else "documents"
        data = f"--data-path {folder / name} --data-cache-path {folder / 'cache'} --split 1,0,0 "
        data += tree.null_tokenizer(EOD)
        return tree.run("launcher", processes, *BALANCE, *words.split(), data=data)

    def alone(words: str, processes: int = 1):
        if words not in found:
            found[words] = run(processes, words)
        return found[words]

    return SimpleNamespace(run=run, alone=alone, folder=folder)


PLACED = {
    # processes of the run without batching and of the one with it, words of both, and of the one with it
    "DP 4, length": (1, 4, PER_TOKEN, "--mtraining-batching length"),
    "DP 4, cost, means of micro-batches": (1, 4, MEANS, COST),
    "DP 2, cost, two samples": (1, 2, PER_TOKEN, COST + "--micro-batch-size 2"),
    "DP 2, cost, sparse": (1, 2, SPARSE, COST),
    "DP 2 x CP 2, cost, distributed optimizer": (
        1, 4, PER_TOKEN, COST + CP + "--use-distributed-optimizer",
    ),
    # The vocabulary is padded to a multiple of this times the ranks: to as many entries as elsewhere.
    "DP 2 x TP 2, cost": (1, 4, PER_TOKEN, COST + TP + "--make-vocab-size-divisible-by 64"),
    # The first and the last stage load data, and make the same plans.
    "DP 2 x PP 2, cost, lengths of documents": (2, 4, BY_LENGTHS + PP, COST),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_steps_are_those_of_megatron_s_order(name, packed):
    """The mean is over the global batch, and a sample has its pattern wherever it is placed."""
    before, processes, common, words = PLACED[name]
    run = packed.run(processes, common + words)
    check_same(run, packed.alone(common, before), 2e-5, STEPS)


def test_the_two_means_differ_here(packed):
    means, per_token = (losses(packed.alone(words), STEPS) for words in (MEANS, PER_TOKEN))
    assert means != pytest.approx(per_token, abs=1e-6)


def test_a_run_goes_on_at_another_data_parallel_size(packed, tmp_path):
    """As one process that stops at that step: Megatron's optimizer goes on a little differently itself."""

    def stopped(folder, processes, words="") -> list[float]:
        kept = f"--save {folder} --load {folder} --ckpt-format torch_dist --save-interval 3 "
        found = []
        for number, more in zip(processes, ("--train-iters 3", "--override-opt_param-scheduler")):
            run = packed.run(number, PER_TOKEN + kept + words + more)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
            found += [float(loss) for loss in re.findall(r"lm loss: (\S+)", run.stdout)]
        return found

    expected = stopped(tmp_path / "alone", (1, 1))
    assert len(expected) == STEPS
    found = stopped(tmp_path / "balanced", (4, 2), COST)
    assert found == pytest.approx(expected, abs=2e-5, rel=0)


TUNED_STEPS = 7
OBSERVED = f"""
    --train-iters {TUNED_STEPS} --eval-iters 1 --eval-interval 3 --split 80,20,0 --calculate-per-token-loss
    --mtraining-window 64 --mtraining-price 1.0 """
TUNED = OBSERVED + "--mtraining-tuning on --mtraining-tuning-mass 0.1 "
NUMBER = r"([-+.e\d]+)"
TIME = rf"{NUMBER} ms \(max/mean {NUMBER}, idle {NUMBER}%\)"
LINE = re.compile(
    rf"^ \[mtraining\] iteration (\d+) \| attention of the slowest rank: measured {TIME}"
    rf"(?: \| predicted {TIME}, untuned {TIME} \| density {NUMBER} expected untuned, {NUMBER} seen \| recall "
    rf"{NUMBER} expected untuned, {NUMBER} seen \| price times {NUMBER} to {NUMBER})?$",
    re.M,
)


def without_times(run) -> list[tuple]:
    """Of each line of the balance: what does not depend on how long anything took."""
    assert all(map(math.isfinite, losses(run, TUNED_STEPS)))
    return [(line[0], *line[4:]) for line in LINE.findall(run.stdout)]


def test_a_tuned_run_is_the_same_again_and_says_what_it_did(packed):
    folder = packed.folder / "tensorboard"
    has_tensorboard = find_spec("tensorboard") is not None
    more = f"--tensorboard-dir {folder}" if has_tensorboard else ""
    first, second = packed.run(4, TUNED + APART + more), packed.run(4, TUNED + APART)
    assert losses(first, TUNED_STEPS) == losses(second, TUNED_STEPS)
    lines = without_times(first)
    assert lines == without_times(second)
    assert [line[0] for line in lines] == [str(step) for step in range(1, TUNED_STEPS + 1)]
    assert not any(lines[0][1:]), "no plan yet"
    tuned = [line for line in lines[1:] if float(line[-1]) != 1]
    # The loader reads a step ahead: until what the first step has seen can be in a plan, nothing is tuned.
    assert [line[0] for line in tuned][:2] == ["5", "6"]
    for _, predicted, ratio, idle, untuned, before, waited, *_, low, high in tuned:
        assert float(predicted) < float(untuned) and float(ratio) < float(before)
        assert float(idle) < float(waited) and float(low) < 1 < float(high)
    if has_tensorboard:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder)).Reload()
        assert "mtraining-balance/predicted-max-over-mean" in events.Tags()["scalars"]


LAYOUTS = {
    "DP 2 x CP 2, target, full recompute": TUNED
    + APART
    + CP
    + FULL
    + "--mtraining-target-recall 0.6",
    "DP 2 x TP 2, cost": TUNED + APART + TP + COST,
    "DP 2 x PP 2, two chunks": (
        TUNED + PP + "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
    ),
    "DP 2 x PP 2, lengths of documents": TUNED + PP + INTER_DOCUMENT,
    "batching alone": OBSERVED + APART + COST + CP,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, packed):
    lines = without_times(packed.run(4, LAYOUTS[name]))
    assert len(lines) == TUNED_STEPS and all(lines[-1])
    if "tuning on" not in LAYOUTS[name]:
        assert all(line[-2:] == ("1", "1") for line in lines[1:])
