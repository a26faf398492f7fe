# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Density and recall: their running means, over ranks, and the lines and figures of the log."""

import gc
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining.megatron import density as module
from megatron_mtraining.megatron import run_state
from megatron_mtraining.megatron.density import DensityMeter, take_density
from megatron_mtraining.megatron.run_state import RunState
from megatron_mtraining.megatron.step_times import StepTimes
from megatron_mtraining.tools.run_report.sources import read
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def no_meters():
    gc.collect()
    take_density()


def test_means_over_calls_layers_and_heads():
    first, second = DensityMeter(0), DensityMeter(2)
    first.add(torch.tensor([[0.1, 0.3], [0.3, 0.5]]), torch.tensor([[0.8, 0.6], [1.0, 0.8]]))
    second.add(torch.tensor([[0.6, 0.8]]))
    density = take_density()
    share = density.density
    assert share.mean == pytest.approx((0.2 + 0.4 + 0.6 + 0.8) / 4)
    assert share.lowest == pytest.approx(0.2) and share.highest == pytest.approx(0.8)
    assert density.recall.mean == pytest.approx((0.9 + 0.7 + 1 + 1) / 4)
    assert density.recall.lowest == pytest.approx(0.7)
    assert density.heads.shape == (2, 3, 2)
    assert density.ran.tolist() == [[True] * 2, [False] * 2, [True] * 2]
    assert density.heads[0, 0].tolist() == pytest.approx([0.2, 0.4])
    assert density.heads[1, 2].tolist() == [1, 1]
    assert take_density() is None, "taken"


def test_recall_is_of_rows_that_could_lose_some():
    """Samples of short documents, here and on other ranks, do not make that of long ones look better."""
    meter, other = DensityMeter(0), DensityMeter(0)
    meter.add(torch.full((2, 1), 0.5), torch.tensor([[1.0], [0.95]]), torch.tensor([0.0, 0.5]))
    meter.add(torch.full((1, 1), 0.2), torch.tensor([[0.9]]), 1.0)
    other.add(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1))
    density = take_density()
    assert density.recall.mean == pytest.approx(0.9)
    assert density.density.mean == pytest.approx((0.4 + 1) / 2)


def ranks_of_two_stages(rank, world):
    """Ranks 0 and 1 have half the heads each of layer 0, rank 2 has layer 1, rank 3 none."""
    meters = [DensityMeter(0, 0), DensityMeter(0, 2), DensityMeter(1, 0)][rank : rank + 1]
    for meter in meters:
        heads = 4 if rank == 2 else 2
        meter.add(
            0.1 * (rank + 1) * torch.ones(1, heads), torch.tensor([[0.9, 0.8, 0.7, 0.6][:heads]])
        )
    density = take_density()
    return density.density, density.recall, density.heads


def test_every_layer_and_head_over_ranks():
    found = run_ranks(4, ranks_of_two_stages)
    for density, recall, heads in found:
        assert heads[0].tolist() == [pytest.approx([0.1, 0.1, 0.2, 0.2]), pytest.approx([0.3] * 4)]
        assert heads[1].tolist() == [
            pytest.approx([0.9, 0.8, 0.9, 0.8]), pytest.approx([0.9, 0.8, 0.7, 0.6]),
        ]  # fmt: skip
        assert density == module.Share(*map(pytest.approx, (0.225, 0.1, 0.3)))
        assert recall == module.Share(*map(pytest.approx, (0.8, 0.6, 0.9)))


def test_figures_have_every_layer():
    meter = DensityMeter(1)
    meter.add(torch.tensor([[0.1, 0.3]]), torch.tensor([[0.8, 0.6]]))
    figures = module.figures(take_density())
    assert figures["mtraining-recall-layers/01"] == pytest.approx(0.7)
    assert figures["mtraining-density/mean"] == pytest.approx(0.2)
    assert not any(name.endswith("/00") for name in figures)


def test_attention_that_is_nan_does_not_end_the_log(monkeypatch):
    global_vars = pytest.importorskip("megatron.training.global_vars")
    written = []
    writer = SimpleNamespace(
        add_scalar=lambda *given: written.append(given),
        add_histogram=lambda name, values, _: written.append((name, values.tolist())),
    )
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(global_vars, "get_wandb_writer", lambda: None)
    meter = DensityMeter()
    meter.add(torch.tensor([[0.25, 0.5]]), torch.full((1, 2), float("nan")))
    module.log_density(7, None, take_density())
    names = [name for name, *_ in written]
    assert ("mtraining-density/heads", [0.25, 0.5]) in written
    assert "mtraining-recall/heads" not in names and "mtraining-recall-layers/00" in names


