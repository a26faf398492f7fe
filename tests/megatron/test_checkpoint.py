# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint's arguments must load in a process that knows nothing of this package."""

import pickle
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.megatron import checkpoint, register, run_state
from megatron_mtraining.megatron.balance import run as run_balance
from megatron_mtraining.megatron.checkpoint import (
    wrap_check_checkpoint_args,
    wrap_generate_state_dict,
)
from megatron_mtraining.megatron.run_state import RUN
from tests.support.ranks import run_alone


def load(file):
    """In a process that has Megatron alone: pickle finds no module of the package, no member of an enum."""
    for name in [name for name in sys.modules if name.startswith("megatron_mtraining")]:
        sys.modules[name] = None  # importing it fails
    assert not hasattr(AttnBackend, "mtraining")
    print(pickle.loads(file.read_bytes())["args"].attention_backend.name)


def state_of(args):
    return wrap_generate_state_dict(lambda args, weights: {"args": args, "model": weights})(args, 1)


def test_saved_arguments_load_without_the_package(tmp_path):
    register()
    args = Namespace(attention_backend=AttnBackend["mtraining"], mtraining_vertical=7, lr=0.1)
    state = state_of(args)
    assert args.attention_backend is AttnBackend["mtraining"], "the run goes on with its backend"
    assert state["model"] == 1 and state["args"].mtraining_vertical == 7
    (tmp_path / "state.pkl").write_bytes(pickle.dumps(state))
    run = run_alone(load, tmp_path / "state.pkl")
    assert run.returncode == 0, run.stdout
    assert run.stdout.strip() == "auto"


def test_other_runs_save_what_they_have():
    args = Namespace(attention_backend=AttnBackend.flash)
    assert state_of(args)["args"] is args


def test_estimates_of_density_go_on_from_a_checkpoint(monkeypatch, capsys):
    """If the run balances its ranks, and has the pattern and data that they are of. A damaged state is
    refused with a way out."""
    known = DensityEstimates()
    known.observe(np.array([[[0, 6]]]), [0.6], [0.5])
    monkeypatch.setattr(RUN.balance, "planner", SimpleNamespace(state=known.state))
    monkeypatch.setattr(run_balance, "settings", MTrainingConfig)
    args = Namespace(
        attention_backend=AttnBackend["mtraining"], seq_length=512, data_path=["a", "b"]
    )
    now = args
    saved = pickle.loads(pickle.dumps(state_of(args)["args"]))
    reached = saved.mtraining_balance_reached
    assert known.state().items() <= reached.items()

    monkeypatch.setattr(RUN.balance, "restored", None)
    for module in (checkpoint, run_balance):
        monkeypatch.setattr(module, "training_arguments", lambda: now)
    restore = wrap_check_checkpoint_args(lambda checkpoint_args: None)
    for balances in (False, True):
        config = MTrainingConfig.from_options(batching="cost" if balances else "off")
        monkeypatch.setattr(run_balance, "settings", lambda config=config: config)
        restore(saved)
        assert RUN.balance.restored == (reached if balances else None)
    assert "estimates of density" not in capsys.readouterr().out
    for change in (
        dict(price=0.1),
        dict(policy="fixed"),
        dict(block_size=64),
        dict(seq_length=1024),
        dict(data_path=["b", "a"]),
    ):
        ours = {name: value for name, value in change.items() if not hasattr(args, name)}
        other = MTrainingConfig.from_options(batching="cost", **ours)
        monkeypatch.setattr(run_balance, "settings", lambda config=other: config)
        now = Namespace(**{**vars(args), **{k: v for k, v in change.items() if k not in ours}})
        RUN.balance.restored = None
        restore(saved)
        assert RUN.balance.restored is None, change
        assert "another pattern, sequence length or blend" in capsys.readouterr().out
    monkeypatch.setattr(run_balance, "settings", lambda: config)
    now = args
    saved.mtraining_balance_reached = {"version": 99}
    with pytest.raises(ConfigError, match="--finetune leaves them out"):
        restore(saved)
    saved.mtraining_balance_reached = None
    restore(saved)


def test_layers_with_settings_of_their_own_go_on_at_their_prices(monkeypatch):
    args = Namespace(
        attention_backend=AttnBackend["mtraining"], num_layers=2, num_attention_heads=2
    )
    of_run, own = (MTrainingConfig.from_options(target_recall=at) for at in (0.9, 0.8))

    def run(*configs):
        monkeypatch.setattr(RUN, "_steerings", {})
        return [RUN.steering_of(config, 2, 2) for config in configs]

    for module in (checkpoint, run_state, run_balance):
        monkeypatch.setattr(module, "training_arguments", lambda: args)
    for module in (run_state, run_balance):
        monkeypatch.setattr(module, "settings", lambda: of_run)
    first, second = run(own, of_run)  # the first layer has its own
    first.restore([[0.5] * 2] * 2)
    second.restore([[0.7] * 2] * 2)

    def move(steering):
        price = steering.price(torch.device("cpu"), 0, 0, 2)
        steering.observe(0.9 * price[None])
        steering.advance(1, RankGroup(None))

    for steering in (first, second):
        move(steering)
    saved = pickle.loads(pickle.dumps(state_of(args)["args"]))
    reached = saved.mtraining_price_reached, *saved.mtraining_further_prices_reached
    assert reached == (first.state(), second.state())
    restore = wrap_check_checkpoint_args(lambda checkpoint_args: None)
    ended, (first, second) = (first, second), run(own, of_run)
    restore(saved)
    assert (first.state(), second.state()) == reached
    for before, after in zip(ended, (first, second)):
        assert after.history() == before.history()
        move(before)
        move(after)
        assert after.history() == before.history(), "it moves as if there had been no stop"
    saved.mtraining_price_reached = [[0.5] * 2] * 2
    del saved.mtraining_further_prices_reached  # as checkpoints used to be
    del saved.mtraining_price_histories
    first, second = run(own, of_run)
    restore(saved)
    assert first.now() == 0.5
    saved.mtraining_further_prices_reached = [0.7]
    run(of_run)
    with pytest.raises(ConfigError, match="prices of 2 target recalls.*has 1; --finetune"):
        restore(saved)
    monkeypatch.setattr(run_state, "settings", lambda: MTrainingConfig.from_options(price=0.3))
    run()
    restore(saved)  # with a fixed price, none is needed


def test_runs_that_balance_nothing_save_no_estimates(monkeypatch):
    monkeypatch.setattr(RUN.balance, "planner", None)
    args = Namespace(attention_backend=AttnBackend["mtraining"])
    assert state_of(args)["args"].mtraining_balance_reached is None
