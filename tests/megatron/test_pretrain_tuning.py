# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tuned runs of Megatron-LM's own pretrain_gpt.py on CPU, through the launcher.

MEGATRON_LM_PATH=/path/to/Megatron-LM[:/another] pytest tests/megatron/test_pretrain_tuning.py
"""

from __future__ import annotations

import math
import os
import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from tests.support.balance_cases import EOD, long_tailed, write_documents
from tests.support.pretrain_tree import MODEL, SEQUENCE, losses
from tests.support.running import torchrun

STEPS = 7
WORDS = f"""
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters {STEPS} --log-interval 1
    --eval-iters 1 --eval-interval 3 --split 80,20,0 --num-workers 1 --seed 11
    --calculate-per-token-loss --attention-backend mtraining --mtraining-block-size 64
    --mtraining-window 64 --mtraining-price 1.0
""".split()
TUNED = "--mtraining-tuning on --mtraining-tuning-mass 0.1 "
APART = "--reset-attention-mask "
NUMBER = r"([-+.e\d]+)"
TIME = rf"{NUMBER} ms \(max/mean {NUMBER}, idle {NUMBER}%\)"
LINE = re.compile(
    rf"^ \[mtraining\] iteration (\d+) \| attention of the slowest rank: measured {TIME}"
    rf"(?: \| predicted {TIME}, untuned {TIME} \| density {NUMBER} expected untuned, {NUMBER} seen \| recall "
    rf"{NUMBER} expected untuned, {NUMBER} seen \| price times {NUMBER} to {NUMBER})?$",
    re.M,
)


@pytest.fixture(scope="module")
def packed(tree, tmp_path_factory):
    """``run(processes, *words)`` over a dataset of packed documents, with the launcher's ``--cpu``."""
    folder = tmp_path_factory.mktemp("packed")
    write_documents(folder / "packed", long_tailed(900, 700), SEQUENCE)
    write_documents(folder / "documents", long_tailed(900, 700))
    root = tree.roots["launcher"]
    null = root / "megatron/core/tokenizers/text/libraries/null_tokenizer.py"
    size = EOD + 1 if "self._vocab_size - 1" in null.read_text() else EOD
    model = [word for word in MODEL.split() if word not in ("--transformer-impl", "local")]
    data = (
        f"--data-cache-path {folder / 'cache'} --tokenizer-type NullTokenizer --vocab-size {size}"
    )
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))

    def run(processes: int, *words):
        given = [
            *model,
            *WORDS,
            *data.split(),
            *words,
        ]
        data_path = folder / ("packed" if APART.strip() in words else "documents")
        given += ["--data-path", data_path]
        command = ["-m", "megatron_mtraining.launch", "--cpu", root / "pretrain_gpt.py", *given]
        return torchrun(processes, *command, timeout=300, PYTHONPATH=path)

    return SimpleNamespace(run=run, folder=folder)


def without_times(run) -> list[tuple]:
    """Of each line of the balance: what does not depend on how long anything took."""
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return [(line[0], *line[4:]) for line in LINE.findall(run.stdout)]


def test_a_tuned_run_is_the_same_again_and_says_what_it_did(packed):
    folder = packed.folder / "tensorboard"
    has_tensorboard = find_spec("tensorboard") is not None
    words = ["--tensorboard-dir", folder] if has_tensorboard else []
    given = (TUNED + APART).split()
    first, second = packed.run(4, *given, *words), packed.run(4, *given)
    assert losses(first, STEPS) == losses(second, STEPS)
    assert all(math.isfinite(loss) for loss in losses(first, STEPS))
    lines = without_times(first)
    assert lines == without_times(second)
    assert [line[0] for line in lines] == [str(step) for step in range(1, STEPS + 1)]
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
        scalars = events.Tags()["scalars"]
        assert "mtraining-balance/predicted-max-over-mean" in scalars


LAYOUTS = {
    "DP 2 x CP 2, target, full recompute": (
        4,
        f"{TUNED} {APART} --context-parallel-size 2 --mtraining-target-recall 0.6 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "DP 2 x TP 2, cost": (
        4,
        f"{TUNED} {APART} --tensor-model-parallel-size 2 --mtraining-batching cost",
    ),
    "DP 2 x PP 2, two chunks": (
        4,
        f"{TUNED} --pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "DP 2 x PP 2, documents": (
        4,
        f"{TUNED} --pipeline-model-parallel-size 2 --dataloader-inter-document-masking",
    ),
    "batching alone": (2, f"{APART} --mtraining-batching cost"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, packed, checkout):
    processes, words = LAYOUTS[name]
    has = "inter_document_masking" in (checkout / "megatron/training/arguments.py").read_text()
    if "inter-document" in words and not has:
        pytest.skip("this Megatron-LM has no --dataloader-inter-document-masking")
    run = packed.run(processes, *words.split())
    assert all(math.isfinite(loss) for loss in losses(run, STEPS))
    lines = without_times(run)
    assert len(lines) == STEPS and all(lines[-1])
    if "tuning on" not in words:
        assert all(line[-2:] == ("1", "1") for line in lines[1:])


def test_one_rank_is_told_that_tuning_changes_nothing(packed):
    run = packed.run(1, *(TUNED + APART).split())
    losses(run, STEPS)
    assert run.stdout.count("--mtraining-tuning is on, but there is one data-parallel rank") == 1