@pytest.mark.parametrize(
    "price, density, expected", [(0.25, 0.99, 1), (0.25, 0.5, 0), (0.0, 1.0, 0), (None, 1.0, 0)]
)
def test_a_price_that_leaves_nothing_out_is_warned_of_once(
    price, density, expected, monkeypatch, capsys
):
    global_vars = pytest.importorskip("megatron.training.global_vars")
    for name in ("get_tensorboard_writer", "get_wandb_writer"):
        monkeypatch.setattr(global_vars, name, lambda: None)
    monkeypatch.setattr(module, "RUN", module.RUN.__class__())
    meter = DensityMeter()
    for _ in range(2):
        meter.add(torch.full((1, 2), density))
        module.log_density(1, price, take_density())
    printed = capsys.readouterr().out
    assert printed.count("warning: density is 0.9900") == expected, printed
    assert printed.count("--mtraining-price") == expected


def test_heads_at_a_cap_are_counted_in_steps_that_have_caps():
    first, second = DensityMeter(0), DensityMeter(1)
    for meter in (first, second):
        meter.add(torch.full((1, 2), 0.5))
    first.add_capped(torch.tensor([[True, False], [True, True]]))
    density = take_density()
    assert density.capped == pytest.approx(0.75)
    assert module.figures(density)["mtraining-capped/heads"] == pytest.approx(0.75)
    assert " | heads at a cap 75.0%" in density.line(1)
    first.add(torch.full((1, 2), 0.5))
    assert take_density().capped is None


def test_the_report_reads_the_line(tmp_path):
    meter = DensityMeter()
    meter.add(torch.full((1, 2), 0.5), torch.full((1, 2), 0.9))
    meter.add_backward(torch.full((1, 2), 0.25), torch.full((1, 2), 0.01))
    meter.add_capped(torch.tensor([[True, False]]))
    line = take_density().line(20, 0.5, 0.1, StepTimes(1, 2345.6, 0.3, 0.4, 1.25))
    (tmp_path / "run.log").write_text(f"{line}\n")
    series = read(tmp_path).series
    assert {name: values[20] for name, values in series.items()} == dict(
        density=0.5, density_lowest=0.5, density_highest=0.5, recall=0.9, recall_lowest=0.9,
        backward_density=0.25, capped=0.5, price=0.5, search_ms=1, attention_ms=2346, loss_ms=0.3,
        exposed_ms=0.4, imbalance=1.25,
    )  # fmt: skip


def test_meters_of_deleted_models_are_gone():
    meter = DensityMeter()
    meter.add(torch.ones(1, 1))
    del meter
    gc.collect()
    assert take_density() is None


def test_backwards_that_are_pruned():
    first, second = DensityMeter(0), DensityMeter(1)
    for meter in (first, second):
        meter.add(torch.full((1, 2), 0.5))
    first.add_backward(torch.tensor([[0.1, 0.3]]), torch.tensor([[0.02, 0.04]]))
    first.add_backward(torch.tensor([[0.3, 0.3]]), torch.tensor([[0.04, 0.04]]))
    density = take_density()
    assert density.backward.mean == pytest.approx(0.25)  # of the first layer alone
    assert density.computed == pytest.approx((0.5 + 2 * 0.25) / 3)
    assert density.dropped.mean == pytest.approx(0.035)
    assert density.dropped.highest == pytest.approx(0.04)
    assert density.density.mean == pytest.approx(0.5)
    expected = (
        " | backward density 0.2500 without 0.0350 of attention (highest head 0.0400) | price 2"
    )
    assert density.line(3, 2.0).endswith(expected)
    figures = module.figures(density)
    assert figures["mtraining-backward-density/mean"] == pytest.approx(0.25)
    assert figures["mtraining-backward-dropped/mean"] == pytest.approx(0.035)
    first.add(torch.full((1, 2), 0.5))
    density = take_density()
    assert density.backward is None and "backward" not in density.line(4)


