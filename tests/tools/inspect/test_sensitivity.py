# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect --sensitivity``: losses, the targets that follow, and the file that a run takes."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import head_policies, settings_of_run
from megatron_mtraining.models.types import Score
from megatron_mtraining.tools.inspect.sensitivity import (
    EXPONENT,
    LOST,
    Outcome,
    Sensitivity,
    targets_of,
)
from tests.support.inspect_cases import (
    HEADS,
    LAYERS,
    inspect,
    quick,
    refused,
    save_model,
)


def test_targets_follow_sensitivity():
    moved, density = [0.004, 0.001, 0.002, 0.001], [0.1, 0.1, 0.1, 0.2]
    targets = targets_of(moved, density, 0.95)
    assert sum(targets) / 4 == pytest.approx(0.95, abs=1e-4)
    lost = [1 - target for target in targets]
    # What is lost goes with (density / moved) to a power.
    assert lost[1] / lost[0] == pytest.approx(4**EXPONENT, rel=0.01)
    assert lost[1] / lost[2] == pytest.approx(2**EXPONENT, rel=0.01)
    assert lost[3] / lost[1] == pytest.approx(2**EXPONENT, rel=0.01)


def test_targets_have_bounds():
    targets = targets_of([1.0, 1e-9, 0.0, 1.0], [0.1] * 4, 0.9)
    lost = [1 - target for target in targets]
    assert sum(lost) / 4 == pytest.approx(0.1, abs=1e-3)
    assert lost[1] == lost[2] <= LOST[1] * 0.1 + 1e-4 and min(lost) >= LOST[0] * 0.1 - 1e-4
    assert lost[0] == lost[3] < lost[1]
    # What moves nearly all may lose least, and no less.
    assert 1 - targets_of([1e6, *[1.0] * 9], [0.1] * 10, 0.9)[0] < 0.1
    assert targets_of([0.0, 0.0], [0.2, 0.2], 0.95) == [0.95, 0.95]
    for target in (0.3, 0.5, 0.7):  # four times what is lost would be more than all
        low = targets_of([1.0] * 19 + [1e-9], [0.1] * 20, target)
        assert min(low) >= target / 2 - 1e-4 and sum(low) / 20 == pytest.approx(target, abs=1e-3)


def found(own: float, of: str = "layers") -> Sensitivity:
    n = 1 if of == "layers" else 2
    return Sensitivity(
        of, 0.95, 2.0, [[Score(2.01, 0.01)] * n, [Score(2.0, 0.001)] * n], [[0.1] * n, [0.2] * n],
        [[0.97, 0.96][:n], [0.93, 0.94][:n]],
        Outcome(2.02, 0.02, 0.15, 0.95), Outcome(2.01, own, 0.16, 0.95), (0.4, 0.3),
    )  # fmt: skip


def test_targets_that_do_not_help_are_not_recommended():
    better, worse = found(0.01), found(0.019)  # a fifteenth more pairs would do as much
    assert worse.settings_file({})["price"] == 0.4
    settings = better.settings_file({"block_size": 64})
    assert settings["layers"] == {"0": {"target_recall": 0.97}, "1": {"target_recall": 0.93}}
    assert (settings["target_recall"], settings["price"]) == (0.95, 0.3)
    assert "layers" not in worse.settings_file({}) and "own target" in better.summary()
    assert "the same target for all" in worse.summary()
    heads = found(0.01, "heads")
    assert heads.settings_file({})["layers"]["1"] == {
        "heads": {"0": {"target_recall": 0.93}, "1": {"target_recall": 0.94}}
    }
    assert "0: 10.000, 97.0%" in heads.summary()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Small, and with attention that is not even: large weights."""
    folder = save_model(tmp_path_factory.mktemp("model"), initializer_range=0.2)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("of", ["layers", "heads"])
def test_a_run_leaves_targets_that_training_takes(of, model, words, tmp_path):
    out = tmp_path / "out"
    more = ("--rows", 64, "--policy", "price", "--block-size", 64, "--target-recall", 0.8)
    assert inspect(model, *quick(words, out, *more, "--sensitivity", of)) == 0
    numbers = json.loads((out / "results.json").read_text())["sensitivity"]
    targets, moved = numbers["target_recall"], numbers["divergence_alone"]
    shape = (LAYERS, 1 if of == "layers" else HEADS)
    assert torch.tensor(moved).shape == torch.tensor(targets).shape == shape
    for outcome in ("same_target", "own_targets"):
        assert 0 < numbers[outcome]["density"] < 1
        # Prices were found on the layers' dense inputs.
        assert numbers[outcome]["recall"] == pytest.approx(0.8, abs=0.1)
        assert numbers[outcome]["divergence"] > 0
    # Each alone was sparse: none is dense attention, no two are the same, and all at once are more.
    flat = [one for row in moved for one in row]
    assert min(flat) > 0 and len(set(flat)) == len(flat)
    assert numbers["same_target"]["divergence"] > max(flat)
    settings = json.loads((out / "settings.json").read_text())
    assert settings == numbers["settings"] and settings["target_recall"] == 0.8
    given = settings_of_run(str(out / "settings.json"))
    config = MTrainingConfig.from_options(**given, settings=str(out / "settings.json"))
    for layer, of_layer in enumerate(targets):
        heads = head_policies(config, layer, LAYERS, HEADS)
        expected = of_layer * (HEADS // shape[1]) if "layers" in settings else None
        assert (heads and [head.target_recall for head in heads]) == expected
    assert "Divergence of the predictions" in (out / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--policy", "fixed"], ["--policy is fixed", "price"]),
        (["--window", 1024], ["--window is 1024", "1024 tokens"]),
    ],
    ids=["without-price", "dense"],
)
def test_what_gives_nothing_to_measure_is_refused(more, named, model, words, tmp_path, capsys):
    rest = quick(words, tmp_path / "out", "--sensitivity", "heads", *more)
    refused(capsys, [*named, "--sensitivity"], model, *rest)
    assert not (tmp_path / "out").exists()


def test_models_that_change_their_logits_are_refused(tmp_path, words, capsys):
    folder = save_model(tmp_path / "granite", "granite", logits_scaling=8.0)
    rest = quick(words, tmp_path / "out", "--policy", "price")
    refused(capsys, ["logits_scaling 8", "--sensitivity"], folder, *rest, "--sensitivity", "layers")
    assert not (tmp_path / "out").exists()
