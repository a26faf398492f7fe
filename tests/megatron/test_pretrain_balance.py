# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balanced runs of Megatron-LM's own pretrain_gpt.py on CPU: losses of one process that has the same samples.

MEGATRON_LM_PATH=/path/to/Megatron-LM[:/another] pytest tests/megatron/test_pretrain_balance.py
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tests.support.balance_cases import EOD, long_tailed, write_documents
from tests.support.pretrain_tree import SEQUENCE, check_same, losses

STEPS, BATCH = 5, 8
BALANCE = f"""
    --attention-backend mtraining --mtraining-block-size 64 --eod-mask-loss --global-batch-size {BATCH}
    --train-iters {STEPS} --lr 1e-3 --num-workers 1
""".split()
DENSE = ["--mtraining-slash", "all"]
APART = ["--reset-attention-mask"]


@pytest.fixture(scope="module")
def packed(tree, tmp_path_factory):
    """Runs over a dataset of packed documents: ``run(processes, *words)``, and the run of one process."""
    folder = tmp_path_factory.mktemp("packed")
    lengths = long_tailed(900, 700)
    samples = sum(lengths) // SEQUENCE
    assert samples > STEPS * BATCH, samples
    write_documents(folder / "packed", lengths, SEQUENCE)
    write_documents(folder / "documents", lengths)
    null = tree.roots["launcher"] / "megatron/core/tokenizers/text/libraries/null_tokenizer.py"
    size = EOD + 1 if "self._vocab_size - 1" in null.read_text() else EOD
    found = {}

    def run(processes: int, *words, name: str = "packed", steps: int = STEPS):
        data = f"--data-path {folder / name} --data-cache-path {folder / 'cache'} --split 1,0,0"
        data += f" --tokenizer-type NullTokenizer --vocab-size {size}"
        given = [*BALANCE, *map(str, words)]
        return tree.run("launcher", processes, *given, data=data)

    def alone(*words, name: str = "packed"):
        at = (name, *words)
        if at not in found:
            found[at] = run(1, *words, name=name)
        return found[at]

    return SimpleNamespace(run=run, alone=alone, folder=folder)


LAYOUTS = {
    "DP 4, length": (4, "--mtraining-batching length"),
    "DP 4, cost": (4, "--mtraining-batching cost"),
    "DP 2 x CP 2, length": (4, "--mtraining-batching length --context-parallel-size 2"),
    "DP 2 x CP 2, cost, distributed optimizer": (
        4,
        "--mtraining-batching cost --context-parallel-size 2 --use-distributed-optimizer",
    ),
    # The vocabulary is padded to a multiple of this times the ranks: to as many entries as elsewhere.
    "DP 2 x TP 2, cost": (
        4,
        "--mtraining-batching cost --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_those_of_one_process(name, packed):
    """With the mean over tokens of the global batch, whatever micro-batch has how many of them."""
    processes, words = LAYOUTS[name]
    common = [*DENSE, *APART, "--calculate-per-token-loss"]
    run = packed.run(processes, *common, *words.split())
    check_same(run, packed.alone(*common), 2e-5, STEPS)


def test_megatrons_mean_over_micro_batches_is_the_same_where_each_has_one_sample(packed):
    expected = packed.alone(*DENSE, *APART)
    run = packed.run(4, *DENSE, *APART, "--mtraining-batching", "cost")
    check_same(run, expected, 2e-5, STEPS)
    per_token = losses(packed.alone(*DENSE, *APART, "--calculate-per-token-loss"), STEPS)
    assert losses(expected, STEPS) != pytest.approx(per_token, abs=1e-6)


def test_micro_batches_of_several_samples(packed):
    per_token = [*DENSE, *APART, "--calculate-per-token-loss"]
    words = ["--micro-batch-size", "2", "--mtraining-batching", "cost"]
    run = packed.run(2, *per_token, *words)
    check_same(run, packed.alone(*per_token), 2e-5, STEPS)
    run = packed.run(2, *DENSE, *APART, *words)
    assert run.returncode != 0 and "use --calculate-per-token-loss" in run.stderr


def test_sparse_patterns_go_with_the_samples(packed):
    """The pattern search of a sample finds the same wherever it is placed."""
    price = [
        "--mtraining-price",
        "0.5",
        "--mtraining-vertical-cap",
        "64",
        *APART,
        "--calculate-per-token-loss",
    ]
    run = packed.run(2, *price, "--mtraining-batching", "cost")
    check_same(run, packed.alone(*price), 2e-5, STEPS)


def test_pipeline_stages_by_lengths_of_documents(packed, checkout):
    """The first and the last stage load data, and make the same plans."""
    if "inter_document_masking" not in (checkout / "megatron/training/arguments.py").read_text():
        pytest.skip("this Megatron-LM has no --dataloader-inter-document-masking")
    stages = ["--pipeline-model-parallel-size", "2", "--dataloader-inter-document-masking", *DENSE]
    stages += ["--calculate-per-token-loss"]
    whole = packed.run(2, *stages, name="documents")
    run = packed.run(4, *stages, "--mtraining-batching", "cost", name="documents")
    check_same(run, whole, 2e-5, STEPS)


def test_a_run_goes_on_at_another_data_parallel_size(packed, tmp_path):
    """As one process that stops at that step: Megatron's optimizer goes on a little differently itself."""

    def stopped(folder, processes, *words) -> list[float]:
        kept = ["--save", folder, "--load", folder, "--ckpt-format", "torch_dist"]
        common = [*DENSE, *APART, "--calculate-per-token-loss", "--save-interval", 3, *kept, *words]
        found = []
        for number, more in zip(
            processes, (["--train-iters", 3], ["--override-opt_param-scheduler"])
        ):
            run = packed.run(number, *common, *more)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
            found += [float(loss) for loss in re.findall(r"lm loss: (\S+)", run.stdout)]
        return found

    expected = stopped(tmp_path / "alone", (1, 1))
    assert len(expected) == STEPS
    found = stopped(tmp_path / "balanced", (4, 2), "--mtraining-batching", "cost")
    assert found == pytest.approx(expected, abs=2e-5, rel=0)
