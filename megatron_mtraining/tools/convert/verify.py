# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert verify``: the logits of a Hugging Face model and of a Megatron checkpoint, compared."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import MTrainingConfig, PricePolicy
from ...errors import ConfigError
from ...models.environment import quietly, single_process
from ...models.hugging_face import open_folder
from ...models.megatron_checkpoint import MegatronCheckpoint
from ...models.megatron_flags import megatron_training
from ...models.pretrained import LOCAL, REPORTED, check_whole_model, reason
from ...models.text import tokens_for
from ...models.types import ModelOptions
from ...requirements import first_line, require
from ..report.table import table
from .families import FAMILIES, Model, model_of
from .fields import wrong_types_refused
from .hf_folder import Shards, has_tokenizer, read_json
from .mapping import mapped
from .megatron_args import (
    check_expressible,
    check_same,
    flags,
    what_megatron_drops,
)
from .rope import into_config, rope_of
from .to_megatron import check_tensors

CHUNK = 256
"""Tokens whose logits exist at once."""
RANGES = 8
"""Ranges of positions that are reported separately."""
MIN_AGREEMENT, MIN_AGREEMENT_16 = 0.99, 0.9
"""Default of --min-agreement in float32, and in 16 bits. There rounding alone changes the top-1 token at one
position in twenty of tiny random models."""
DENSE = MTrainingConfig(policy=PricePolicy(price=0.0))
"""Attention backend mtraining without sparsity."""
MOST_ROTATED = 1e-4
"""Largest relative difference of rotary frequencies or scales of one model; rounding makes 1e-6."""


class Run(NamedTuple):
    """A model that has run.

    Attributes:
        logits: returns its logits ``[n, vocab]`` from one position to another.
        rotation: ``[2, dim]`` float64, the angles of its rotary positions from one token to the next, and the
            scales; None without rotary positions. On a short text a wrong one hardly shows in the logits.
    """

    logits: Callable[[int, int], Tensor]
    rotation: Tensor | None


class Opened(NamedTuple):
    """What :func:`verify` compares.

    Attributes:
        tokens: int64 ``[s]``.
        positions: config.json with the checkpoint's positions, if they are others (``convert hf-to-megatron
            --yarn``), else None.
        flags: Megatron-LM's flags of the checkpoint's model; None if they do not describe it.
    """

    tokens: Tensor
    checkpoint: MegatronCheckpoint
    positions: dict | None
    flags: list[str] | None


def verify(
    hugging_face: ModelOptions,
    megatron: ModelOptions,
    *,
    text: Sequence[Path] = (),
    seq: int | None = None,
    min_agreement: float | None = None,
) -> dict:
    """Run both models on the same tokens, and compare their logits.

    The arguments are the command line's; see ``mtraining convert verify --help``.

    Returns:
        ``tokens``; ``ranges``, a list of: first and last position, maximum and mean difference of logits, and
        the fraction of positions with the same top-1 token; under ``all`` the same over all positions, with
        the perplexities; ``min_agreement``;
        ``checksums``, whether the checkpoint has any; ``positions``, the rotary positions of the checkpoint
        that both ran with, if config.json's are others, else None; ``rotation``, the largest relative
        difference of the angles and scales of these, or None; ``flags``, whose parser and model builder
        have read Megatron-LM's flags, or None; ``warning``, of a flag that Megatron-LM drops; and under
        ``differs`` why the models differ, or None.

    Raises:
        ConfigError: a model cannot be loaded, or the text is too short.
    """
    if min_agreement is None:
        exact = hugging_face.dtype == torch.float32
        min_agreement = MIN_AGREEMENT if exact else MIN_AGREEMENT_16
    try:
        opened = _open(hugging_face, megatron, list(text), seq)
        checkpoint, positions = opened.checkpoint, opened.positions
        version = quietly(megatron_training) if opened.flags else None
        theirs = _hugging_face(hugging_face, opened.tokens, positions)
        ours = _megatron(megatron, checkpoint, opened.tokens, opened.flags if version else None)
        found = _compare(opened.tokens, theirs.logits, ours.logits)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{hugging_face.device} has too little memory for two models: use fewer tokens (--seq), or "
            f"--device cpu ({first_line(error)})"
        ) from None
    found["min_agreement"] = min_agreement
    found["checksums"] = checkpoint.checksums
    found["positions"] = positions and rope_of(positions)
    found["rotation"] = _rotation_difference(theirs.rotation, ours.rotation)
    found["flags"] = opened.flags and (f"Megatron-LM {version}" if version else "mtraining")
    found["warning"] = what_megatron_drops(checkpoint.args) if opened.flags else ""
    found["differs"] = _differs(found, (hugging_face.name, megatron.name), min_agreement)
    return found


