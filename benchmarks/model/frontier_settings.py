# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Runs of the frontier by name, their rows, and a model at settings with a wanted density."""

from __future__ import annotations

import argparse

import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config.schedule import NAMED
from megatron_mtraining.transformers import configure, state_of, take_means

from ..lib import jobs, record
from ..lib.policies_at_density import AS_PUBLISHED_BY_BLOCK, FAMILIES, Found, at_density, config_of
from . import continuing, texts
from .frontier_rows import decay_of
from .material import Material


def split(name: str) -> tuple[str, float | str | None]:
    """``price@0.15`` as the policy and the wanted density (of target: recall; of schedule: its points, and
    after a ``/`` the threshold of the backward); dense has none."""
    policy, at, number = name.partition("@")
    if policy == "schedule" and number:
        return policy, _scheduled(name, *number.split("/", 1))
    try:
        wanted = float(number) if at else None
    except ValueError:
        wanted = -1.0
    known = policy in FAMILIES or policy == "target"
    fits = (known and wanted is not None and 0 < wanted < 1) or (
        policy == "dense" and wanted is None
    )
    if not fits:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not dense, target@RECALL, schedule@POINTS[/THRESHOLD], or "
            f"POLICY@DENSITY of {', '.join(FAMILIES)}"
        )
    return policy, wanted


def _scheduled(name: str, points: str, threshold: str = "0") -> str:
    """Points and threshold of a schedule as rows have them: names may mean other points one day."""
    points = NAMED["schedule"].get(points, points)
    try:
        pruned = float(threshold)
        MTrainingConfig.from_options(schedule=points, backward_threshold=pruned)
    except (ValueError, ConfigError) as error:
        raise argparse.ArgumentTypeError(f"{name!r}: {error}") from None
    return f"{points}/{pruned:g}" if pruned else points


def about(options) -> dict:
    """What all rows of a model say."""
    return dict(
        model=options.model.name, seq=options.seq, block_size=options.block_size,
        data=texts.fingerprint(options),
        versions={name: record.installed(name) for name in ("torch", "transformers", "triton")},
    )  # fmt: skip


def rows_like(options, stage: str, **values) -> list[dict]:
    """Rows of the output of a stage, model and length, with these values; of training, with the decay of the
    learning rate. On the same text, but for the settings that ``zero`` finds: they hardly differ, and its
    rows compare within themselves."""
    values |= dict(
        stage=stage, model=options.model.name, seq=options.seq, block_size=options.block_size
    )
    if stage != "zero":
        values["data"] = texts.fingerprint(options)
    rows = jobs.read(options.output)
    if stage == "train":
        rows = [row for row in rows if decay_of(row) == options.decay]
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def on_frontier(options) -> argparse.Namespace:
    """Options whose rows are those of the frontier, for scripts that have rows of their own."""
    return argparse.Namespace(**{**vars(options), "output": options.frontier})


def dense_run(options, seed: int) -> dict | None:
    """The frontier's row of dense training with these steps; None if there is none."""
    found = rows_like(
        on_frontier(options), "train", policy="dense", seed=seed, steps=options.steps, lr=options.lr
    )
    return found[-1] if found else None


class Judge:
    """Judges a model at settings.

    Args:
        given: held-out text and needles.
    """

    def __init__(self, options, given: Material):
        self.options, self.given = options, given
        self.model, self.yarn = continuing.load(options)
        self.tried: dict[str, dict[float, Found]] = {}
        self._dense: dict | None = None

    @torch.no_grad()
    def density(self, setting) -> float:
        """The share of the pairs that a setting attends to, on one window of each kind."""
        configure(self.model, config_of(setting, self.options.block_size))
        for windows in self.given.held_out.values():
            continuing.hidden_of(self.model, windows[0, :-1])
        return take_means(self.model, training=False).density.double().mean().item()

    def find(self, policy: str, wanted: float) -> Found:
        """The setting of a policy at a density."""
        options = self.options
        known = self.tried.setdefault(policy, {})
        return at_density(policy, wanted, options.seq, options.block_size, self.density, known)

    def dense(self) -> dict:
        """Losses and answers of dense attention."""
        if self._dense is None:
            self.model.set_attn_implementation("sdpa")
            losses = continuing.judged(self.model, self.given.held_out)
            answers = continuing.answered(self.model, self.given)
            self._dense = dict(loss=losses["all"], by_text=losses, **answers)
        return self._dense

    def row(self, setting) -> dict:
        """What a row says of a setting; of dense attention for None."""
        dense, density, recall = self.dense(), 1.0, 1.0
        found = dense
        if setting is not None:
            configure(self.model, config_of(setting, self.options.block_size))
            losses = continuing.judged(self.model, self.given.held_out)
            means = take_means(self.model, training=False)
            density, recall = (each.double().mean().item() for each in means)
            answers = continuing.answered(self.model, self.given)
            tail = continuing.DENSE_TAIL + continuing.longest_answer(self.given)
            state_of(self.model).dense_tail = tail
            for name, value in continuing.answered(self.model, self.given).items():
                answers[f"{name}_tail"] = value
            found = dict(loss=losses["all"], by_text=losses, **answers)
        return dict(
            setting=setting, density=round(density, 5), recall=round(recall, 5), **found,
            zero_over_dense=round(found["loss"] / dense["loss"] - 1, 6),
            **{f"dense_{name}": value for name, value in dense.items()},
            windows={kind: len(each) for kind, each in self.given.held_out.items()},
            needles=len(self.given.needles), yarn=self.yarn,
        )  # fmt: skip


def setting_of(policy: str, wanted: float | str | None, options, given) -> dict | None:
    """The options that a run attends with; None for dense.

    Raises:
        ConfigError: the policy cannot have this density.
    """
    if policy == "dense":
        return None
    if policy == "target":
        return dict(policy="price", target_recall=wanted)
    if policy == "schedule":
        steps, _, threshold = wanted.partition("/")
        return dict(policy="price", schedule=steps, backward_threshold=float(threshold or 0))
    rows = rows_like(options, "zero", policy=policy, wanted=wanted)
    if rows:
        setting, density, reached = rows[-1]["setting"], rows[-1]["density"], rows[-1]["reached"]
        if policy in AS_PUBLISHED_BY_BLOCK:  # rows from before there was another way
            setting = {**setting, "block_lookahead": True}
    else:
        found = Judge(options, given).find(policy, wanted)
        setting, density, reached = found.setting, found.density, found.is_near(wanted)
    if not reached:
        raise ConfigError(
            f"policy {policy} cannot have density {wanted}: the nearest is {density:.4f}"
        )
    return setting
