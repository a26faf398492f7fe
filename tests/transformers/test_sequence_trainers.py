# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallel training by ``Trainer`` under accelerate's ``ParallelismConfig``, beside one process."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate", "1.12")

from megatron_mtraining import ConfigError, requirements
from megatron_mtraining.transformers import configure
from megatron_mtraining.transformers.trainers import check_versions
from tests.support.ranks import run_ranks
from tests.support.sequence_trainers import (
    told_at_the_start,
    told_of_a_loss,
    told_of_predictions,
    train,
    train_ranks,
    train_zero,
    trainer_of,
)
from tests.support.transformers_cases import small_model


def assert_alike(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_parts_of_sequences_train_as_whole_ones(tmp_path):
    cases = [
        ("dense", dict(max_steps=2, lengths=(130, 20, 234))),
        ("target", dict(max_steps=3, gradient_checkpointing=True)),
    ]
    every = run_ranks(2, train_ranks, [(tmp_path / "ranks", *case) for case in cases])
    for (settings, more), *results in zip(cases, *every):
        expected = train(tmp_path / "alone", settings, **more)
        for found in results:
            assert_alike(found, expected)


def test_a_run_of_ranks_goes_on_as_without_a_stop(tmp_path):
    """At the same prices of each head, from a step in which they move fast."""
    ran, target = tmp_path / "ran", "targets of heads"
    whole = run_ranks(2, train_ranks, [(ran, target, dict(max_steps=4, save_steps=2))])
    resume = str(ran / "checkpoint-2")
    again = run_ranks(
        2, train_ranks, [(tmp_path / "again", target, dict(max_steps=4, resume=resume))]
    )
    for (found,), (expected,) in zip(again, whole):
        assert_alike(found["log"], expected["log"])
        torch.testing.assert_close(found["prices"], expected["prices"], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks(tmp_path):
    """From two ranks to four, with its optimizer, as one process that does not stop."""
    expected = train(tmp_path / "alone", "target", max_steps=3)
    run_ranks(2, train_ranks, [(tmp_path / "two", "target", dict(max_steps=3, save_steps=2))])
    saved = tmp_path / "two" / "checkpoint-2"
    case = (tmp_path / "four", "target", dict(max_steps=3, resume=str(saved)))
    for (found,) in run_ranks(4, train_ranks, [case]):
        assert_alike(found["log"], expected["log"])
        torch.testing.assert_close(found["prices"], expected["prices"], rtol=1e-4, atol=0)


@pytest.mark.slow
def test_deepspeed_trains_as_with_its_own_attention(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed", reason="ZeRO is DeepSpeed's")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found, expected = (
        run_ranks(2, train_zero, tmp_path, attention) for attention in ("mtraining", "sdpa")
    )
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_model_that_does_not_know_of_other_ranks_is_refused(tmp_path):
    for told in run_ranks(2, told_at_the_start, tmp_path):
        assert re.search(
            "cp_size 2, and its model attends to tokens of one rank: call .*configure", told
        )


def test_a_trainer_of_whole_sequences_is_refused(tmp_path):
    model = small_model("llama")
    trainer = trainer_of(tmp_path, model)
    with pytest.raises(
        ConfigError, match="a trainer that does not share sequences: give it .*cp_size=2"
    ):
        configure(model, sequence_parallel=trainer)


def test_a_loss_that_is_not_the_models_is_refused(tmp_path):
    for told in run_ranks(2, told_of_a_loss, tmp_path):
        assert [each.split(",")[0] for each in told] == [
            "the trainer has label_smoothing_factor",
            "the trainer has compute_loss_func",
        ]


def test_predictions_are_refused(tmp_path):
    for told in run_ranks(2, told_of_predictions, tmp_path):
        assert told.startswith("the trainer is asked for predictions, and with cp_size")


def test_a_version_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(requirements, "requires", lambda name: ["accelerate>=1.12; extra == 'hf'"])
    monkeypatch.setattr(requirements, "version", lambda name: "1.11.0")
    with pytest.raises(
        ConfigError, match="accelerate 1.11.0 is too old .*: pip install 'accelerate>=1.12'"
    ):
        check_versions()