def test_line():
    kept = module.Density(
        module.Share(0.0421, 0.01, 0.09), module.Share(0.95, 0.8, 1.0), None, None
    )
    line = (
        " [mtraining] iteration 10 | density 0.0421 (lowest head 0.0100, highest 0.0900) | recall 0.9500 "
        "(lowest head 0.8000)"
    )
    assert kept.line(10) == line
    assert kept.line(10, 0.25) == line + " | price 0.25"
    assert kept.line(10, 0.0, 0.905) == line + " | price 0 | schedule 90.5%"


def run_of_arguments(monkeypatch, backend: str) -> tuple[RunState, SimpleNamespace]:
    """A run that logs every 5 steps, and its arguments."""
    args = SimpleNamespace(attention_backend=AttnBackend[backend], log_interval=5)
    for each in (module, run_state):
        monkeypatch.setattr(each, "training_arguments", lambda: args)
    run = RunState()
    monkeypatch.setattr(module, "RUN", run)
    return run, args


def test_the_price_in_the_log_is_that_of_the_step(monkeypatch):
    run, _ = run_of_arguments(monkeypatch, "mtraining")
    prices = [0.2]
    run._steerings = {0: SimpleNamespace(now=lambda: prices[-1])}
    monkeypatch.setattr(module, "end_step", lambda iteration: prices.append(0.3))
    logged = []
    monkeypatch.setattr(module, "log_density", lambda *given: logged.append(given))
    module.wrap_training_log(lambda iteration: None)(1)
    assert logged == [(1, 0.2, None, None, None, None)]


def dense_operations(args, batch_size):
    """As Megatron 0.16 counts them, of which attention's are 6 d h s^2 in each layer."""
    attention = args.kv_channels * args.num_attention_heads * args.seq_length**2 * args.num_layers
    return batch_size * (1000 + 6 * attention)


def packed_operations(args, batch_size, seqlen_squared_sum_in_batch=None, total=None):
    """As 0.18 and later do with packed documents."""
    squares = seqlen_squared_sum_in_batch or batch_size * args.seq_length**2
    attention = args.kv_channels * args.num_attention_heads * squares * args.num_layers
    return batch_size * 1000 + 6 * attention


@pytest.mark.parametrize("given", [(3,), (3, None, None), (3, 77, 99)])
@pytest.mark.parametrize("backend", ["mtraining", "auto"])
def test_throughput_counts_the_pairs_that_attention_computed(backend, given, monkeypatch):
    """In the first line of the log, too, which is that of the density it counts by."""
    run, args = run_of_arguments(monkeypatch, backend)
    vars(args).update(kv_channels=64, num_attention_heads=2, num_layers=3, seq_length=8)
    original = dense_operations if len(given) == 1 else packed_operations
    operations = module.wrap_floating_point_operations(original)
    for name in ("end_step", "log_density"):
        monkeypatch.setattr(module, name, lambda *given: None)
    found = []
    training_log = module.wrap_training_log(
        lambda iteration: found.append(operations(args, *given))
    )
    meter = DensityMeter()
    for step, density in (1, 0.25), (2, 0.5), (5, 0.75), (10, float("nan")):
        meter.add(torch.full((1, 2), density))
        training_log(step)
    attention = original(args, *given) - 3000
    shares = [0.25, 0.25, 0.625, 0.625] if backend == "mtraining" else [1.0] * 4
    assert found == pytest.approx([3000 + share * attention for share in shares])


@pytest.mark.parametrize("backend, resumed", [("mtraining", 0), ("mtraining", 7), ("flash", 0)])
def test_steps_that_are_logged(backend, resumed, monkeypatch):
    """Known before a step as after it; in other training loops, any may be."""
    run, args = run_of_arguments(monkeypatch, backend)
    ended, logged, called, expected = [], [], [], []
    monkeypatch.setattr(module, "end_step", ended.append)
    monkeypatch.setattr(module, "log_density", lambda iteration, *_: logged.append(iteration))

    def original(iteration, is_first_iteration):
        called.append(iteration)
        return "report_memory_flag"

    training_log = module.wrap_training_log(original)
    for step in range(resumed, resumed + 12):
        args.curr_iteration = step
        if run.step_is_logged():
            expected.append(step + 1)
        found = training_log(iteration=step + 1, is_first_iteration=step == resumed)
        assert found == "report_memory_flag"
    assert called == list(range(resumed + 1, resumed + 13))
    if backend == "mtraining":
        by_interval = [step for step in (5, 10, 15) if resumed < step <= resumed + 12]
        assert logged == expected == [resumed + 1, *by_interval] and ended == called
    else:
        assert not logged and not ended and len(expected) == 12
