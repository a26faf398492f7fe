# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a model is trained on and judged by: windows of real text, and samples with a needle."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining import ConfigError
from megatron_mtraining.models.tokenizer import open_tokenizer

from . import sets, texts

HELD_OUT = 0.1
"""The last share of each text, which nothing is trained on, if ``--held-out-share`` says no other."""
SHARES = {"code": 0.7, "book": 0.15, "speech": 0.15, "c": 0.15, "json": 0.15}
"""Of the training tokens, over their sum: of books there is little, and it is not to be learnt by heart."""
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = "\nThe access code of the {key} is {value}.\n"
QUESTION = "\nThe access code of the {key} is"
KEYS = (
    "harbour",
    "library",
    "observatory",
    "greenhouse",
    "lighthouse",
    "archive",
    "workshop",
    "theatre",
)


class Material(NamedTuple):
    """What all runs of a model and length are given."""

    tokens: dict[str, np.ndarray]
    held_out: dict[str, Tensor]
    """By kind of text: int64 ``[n, seq + 1]``, evenly over what is held out, on the device."""
    needles: Tensor
    """int64 ``[n, seq + 1]``: their last tokens are the answer."""
    answers: list[int]
    """Tokens of each answer."""


_made: dict = {}


def add_options(parser: argparse.ArgumentParser, needs_model: bool = True) -> None:
    """Options of all scripts that judge a model so."""
    add = parser.add_argument
    texts.add_options(parser, needs_model)
    add("--kinds", nargs="+", choices=sets.KINDS, default=["code", "book", "speech"],
        help="kinds of text (%(default)s)")  # fmt: skip
    add("--seq", type=int, default=16384)
    add("--held-out", type=int, default=6, help="held-out windows of each kind, at most")
    add("--held-out-share", type=float, default=HELD_OUT, metavar="SHARE",
        help="the last share of each text is held out (%(default)s)")  # fmt: skip
    add("--needles", type=int, default=25, help="samples with a needle")
    add("--ruler", type=Path, metavar="FILE",
        help="RULER's samples (benchmarks.model.ruler_samples), to judge trained models by")  # fmt: skip


def material(options) -> Material:
    """Held-out windows of each kind of text, and samples with a needle. Made once in a process.

    Raises:
        ConfigError: a text is too short for one window.
    """
    names = ("model", "cache", "seq", "held_out", "needles", "device", "kinds", "held_out_share")
    key = tuple(str(getattr(options, name)) for name in names)
    if key not in _made or options.cache is None:
        _made.clear()
        _made[key] = _material(options)
    return _made[key]


def _material(options) -> Material:
    tokens = {kind: each for kind, each in texts.read(options).items() if kind in options.kinds}
    if not tokens:
        raise ConfigError(f"no text of {', '.join(options.kinds)}: give --text or another --cache")
    source = texts.Texts(tokens, held_out=True, share=options.held_out_share)
    held_out = {}
    for kind, stream in source.streams.items():
        count = min(options.held_out, (len(stream) - 1) // options.seq)
        if count < 1:
            raise ConfigError(
                f"text {kind} has {len(stream)} held-out tokens, fewer than one window of {options.seq + 1}: "
                "give more text, or another --kinds"
            )
        starts = np.linspace(0, len(stream) - options.seq - 1, count).round().astype(int)
        windows = [stream[start : start + options.seq + 1] for start in starts]
        held_out[kind] = torch.from_numpy(np.stack(windows).astype(np.int64)).to(options.device)
    needles, answers = needles_of(source, options)
    return Material(tokens, held_out, needles.to(options.device), answers)


def needles_of(source: texts.Texts, options) -> tuple[Tensor, list[int]]:
    """Samples of held-out text with a sentence at a depth of it, and a question at the end; and how many
    tokens each answer has. The same for all runs."""
    encode = open_tokenizer(options.model).encode
    rng = random.Random(0)
    kinds, found, counts = list(source.streams), [], []
    for number in range(options.needles):
        key, value = rng.choice(KEYS), str(rng.randint(10**6, 10**7 - 1))
        needle = list(encode(NEEDLE.format(key=key, value=value)))
        question = list(encode(QUESTION.format(key=key)))
        whole = list(encode(QUESTION.format(key=key) + " " + value))
        answer = whole[len(question) :]
        room = options.seq + 1 - len(needle) - len(whole)
        if room < 1 or whole[: len(question)] != question or not answer:
            raise ConfigError(
                f"--seq {options.seq} or this tokenizer does not fit the needle samples"
            )
        text = source.cut(kinds[number % len(kinds)], room).tolist()
        at = round(room * DEPTHS[number % len(DEPTHS)])
        found.append([*text[:at], *needle, *text[at:], *whole])
        counts.append(len(answer))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, options.seq + 1), counts


def training(tokens: dict[str, np.ndarray], steps: int, seed: int, options) -> Tensor:
    """The sequences of a run, int64 ``[steps, seq + 1]``: consecutive windows of each kind of text from a
    place that the seed gives; kinds in their shares, in an order that the seed gives."""
    source = texts.Texts(tokens, seed=seed, share=options.held_out_share)
    shares = np.array([SHARES[kind] for kind in tokens])
    order = np.random.default_rng(seed).choice(len(shares), steps, p=shares / shares.sum())
    windows = [source.cut(list(tokens)[kind], options.seq + 1) for kind in order]
    return torch.from_numpy(np.stack(windows).astype(np.int64))
