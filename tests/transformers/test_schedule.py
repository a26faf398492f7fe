# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Schedules of prices in ``Trainer``, and in a training loop of one's own."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config.schedule import parse
from megatron_mtraining.transformers import advance, configure, state_of, take_means
from tests.support.trainer_cases import logged, trainer_of
from tests.support.transformers_cases import small_model

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

SIZES = dict(block_size=64, window=64)
STEPS = "0:4,0.25:4,0.75:0.5,0.75:0"
"""Of eight steps two at one price, four that fall, and two dense ones."""
PRICES = [4.0, 4.0, 4.0, 4 / 8**0.25, 4 / 8**0.5, 4 / 8**0.75, 0.0, 0.0]
UNFINISHED = "training ends after .* of its schedule"


def settings(schedule=STEPS, **more):
    return MTrainingConfig.from_options(schedule=schedule, **SIZES, **more)


def run(folder, config, resume=None, callbacks=(), model=None, steps=8, **more):
    """A trained trainer. Warnings that a run ends before its schedule are errors."""
    model = small_model(num_hidden_layers=1) if model is None else model
    configure(model, config)
    options = dict(max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=1) | more
    trainer = trainer_of(model, folder, **options)
    for each in callbacks:
        trainer.add_callback(each)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", UNFINISHED)
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def column(trainer, name):
    return [entry.get(name) for entry in logged(trainer)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run over the whole schedule, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, settings(), save_strategy="steps", save_steps=1)


def test_a_trainer_goes_through_the_schedule(whole):
    _, trainer = whole
    assert column(trainer, "mtraining_price") == pytest.approx(PRICES, abs=1e-5)
    density = column(trainer, "mtraining_density")
    assert all(each < 0.9 for each in density[:5]) and density[6:] == [1, 1]
    assert density[5] > density[2]
    steering = state_of(trainer.model).steering
    assert steering.step == 8 and steering.is_dense


def test_a_trained_model_is_evaluated_as_its_schedule_ends(whole):
    _, trainer = whole
    trainer.model.eval()
    tokens = torch.randint(1, 97, (1, 320), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = trainer.model(tokens).logits
        assert take_means(trainer.model, training=False).density.eq(1).all()
        trainer.model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, trainer.model(tokens).logits, rtol=1e-3, atol=1e-4)
        trainer.model.set_attn_implementation("mtraining")


@pytest.mark.parametrize("done", [1, 4, 6, 7], ids=["sparse", "falling", "first dense", "dense"])
def test_a_run_goes_on_from_a_checkpoint(done, whole, tmp_path):
    folder, trainer = whole
    resumed = run(tmp_path, settings(), folder / f"checkpoint-{done}")
    for name in ("loss", "grad_norm", "mtraining_price", "mtraining_density"):
        # What is logged before the checkpoint is in its own log.
        assert column(resumed, name) == pytest.approx(column(trainer, name), rel=1e-4), name


def test_dense_steps_are_those_of_a_price_of_0(whole, tmp_path):
    (folder, trainer), done = whole, 6
    dense = MTrainingConfig.from_options(price=0.0, **SIZES)
    resumed = run(tmp_path, dense, folder / f"checkpoint-{done}")
    for name in ("loss", "grad_norm"):
        assert column(resumed, name)[done:] == pytest.approx(column(trainer, name)[done:], rel=1e-5)
    assert column(resumed, "mtraining_price")[-1] is None
    sparse = MTrainingConfig.from_options(price=4.0, **SIZES)
    other = run(tmp_path, sparse, folder / f"checkpoint-{done}")
    assert column(other, "loss")[-1] != pytest.approx(column(trainer, "loss")[-1], rel=1e-5)


def test_a_run_of_another_length_says_what_that_means(whole, tmp_path):
    folder, _ = whole
    at = folder / "checkpoint-6"
    with pytest.raises(
        ConfigError,
        match="^max_steps is 12, but the schedule of the checkpoint is to 8: give "
        "--mtraining-schedule-extension continue .* or restart",
    ):
        run(tmp_path, settings(), at, steps=12)
    longer = run(tmp_path, settings(schedule_extension="continue"), at, steps=12)
    expected = [4 / 8 ** (1 / 2), 4 / 8 ** (4 / 6), 4 / 8 ** (5 / 6), 0, 0, 0]
    assert column(longer, "mtraining_price")[6:] == pytest.approx(expected, abs=1e-5)
    again = settings(schedule_extension="restart")
    options = dict(steps=12, save_strategy="steps", save_steps=1)
    restarted = run(tmp_path / "restarted", again, at, **options)
    expected = [again.policy.steps.at(step / 6) for step in range(6)]
    assert column(restarted, "mtraining_price")[6:] == pytest.approx(expected, abs=1e-5)
    # Started once more by the same command, it goes on with that schedule.
    third = run(tmp_path, again, tmp_path / "restarted" / "checkpoint-9", steps=12)
    assert column(third, "mtraining_price")[6:] == pytest.approx(expected, abs=1e-5)
    assert column(third, "loss") == pytest.approx(column(restarted, "loss"), rel=1e-4)
    # Without a schedule, a length is anyone's.
    run(tmp_path, MTrainingConfig.from_options(price=0.5, **SIZES), at, steps=7)