def _open(
    hugging_face: ModelOptions, megatron: ModelOptions, text: list[Path], seq: int | None
) -> Opened:
    """Both models, after all checks that need no weights."""
    require("transformers", extra="convert")
    folder, name = hugging_face.path, hugging_face.name
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{name} is {folder}, which has no config.json")
    text = text or [Path(argparse.__file__)]
    are_ids = len(text) == 1 and text[0].suffix in (".npy", ".bin")
    if not are_ids and not has_tokenizer(folder):
        raise ConfigError(
            f"{name} is {folder}, which has no tokenizer: give --text as token ids, a .npy file"
        )
    shards, config = Shards(folder), read_json(file)
    model = None
    if config.get("architectures") in [[family] for family in FAMILIES]:
        with wrong_types_refused(file):
            model = model_of(config, file)
        check_tensors(shards, list(mapped(model)), model)
    ours, theirs = MegatronCheckpoint(megatron), open_folder(hugging_face)
    positions = words = None
    if model is not None:
        label = ours.options.label
        with wrong_types_refused(label):
            check_expressible(model, ours.args, label)
            converted = into_config(config, ours.args, file)
            words = _flags(model, ours, file)
        positions = None if rope_of(converted) == rope_of(config) else converted
    vocabulary = theirs.shape.vocabulary
    if vocabulary > ours.shape.vocabulary:
        raise ConfigError(
            f"{folder} has {vocabulary} vocabulary entries, and {megatron.path} "
            f"{ours.shape.vocabulary}: they are not the same model"
        )
    tokens = tokens_for(
        text,
        seq,
        ours.shape.positions if positions else min(theirs.shape.positions, ours.shape.positions),
        DENSE.block_size,
        theirs.tokenizer,
        "give fewer",
        name="the shorter of SRC and DST",
    )
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocabulary:
            raise ConfigError(
                f"--text has the token id {token}, but {name} has {vocabulary} vocabulary entries"
            )
    return Opened(tokens, ours, positions, words)


def _flags(model: Model, checkpoint: MegatronCheckpoint, file: Path) -> list[str] | None:
    """Megatron-LM's flags of a checkpoint's model; None if they would describe another one."""
    try:
        check_same(model, checkpoint.args, checkpoint.options.label, str(file))
        return [word for line in flags(checkpoint.args) for word in line]
    except (ConfigError, AttributeError):
        return None  # another model, as its logits show, or arguments that are not whole


