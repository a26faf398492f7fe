# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The training data loader of a balanced run: Megatron's own, with a batch sampler that follows the plans.

Each global batch has the samples that Megatron's sampler would give it. A run therefore resumes by the number
of consumed samples, as in Megatron, also at another data-parallel size. Ranks without a data loader (all
tensor-parallel ranks except the first, and middle pipeline stages) have no plans.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.datasets.utils import Split
from torch.utils.data import DataLoader

from ...balance.estimates import PRIOR_DENSITY, PRIOR_RECALL, DensityEstimates
from ...balance.placement import megatron_order
from ...balance.planner import Planner, lag_of
from ...config import ConfigError
from ..arguments import settings
from ..backend import is_active, training_arguments
from ..run_state import RUN
from .options import balancing_option, predictor, sizes_of
from .sample_documents import SampleDocuments

OWN = "MegatronPretrainingSampler"
"""Megatron's sampler of ``--dataloader-type single``."""


class BalancedSampler:
    """Yields the sample numbers of each micro-batch of this rank, like :data:`OWN`, by the plans of steps.

    At the end of the data, samples that do not fill a global batch come in Megatron's order. Samples that do
    not fill a micro-batch on all ranks are left out, as in Megatron.

    Args:
        planner: the plans.
        rank: data-parallel rank of this process.
    """

    def __init__(self, planner: Planner, rank: int):
        self.planner, self.rank = planner, rank

    def __len__(self) -> int:
        return self.planner.num_samples  # as Megatron's

    def __iter__(self) -> Iterator[list[int]]:
        step = self.planner.first_step
        while (plan := self.planner.plan_of(step)) is not None:
            yield from plan.order[:, self.rank].tolist()
            step += 1
        sizes, begin = self.planner.sizes, self.planner.samples_from(step)
        left = (self.planner.num_samples - begin) // (sizes.dp_size * sizes.micro_batch_size)
        if left > 0:
            order = begin + megatron_order(sizes.dp_size, left, sizes.micro_batch_size)
            yield from order[:, self.rank].tolist()


def wrap_build_data_loader(original):
    """``build_pretraining_data_loader`` that balances the training split."""

    def build_pretraining_data_loader(dataset, *others, **named):
        loader = original(dataset, *others, **named)
        args = training_arguments()
        if loader is None or not is_active(args):
            return loader
        config = settings()
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        if not config.balances or split in (Split.valid, Split.test):
            return loader
        sampler = getattr(loader, "batch_sampler", None)
        if type(sampler).__name__ != OWN:
            asked = balancing_option(config)
            raise ConfigError(
                f"{asked} replaces Megatron's {OWN}, but the training data loader is a "
                f"{type(loader).__name__} with a {type(sampler).__name__}: leave {asked} out"
            )
        planner = _planner(args, config, dataset, sampler, loader, RUN.balance.planner)
        RUN.balance.planner = planner
        return with_sampler(loader, BalancedSampler(planner, sampler.data_parallel_rank))

    return build_pretraining_data_loader


def _planner(args, config, dataset, sampler, loader: DataLoader, before: Planner | None) -> Planner:
    """The planner of a run: ``before`` if it is the same run, as each model chunk of a stage has a data
    loader."""
    dp_size = sampler.micro_batch_times_data_parallel_size // sampler.micro_batch_size
    sizes = sizes_of(args, dp_size)
    first = getattr(args, "iteration", 0) or 0, sampler.consumed_samples, sampler.total_samples
    if before is not None and before.sizes == sizes:
        if first == (before.first_step, before.first_sample, before.num_samples):
            return before
    kept = config.keeps_all(args.seq_length)
    estimates = DensityEstimates(*((1.0, 1.0) if kept else (PRIOR_DENSITY, PRIOR_RECALL)))
    if RUN.balance.restored is not None:
        estimates.restore(RUN.balance.restored)
    return Planner(
        *first,
        sizes,
        config.batching,
        SampleDocuments(dataset, args),
        predictor(args, config, args.seq_length),
        estimates,
        lag_of(loader.num_workers, loader.prefetch_factor or 0, sizes.num_microbatches),
    )


def with_sampler(loader: DataLoader, sampler: BalancedSampler) -> DataLoader:
    """A data loader like ``loader`` with another batch sampler. torch does not allow replacing the
    sampler."""
    workers = {}
    if loader.num_workers > 0:
        workers = dict(
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=loader.multiprocessing_context,
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,  # type: ignore[arg-type]  # torch's type is a Sampler, any iterable works
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **workers,
    )