def test_a_target_recall_takes_any_length(tmp_path):
    """Only schedules are over something."""
    target = MTrainingConfig.from_options(target_recall=0.6, **SIZES)
    run(tmp_path, target, steps=1, save_strategy="steps", save_steps=1)
    resumed = run(tmp_path, target, tmp_path / "checkpoint-1", steps=2)
    assert state_of(resumed.model).steering.step == 2
    # A schedule that begins at a checkpoint without one is over the whole run, or over what is left.
    for extension, price in ((None, 1.0), ("restart", 4.0)):
        given = settings("0:4,0.5:1", schedule_extension=extension)
        later = run(tmp_path, given, tmp_path / "checkpoint-1", steps=2)
        assert column(later, "mtraining_price")[-1] == price


def test_training_that_stops_early_says_so(tmp_path):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == self.after

    def stopped(after):
        callback = Stop()
        callback.after = after
        run(tmp_path, settings("0:1,0.5:0.25,0.75:0"), steps=4, callbacks=[callback])

    for after, price in ((1, "0.5"), (3, "0.25")):
        said = f"ends after {after / 4:.1%} of its schedule, at a price of {price}, before the dense steps"
        with pytest.raises(UserWarning, match=said):
            stopped(after)
    stopped(4)


def test_epochs_and_micro_batches(tmp_path):
    """The steps of a schedule are those of the optimizer, however their number is given."""
    given = dict(steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    trainer = run(tmp_path, settings(), **given)  # 8 samples
    assert trainer.state.global_step == 8
    assert column(trainer, "mtraining_price") == pytest.approx(PRICES, abs=1e-5)
    assert column(trainer, "mtraining_density")[6:] == [1, 1]


def test_evaluations_take_the_setting_of_the_step(tmp_path):
    from transformers import TrainerCallback

    found = []

    class Take(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            found.append(take_means(model, training=False).density.mean().item())

    model = small_model(num_hidden_layers=1)
    configure(model, settings("0:4,0.5:0"))
    trainer = trainer_of(model, tmp_path, max_steps=2, eval_steps=1)
    trainer.eval_dataset, trainer.args.eval_strategy = trainer.train_dataset, "steps"
    trainer.add_callback(Take())
    with pytest.warns(UserWarning, match="no training has begun: this evaluates with the price of"):
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert found[0] < 0.9 and found[1:] == [1, 1, 1]


def test_training_again_starts_anew(tmp_path):
    trainer = run(tmp_path, settings(), steps=4)
    prices = column(trainer, "mtraining_price")
    assert prices[-1] == 0
    trainer.args.max_steps = 2
    trainer.train()
    assert column(trainer, "mtraining_price") == [4, pytest.approx(4 / 8**0.5)]


def test_a_target_schedule(tmp_path):
    """The log has a price of 0 where the step was dense, not the one after it."""
    config = MTrainingConfig.from_options(target_schedule="0:0.5,0.5:0.7,0.5:1", **SIZES)
    whole = run(tmp_path, config, steps=4, save_strategy="steps", save_steps=1)
    prices = column(whole, "mtraining_price")
    assert prices[1] > 0.25 and prices[2:] == [0, 0]
    assert column(whole, "mtraining_density")[1] < 1 == column(whole, "mtraining_density")[2]
    kept = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    kept = kept["stateful_callbacks"]["PatternCallback"]["attributes"]
    steering = state_of(whole.model).steering
    expected = {"span": [0, 4], "prices": steering.state(), "history": steering.history()}
    assert kept == expected
    for done in (1, 2, 3):
        resumed = run(tmp_path / "again", config, tmp_path / f"checkpoint-{done}", steps=4)
        assert column(resumed, "loss") == pytest.approx(column(whole, "loss"), rel=1e-4)


def steps_of(model, count, call=False):
    """Densities of the steps of one's own loop."""
    tokens = torch.randint(1, 97, (1, 320), generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(count):
        for _ in range(2):  # micro-batches
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if call:
            advance(model)
        found.append(take_means(model).density.mean().item())
    return found


def test_a_loop_of_one_s_own(tmp_path):
    model = small_model(num_hidden_layers=1)
    with pytest.raises(
        ConfigError, match="nothing says how many steps .*Trainer, or call configure"
    ):
        configure(model, settings())
        steps_of(model, 1)
    for call in (False, True):
        state = configure(model, settings("0:4,0.5:1,0.75:0"), num_steps=4)
        found = steps_of(model, 5, call)
        assert found[0] < found[2] < found[3] == found[4] == 1
        assert state.steering.step == 4 + call
    # A loop that goes on says how many steps it has done.
    state = configure(model, settings("0:4,0.5:1,0.75:0"), num_steps=4)
    state.steering.step = 3
    assert steps_of(model, 1) == [1]
    for wrong in (0, -3, 2.0, True, "8"):
        with pytest.raises(ConfigError, match="num_steps is .*: give a number of optimizer steps"):
            configure(model, settings(), num_steps=wrong)


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    from transformers import Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    [code] = [each for each in re.findall("```python\n(.*?)```", page, re.S) if "schedule=" in each]
    model = small_model(num_hidden_layers=1)
    given = dict(MTrainingConfig=MTrainingConfig, configure=configure, Trainer=Trainer, model=model)
    dataset = trainer_of(small_model(num_hidden_layers=1), tmp_path).train_dataset
    given |= dict(TrainingArguments=TrainingArguments, dataset=dataset)
    exec(code.replace("max_steps=1000", "max_steps=2, use_cpu=True"), given)
    assert state_of(model).steering.scheduled() == parse("schedule", "anneal").at(1)
    for points in re.findall('schedule="([0-9].*?)"', page):
        assert MTrainingConfig.from_options(schedule=points).policy.steps.ends_dense
