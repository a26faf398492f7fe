# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What batching and tuning need of a run's arguments: refused before training, with what to do."""

from __future__ import annotations

import json

import pytest

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.balance.plan import PlanSizes
from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.megatron.balance import options as balance_options
from megatron_mtraining.megatron.balance.options import sizes_of
from tests.support.megatron_cases import check, parse

COST = ["--mtraining-batching", "cost"]
LENGTH = ["--mtraining-batching", "length"]
TUNING = ["--mtraining-tuning", "on"]
APART = dict(reset_attention_mask=True)
BAD = {
    "policy": (
        [*TUNING, "--mtraining-policy", "moba"], APART, "--mtraining-policy is moba, which has no price",
    ),
    "dense": ([*TUNING, "--mtraining-price", "0"], APART, "--mtraining-price is 0, which is dense attention"),
    "cyclic": (
        COST, dict(APART, dataloader_type="cyclic"),
        "--mtraining-batching cost does not work with --dataloader-type cyclic",
    ),
    "rampup": (
        COST, dict(APART, rampup_batch_size=["8", "8", "100"]),
        "--mtraining-batching cost does not work with --rampup-batch-size 8 8 100: plans are made for",
    ),
    "SFT": (COST, dict(sft=True), "does not work with --sft: the lengths of its samples"),
    "length without documents": (LENGTH, {}, "has nothing to place by: attention crosses documents"),
    "mock data without documents": (COST, dict(mock_data=True), "nothing to balance with --mock-data"),
    "object storage": (
        COST, dict(APART, object_storage_cache_path="/cache"), "--object-storage-cache-path /cache and",
    ),
    "micro-batches": (
        LENGTH, dict(APART, micro_batch_size=4), "--mtraining-batching is length with --micro-batch-size 4:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_runs_that_cannot_be_balanced(case):
    words, others, named = BAD[case]
    with pytest.raises(ArgumentsError) as raised:
        check(parse(*words, **others))
    assert named in str(raised.value)


GOOD = {
    "length": (LENGTH, APART),
    "mock data": (COST, dict(APART, mock_data=True)),
    "datasets without documents": (COST, {}),
    "single": (TUNING, dict(APART, dataloader_type="single", full_validation=True)),
    "per token": (COST, dict(APART, micro_batch_size=4, calculate_per_token_loss=True)),
    "tuning alone": (TUNING, dict(APART, micro_batch_size=4)),
    "by index": (COST, dict(dataloader_inter_document_masking=True, object_storage_cache_path="/cache")),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_runs_that_are_balanced(case):
    words, others = GOOD[case]
    lines = check(args := parse(*words, **others))
    assert not [line for line in lines if "warning" in line]
    assert (args.mtraining_batching, args.mtraining_tuning) != ("off", "off")


def test_a_settings_file_with_every_head_has_no_price(tmp_path):
    path = tmp_path / "best.json"
    fixed = {"policy": "fixed", "vertical": 10, "slash": 10}
    path.write_text(json.dumps({"layers": {"0": fixed, "1": {"dense": True}}}))
    words = [*TUNING, "--mtraining-settings", str(path)]
    with pytest.raises(ArgumentsError, match="leaves no head with a price to tune"):
        check(parse(*words, **APART, num_layers=2, num_attention_heads=2, kv_channels=64))


def test_one_data_parallel_rank_is_told():
    lines = check(parse(*COST, data_parallel_size=1, **APART))
    assert [line for line in lines if "there is one data-parallel rank" in line]


def test_times_of_another_gpu(monkeypatch):
    """Are needed for cost and tuning, and not for placing by length."""
    monkeypatch.setattr(balance_options, "gpu_name", lambda: "NVIDIA A100")
    for name, value, told in (
        ("batching", "cost", 1),
        ("tuning", "on", 1),
        ("batching", "length", 0),
    ):
        config = MTrainingConfig.from_options(**{name: value})
        lines = balance_options.lines_of_balance(args := parse(**APART), config)
        assert "\n".join(lines).count("NVIDIA A100: relative times may differ") == told
        assert (balance_options.predictor(args, config, 4096) is None) == (not told)


def test_sizes_of_steps():
    usual = dict(micro_batch_size=2, global_batch_size=48)
    assert sizes_of(parse(**usual), 4) == PlanSizes(4, 6, 2)