@torch.no_grad()
def _hugging_face(options: ModelOptions, tokens: Tensor, config: dict | None) -> Run:
    """A Hugging Face model; ``config`` replaces its config.json."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    given = {}
    if config is not None:
        given["config"] = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            options.path,
            dtype=options.dtype,
            attn_implementation="sdpa",
            **given,
            **LOCAL,
            **REPORTED,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers cannot load the weights of {options.label} as its config.json says: "
            f"{reason(error)}"
        ) from None
    check_whole_model(options.label, info)
    model = model.to(options.device).eval()
    ids = tokens[None].to(options.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings().weight
    rotation, embedding = None, getattr(model.base_model, "rotary_emb", None)
    if embedding is not None:
        like = torch.zeros(1, device=options.device)
        cos, sin = embedding(like, torch.ones(1, 1, dtype=torch.int64, device=options.device))
        cos, sin = cos[0, 0].double().cpu(), sin[0, 0].double().cpu()
        rotation = torch.stack([torch.atan2(sin, cos), torch.hypot(sin, cos)])
    return Run(lambda begin, end: hidden[begin:end] @ head.T, rotation)


@torch.no_grad()
def _megatron(
    options: ModelOptions, checkpoint: MegatronCheckpoint, tokens: Tensor, flags: list[str] | None
) -> Run:
    """A Megatron checkpoint, built of ``flags`` by Megatron-LM, or without them by this package."""
    from megatron.core.transformer.enums import AttnBackend

    from ... import register

    quietly(register)

    def use_mtraining(config) -> None:
        config.attention_backend = AttnBackend.mtraining
        config.mtraining = DENSE

    with single_process(options.device):
        model = quietly(
            lambda: checkpoint.model(output_layer=True, prepare=use_mtraining, flags=flags)
        )
        tied = model.share_embeddings_and_output_weights
        head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        model.post_process = False  # returns the output layer's input, for logits in chunks
        ids = tokens[None].to(options.device)
        positions = torch.arange(len(tokens), device=options.device)[None]
        hidden = quietly(lambda: model(ids, positions, None))[:, 0]
        rotation, embedding = None, getattr(model, "rotary_pos_emb", None)
        if embedding is not None:
            table = embedding.get_emb(2)
            table, scale = table if isinstance(table, tuple) else (table, 1.0)
            angles = table[1, 0, 0].double().cpu()
            rotation = torch.stack([angles, torch.full_like(angles, scale)])
    return Run(lambda begin, end: hidden[begin:end] @ head.T, rotation)


def _rotation_difference(first: Tensor | None, second: Tensor | None) -> float | None:
    if first is None or second is None or first.shape != second.shape:
        return None
    return float(((first - second).abs() / torch.maximum(first.abs(), second.abs())).max())


@torch.no_grad()
def _compare(tokens: Tensor, theirs: Callable, ours: Callable) -> dict:
    length = len(tokens)
    edges = [length * part // RANGES for part in range(RANGES + 1)]
    losses = torch.zeros(2, dtype=torch.float64)
    not_finite = [0, 0]  # positions
    ranges = []
    for begin, end in zip(edges, edges[1:]):
        largest, total, same, count = 0.0, 0.0, 0, 0
        for low in range(begin, end, CHUNK):
            high = min(low + CHUNK, end)
            first = theirs(low, high).float()
            second = ours(low, high).float()[:, : first.shape[1]]
            difference = (first - second).abs()
            largest = _max([largest, float(difference.max())])
            total += float(difference.double().sum())
            count += difference.numel()
            same += int((first.argmax(1) == second.argmax(1)).sum())
            labels = tokens[low + 1 : high + 1].to(first.device)
            for side, logits in enumerate((first, second)):
                not_finite[side] += int((~logits.isfinite()).any(1).sum())
                loss = torch.nn.functional.cross_entropy(
                    logits[: len(labels)], labels, reduction="sum"
                )
                losses[side] += loss.double().cpu()
        top1 = same / (end - begin)
        ranges.append(dict(first=begin, last=end - 1, max=largest, mean=total / count, top1=top1))

    def mean(name: str) -> float:
        return sum(part[name] * (part["last"] + 1 - part["first"]) for part in ranges) / length

    perplexity = (losses / (length - 1)).exp().tolist()
    whole = dict(
        max=_max([part["max"] for part in ranges]),
        mean=mean("mean"),
        top1=mean("top1"),
        perplexity_hugging_face=perplexity[0],
        perplexity_megatron=perplexity[1],
        not_finite_hugging_face=not_finite[0],
        not_finite_megatron=not_finite[1],
    )
    return dict(tokens=length, ranges=ranges, all=whole)


def _max(values: list[float]) -> float:
    """The largest value; NaN if there is one, which Python's max may drop."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _differs(found: dict, names: tuple[str, str], minimum: float) -> str | None:
    """Why the models differ, or None."""
    whole = found["all"]
    counts = whole["not_finite_hugging_face"], whole["not_finite_megatron"]
    for name, count in zip(names, counts):
        if count:
            return f"logits of {name} are not finite at {count} of {found['tokens']} positions"
    if whole["top1"] < minimum:
        return (
            f"the top-1 token is the same at {whole['top1']:.2%} of positions, below --min-agreement "
            f"{minimum:.2%}: they are not the same model"
        )
    if found["rotation"] is not None and not found["rotation"] <= MOST_ROTATED:
        return (
            f"their rotary positions differ (frequencies or scale by up to {found['rotation']:.0%}), which "
            "shows on longer texts"
        )
    return None


def as_text(found: dict) -> str:
    """The result as a table, with the verdict in its last line."""
    whole = found["all"]
    rows = [
        [name, f"{part['max']:.2e}", f"{part['mean']:.2e}", f"{part['top1']:.2%}"]
        for name, part in [(f"{p['first']} to {p['last']}", p) for p in found["ranges"]]
        + [("all", whole)]
    ]
    header = ["positions", "max difference", "mean difference", "same top-1 token"]
    verdict = f"the top-1 token is the same at {whole['top1']:.2%} of positions"
    if found.get("positions"):
        verdict = f"PASS of the weights: {verdict}; config.json has other rotary positions"
    else:
        verdict = f"PASS: {verdict}"
    if found["differs"]:
        verdict = f"FAIL: {found['differs']}"
    checksums = "the checkpoint's files fit its checksums"
    if not found["checksums"]:
        checksums = (
            "the checkpoint has none (integrity.json): whether bytes have changed since it was saved that "
            "the text does not show is not known"
        )
    positions = ""
    if found.get("positions"):
        told = ", ".join(f"{name} {value}" for name, value in found["positions"].items())
        positions = (
            f"Positions: both models ran with the checkpoint's ({told}); config.json has others\n"
        )
    flags = ""
    if found.get("flags") == "mtraining":
        flags = (
            "Flags: as mtraining reads them; whether a Megatron-LM does was not checked: put its checkout on "
            "PYTHONPATH\n"
        )
    elif found.get("flags"):
        flags = f"Flags: as the parser and model builder of {found['flags']} read them\n"
    if found.get("warning"):
        flags += f"Warning: {found['warning']}\n"
    return (
        f"{table(header, rows)}\n\nChecksums: {checksums}\n{flags}{positions}"
        f"Perplexity: {whole['perplexity_hugging_face']:.5f} (Hugging Face), "
        f"{whole['perplexity_megatron']:.5f} (Megatron)\n{verdict}"
    )


def as_json(found):
    """The result for a JSON file: null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(found, dict):
        return {name: as_json(value) for name, value in found.items()}
    if isinstance(found, list):
        return [as_json(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
