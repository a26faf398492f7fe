# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The training data loader of a balanced run, against Megatron's own sampler."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.utils import Split
from megatron.core.transformer.enums import AttnBackend
from torch.utils.data import DataLoader, Dataset

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.balance.coefficients import CPU
from megatron_mtraining.balance.estimates import DensityEstimates
from megatron_mtraining.balance.latency import AttentionShape, predict
from megatron_mtraining.balance.plan import PlanSizes, Samples
from megatron_mtraining.balance.planner import Planner
from megatron_mtraining.megatron.balance import batching
from megatron_mtraining.megatron.balance.batching import BalancedSampler
from megatron_mtraining.megatron.balance.options import predictor
from megatron_mtraining.megatron.balance.run import RunBalance
from megatron_mtraining.megatron.run_state import RUN
from tests.support.balance_cases import long_tailed, training_dataset, write_documents

samplers = pytest.importorskip("megatron.training.datasets.data_samplers")
SEQ = 128


def look_up(numbers: np.ndarray) -> Samples:
    longest = np.exp(np.random.default_rng(int(numbers[0])).normal(8, 1, len(numbers))).astype(int)
    return Samples(numbers, np.zeros(len(numbers), np.int32), longest, longest * (longest + 1) / 2)


def micro_batches(total, consumed, sizes, batching, first_step=0) -> list[list[list[int]]]:
    """Of each rank."""

    def planner():
        return Planner(
            first_step, consumed, total, sizes, batching, look_up, lambda pairs, density: pairs
        )  # fmt: skip

    return [list(BalancedSampler(planner(), rank)) for rank in range(sizes.dp_size)]


def megatrons(total, consumed, sizes) -> list[list[list[int]]]:
    own = samplers.MegatronPretrainingSampler
    size, ranks = sizes.micro_batch_size, sizes.dp_size
    return [list(own(total, consumed, size, rank, ranks)) for rank in range(ranks)]


def steps(of_ranks, sizes) -> list[list[int]]:
    """The samples of each step, sorted."""
    number = sizes.num_microbatches
    return [
        sorted(sample for own in of_ranks for batch in own[at : at + number] for sample in batch)
        for at in range(0, len(of_ranks[0]), number)
    ]


@pytest.mark.parametrize("total", [96, 103, 7])
@pytest.mark.parametrize("sizes", [PlanSizes(4, 2, 1), PlanSizes(2, 3, 2), PlanSizes(1, 4, 2)])
def test_global_batches_have_the_samples_that_megatrons_have(total, sizes):
    """The incomplete one at the end, which Megatron begins and cannot finish, and its missing ranks too."""
    theirs = megatrons(total, 0, sizes)
    assert micro_batches(total, 0, sizes, "off") == theirs
    for mode in ("length", "cost"):
        ours = micro_batches(total, 0, sizes, mode)
        assert [len(each) for each in ours] == [len(each) for each in theirs]
        assert steps(ours, sizes) == steps(theirs, sizes)
        assert ours != theirs or total < sizes.samples or sizes.dp_size == 1


class Numbers(Dataset):
    """Its own numbers, as a dataset of Megatron's."""

    def __init__(self, split=Split.train):
        self.index_split = split

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return number


@pytest.fixture
def run(monkeypatch):
    """Lets Megatron's arguments say something, and gives the wrapped function around Megatron's sampler."""

    def start(workers=0, options=(), iteration=0, dp=(1, 2), **others):
        config = MTrainingConfig.from_options(**{"batching": "cost", **dict(options)})
        args = SimpleNamespace(
            attention_backend=AttnBackend.mtraining, seq_length=SEQ, micro_batch_size=2, global_batch_size=8,
            iteration=iteration, num_attention_heads=4, kv_channels=64, hidden_size=256, num_layers=2,
            context_parallel_size=1, reset_attention_mask=True, **others,
        )  # fmt: skip
        monkeypatch.setattr(batching, "training_arguments", lambda: args)
        monkeypatch.setattr(batching, "settings", lambda: config)
        monkeypatch.setattr(RUN, "balance", RunBalance(RUN.step_now))

        def original(dataset, consumed_samples):
            if dataset is None:
                return None
            sampler = samplers.MegatronPretrainingSampler(len(dataset), consumed_samples, 2, *dp)
            return DataLoader(
                dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0,
                worker_init_fn=print if workers else None, collate_fn=list,
            )  # fmt: skip

        return batching.wrap_build_data_loader(original)

    return start


