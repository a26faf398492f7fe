# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
import gc
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining.megatron import density as module
from megatron_mtraining.megatron.density import DensityMeter, take_density


@pytest.fixture(autouse=True)
def no_meters():
    gc.collect()
    take_density()


def test_means_over_calls_layers_and_heads():
    first, second = DensityMeter(), DensityMeter()
    first.add(torch.tensor([[0.1, 0.3], [0.3, 0.5]]), torch.tensor([[0.8, 0.6], [1.0, 0.8]]))
    second.add(torch.tensor([[0.6, 0.8]]))
    density = take_density()
    share = density.density
    assert share.mean == pytest.approx((0.2 + 0.4 + 0.6 + 0.8) / 4)
    assert share.lowest == pytest.approx(0.2) and share.highest == pytest.approx(0.8)
    assert density.recall.mean == pytest.approx((0.9 + 0.7 + 1 + 1) / 4)
    assert density.recall.lowest == pytest.approx(0.7)
    assert take_density() is None, "taken"


def test_a_layer_that_is_recomputed_weighs_no_more():
    once, twice = DensityMeter(), DensityMeter()
    once.add(torch.tensor([[0.2]]))
    for _ in range(2):
        twice.add(torch.tensor([[0.4]]))
    assert take_density().density.mean == pytest.approx(0.3)


def test_meters_of_deleted_models_are_gone():
    meter = DensityMeter()
    meter.add(torch.ones(1, 1))
    del meter
    gc.collect()
    assert take_density() is None


def test_line():
    kept = module.Density(module.Share(0.0421, 0.01, 0.09), module.Share(0.95, 0.8, 1.0))
    line = (
        " [mtraining] iteration 10 | density 0.0421 (lowest head 0.0100, highest 0.0900) | recall 0.9500 "
        "(lowest head 0.8000)"
    )
    assert kept.line(10) == line
    assert kept.line(10, 0.25) == line + " | price 0.25"


@pytest.mark.parametrize("backend", [AttnBackend.mtraining, AttnBackend.auto])
def test_log_on_megatron_s_interval_and_only_in_our_runs(backend, monkeypatch):
    args = SimpleNamespace(attention_backend=backend, log_interval=5)
    monkeypatch.setattr(module, "training_arguments", lambda: args)
    logged, called = [], []
    monkeypatch.setattr(module, "log_density", logged.append)
    ended = []
    monkeypatch.setattr(module, "end_step", ended.append)

    def original(loss_dict, iteration, is_first_iteration=False):
        called.append(iteration)
        return "report_memory_flag"

    training_log = module.wrap_training_log(original)
    assert training_log({}, 1, is_first_iteration=True) == "report_memory_flag"
    for iteration in range(2, 11):
        training_log({}, iteration=iteration)
    assert called == list(range(1, 11))
    assert ended == (called if backend is AttnBackend.mtraining else [])
    assert logged == ([1, 5, 10] if backend is AttnBackend.mtraining else [])
