# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The jobs of ``four.py`` by stage: those of layers here, those of training in ``training_jobs.py``.

A job says what it runs, and the rows that say that it has run.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layer.ring_cases import Case, host_cases
from .host import FULL, STAGES, Host, Job, K
from .training_jobs import balancer_jobs, parity_jobs, step_jobs


def jobs_of(stages: list[str], host: Host) -> list[Job]:
    """The jobs of the stages, in their order."""
    makers = dict(
        layer=layer_jobs, balance=balance_jobs, steps=step_jobs, sparsebalance=balancer_jobs,
        parity=parity_jobs,
    )  # fmt: skip
    return [job for stage in STAGES if stage in stages for job in makers[stage](host)]


def left_out(stages: list[str], host: Host) -> list[str]:
    """What of the stages cannot run here, and why."""
    found = []
    if not host.has_te:
        found += ["Transformer Engine is not installed, or there is no GPU:"]
        if "layer" in stages:
            found.append("  layer: no row of its dense ring (te_p2p)")
        if "steps" in stages:
            found.append("  steps: no dense steps")
        if "parity" in stages:
            found.append("  parity: no layouts of dense attention, the yardstick")
    if host.gpus < 4:
        found += [f"{host.gpus} ranks: no layouts of 4 ranks, no inner groups of 2, no DP 2 x CP 2"]
        if "steps" in stages and host.sizes is FULL:
            found += [
                "  steps: no steps of more than 256K tokens a GPU, none dense of more than 128K"
            ]
    return found


# Layers.

LAYER_SECONDS = {128 * K: (270, 110), 256 * K: (300, 130), 512 * K: (340, 200)}
"""Of the two jobs of a length on four GPUs: up to 45 of each setting are the compilers'."""


def _rings(host: Host, seq: int, inner: list[int], *words: str) -> tuple[str, ...]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", host.gpus]
    run += ["-m", "benchmarks.layer.rings", "--inner", *inner, "--shape", *host.sizes.shape]
    run += ["--device", host.device, "--output", host.folder / "rings.jsonl", *words]
    if host.sizes.lengths[seq] != seq:
        run += ["--seq", host.sizes.lengths[seq]]
    return tuple(map(str, run))


def layer_jobs(host: Host) -> Iterator[Job]:
    """A length and a group of settings each, with others' dense rings in the same run as ours of all pairs. A
    run of all settings would not end in a call: the kernels of each are compiled first."""
    levels = {0: ("mtraining_flat", host.gpus)} | (
        {2: ("mtraining_hier", 2)} if host.gpus == 4 else {}
    )
    for seq, tokens in host.sizes.lengths.items():
        groups = _groups(seq) if host.sizes is FULL else {"all": host_cases(seq)}
        for (group, cases), seconds in zip(groups.items(), LAYER_SECONDS[seq]):
            rows = [
                dict(impl=impl, world=host.gpus, inner=inner, case=_named(case, tokens), hosts=1)
                for case in cases
                for impl, inner in levels.values()
            ]
            impls = ["te_p2p"] * host.has_te + ["torch_cp_cudnn"] * (host.device == "cuda")
            rows += [
                dict(impl=impl, world=host.gpus, case=_named(case, tokens), hosts=1)
                for case in cases
                for impl in impls
                if case.slash == seq and not case.threshold
            ]
            words = ["--dense-once", "--budget", str(host.sizes.budget)]
            words += ["--case", *(case.name for case in cases)]
            yield Job(
                "layer", f"{tokens // K}K, {group}", host.seconds(seconds, 40),
                _rings(host, seq, list(levels), *words), "rings.jsonl", tuple(rows),
            )  # fmt: skip


def _groups(seq: int) -> dict[str, list[Case]]:
    """The settings of the layer table by the job that runs them. What is compared with dense rings is in one
    run with them."""
    cases = host_cases(seq)
    later = [case for case in cases if case.slash == seq and case.threshold]
    return {
        "side by side": [case for case in cases if case not in later],
        "all pairs pruned": later,
    }


def _named(case, tokens: int) -> str:
    return case.name if tokens == case.seq else case.at(tokens).name


def balance_jobs(host: Host) -> Iterator[Job]:
    """A length each: the sparse settings over a plain ring, whose rounds are single ranks' keys."""
    for seq, tokens in host.sizes.lengths.items():
        if seq == 256 * K:
            continue
        cases = [case for case in host_cases(seq) if case.slash != seq]
        rows = tuple(
            dict(
                impl="mtraining_flat", world=host.gpus, inner=1, case=_named(case, tokens), hosts=1
            )
            for case in cases
        )
        words = ["--impl", "mtraining", "--budget", "0", "--case", *(case.name for case in cases)]
        yield Job(
            "balance", f"{tokens // K}K, a ring of single ranks",
            host.seconds({128 * K: 220, 512 * K: 260}[seq], 40), _rings(host, seq, [1], *words),
            "rings.jsonl", rows,
        )  # fmt: skip