@pytest.fixture
def dataset(tmp_path):
    write_documents(tmp_path / "part", long_tailed(300, 400))
    return training_dataset([tmp_path / "part"], tmp_path / "cache", 60, SEQ)


def test_the_loader_is_megatrons_but_for_its_sampler(run, dataset):
    build = run(iteration=3)
    loader = build(dataset, 24)
    planner = RUN.balance.planner
    assert planner.first_step == 3 and planner.first_sample == 24 and planner.lag == 3
    plan = planner.plan_of(3)
    assert sorted(plan.order.ravel()) == list(range(24, 32))
    own = iter(loader.batch_sampler)
    assert [next(own) for _ in range(2)] == plan.order[:, 1].tolist()
    assert len(set(plan.pairs.ravel().tolist())) > 1 and (plan.predicted_ms > 0).all()
    first = next(iter(loader))
    assert [each["tokens"].tolist() for each in first] == [
        dataset[number]["tokens"].tolist() for number in plan.order[0, 1]
    ]
    shared = build(dataset, 24).batch_sampler.planner
    assert shared is RUN.balance.planner, "a model chunk's loader shares it"
    loader = run(workers=2)(dataset, 0)
    kept = (loader.num_workers, loader.persistent_workers, loader.worker_init_fn, loader.collate_fn)
    assert kept == (2, True, print, list) and loader.prefetch_factor == 2
    assert RUN.balance.planner.lag == 5


def test_other_splits_and_runs_keep_megatrons(run, dataset):
    build = run()
    assert build(None, 0) is None
    for split in (Split.valid, Split.test):
        assert type(build(Numbers(split), 0).batch_sampler) is samplers.MegatronPretrainingSampler
    build = run(options=dict(batching="off"))
    assert type(build(dataset, 0).batch_sampler) is samplers.MegatronPretrainingSampler
    assert RUN.balance.planner is None


def test_by_length_nothing_is_predicted(run, dataset):
    run(options=dict(batching="length"))(dataset, 0)
    plan = RUN.balance.planner.plan_of(0)
    assert np.isnan(plan.predicted_ms).all() and np.isfinite(plan.density).all()
    assert plan.pairs.sum((0, 2)) == pytest.approx(plan.pairs.sum() / 2, rel=0.2)


def test_with_tuning_alone_the_order_is_megatrons(run, dataset):
    loader = run(options=dict(batching="off", tuning="on"))(dataset, 0)
    theirs = samplers.MegatronPretrainingSampler(len(dataset), 0, 2, 1, 2)
    assert len(set(RUN.balance.planner.plan_of(0).predicted_ms.ravel().tolist())) > 1
    assert list(loader.batch_sampler) == list(theirs)


def test_restored_estimates_are_those_of_the_first_plan(run, dataset):
    build = run(iteration=2)
    known = DensityEstimates()
    known.observe(np.array([[[0, 6]]]), [0.625], [0.5])
    RUN.balance.restored = known.state()
    build(dataset, 16)
    assert RUN.balance.planner.plan_of(2).density == pytest.approx(0.625)


def test_loaders_and_datasets_of_others_are_named(run):
    with pytest.raises(
        ConfigError, match="the training dataset is a Numbers: --mtraining-batching and"
    ):
        run()(Numbers(), 0)
    build = batching.wrap_build_data_loader(lambda dataset, consumed: [dataset])
    with pytest.raises(
        ConfigError, match=r"replaces Megatron's MegatronPretrainingSampler, but .* a list"
    ):
        build(Numbers(), 0)


def test_predicted_times_are_of_all_layers_on_one_rank():
    config = MTrainingConfig.from_options(batching="cost")
    usual = dict(
        num_attention_heads=8, kv_channels=64, hidden_size=512, num_layers=3,
        context_parallel_size=2, tensor_model_parallel_size=2, group_query_attention=True, num_query_groups=4,
    )  # fmt: skip
    pairs, density = np.array([1e6, 8e6]), np.array([0.2, 0.1])
    found = predictor(SimpleNamespace(**usual), config, 4096)(pairs, density)
    shape = AttentionShape(4, 2, 64)
    one = predict(CPU["vertical_slash", 64], 4096, pairs, density, shape, packed=False, cp_size=2)
    assert found == pytest.approx(3 * one.total_ms)
    again = MTrainingConfig.from_options(batching="cost", recompute_attention=True)
    full = SimpleNamespace(**usual, recompute_granularity="full")
    found = predictor(full, again, 4096)(pairs, density)
    assert found == pytest.approx(3 * (one.total_ms + one.forward_ms))
