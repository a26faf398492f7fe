# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert verify``: logits of the two models on the same text, side by side."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...config import ConfigError, MTrainingConfig
from ...requirements import first_line, require
from .families import FAMILIES, model_of
from .hf_folder import Shards, has_tokenizer, read_json
from .names import mapped
from .to_megatron import check_names

ROWS = 256
"""Tokens whose logits exist at once."""
RANGES = 8
MIN_AGREEMENT, MIN_AGREEMENT_16 = 0.99, 0.9
"""Least share of positions where the most likely word is the same: in float32, and in 16 bits, whose rounding
alone changes a word in twenty of tiny random models. Of two models of one family, few are."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Verify:
    """What the command line asks for; see ``mtraining convert verify --help``."""

    hugging_face: Path
    megatron: Path
    text: tuple[Path, ...] = ()
    seq_length: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    output: Path | None = None
    min_agreement: float | None = None
    names: tuple[str, str] = ("SRC", "DST")
    """What the command line calls the two folders."""


def verify(options: Verify) -> dict:
    """Run both models, and compare.

    Returns:
        ``tokens``, ``ranges`` (of each: its first and last position, max and mean difference of logits,
        and the share of tokens whose most likely word is the same), and the same over all under
        ``all``, with the perplexities; ``min_agreement``, and under ``differs`` what is wrong, if anything.

    Raises:
        ConfigError: a model cannot be loaded, the text is too short, or there is no place for the output.
    """
    _check_output(options.output)
    try:
        tokens, source = _tokens(options)
        theirs = _hugging_face(options, tokens)
        ours = _megatron(options, source, tokens)
        found = _compare(tokens, theirs, ours)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{options.device} has too little memory for two models: give fewer tokens with --seq, or "
            f"--device cpu ({first_line(error)})"
        ) from None
    minimum = options.min_agreement
    if minimum is None:
        minimum = MIN_AGREEMENT if options.dtype == torch.float32 else MIN_AGREEMENT_16
    return {**found, "min_agreement": minimum, "differs": _differs(options, found, minimum)}


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"--output is {output}: name a file in a folder that exists")


def _tokens(options: Verify) -> tuple[Tensor, object]:
    """The tokens, int64 ``[s]``, and the opened Megatron checkpoint."""
    from ...models.hugging_face import open_folder
    from ...models.megatron_checkpoint import MegatronCheckpoint
    from ...models.text import tokens_for
    from ...models.types import ModelOptions

    require("transformers", extra="convert")
    theirs, ours = options.names
    if not (options.hugging_face / "config.json").is_file():
        raise ConfigError(f"{theirs} is {options.hugging_face}, which has no config.json")
    paths = options.text or (Path(argparse.__file__),)
    are_ids = len(paths) == 1 and paths[0].suffix in (".npy", ".bin")
    if not are_ids and not has_tokenizer(options.hugging_face):
        raise ConfigError(
            f"{theirs} is {options.hugging_face}, which has no tokenizer: give --text as token ids, a .npy "
            "file"
        )
    _check_weights(options.hugging_face)
    common = dict(device=options.device, dtype=options.dtype)
    megatron = MegatronCheckpoint(ModelOptions(options.megatron, name=ours, **common))
    folder = open_folder(ModelOptions(options.hugging_face, name=theirs, **common))
    if folder.shape.vocabulary > megatron.shape.vocabulary:
        raise ConfigError(
            f"{options.hugging_face} has {folder.shape.vocabulary} words, and {options.megatron} "
            f"{megatron.shape.vocabulary}: they are not the same model"
        )

    tokens = tokens_for(
        list(paths), options.seq_length, min(folder.shape.positions, megatron.shape.positions),
        MTrainingConfig(price=0.0).block_size, folder.tokenizer, "give fewer",
        name="the shorter of SRC and DST",
    )  # fmt: skip
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < folder.shape.vocabulary:
            raise ConfigError(
                f"--text has the token {token}, but {theirs} has {folder.shape.vocabulary} words"
            )
    return tokens, megatron


def _check_weights(folder: Path) -> None:
    """All shards are whole, and tensors those of config.json, where its family is known here."""
    shards, file = Shards(folder), folder / "config.json"
    config = read_json(file)
    if config.get("architectures") in [[name] for name in FAMILIES]:
        model = model_of(config, file)
        check_names(shards, list(mapped(model)), model)


@torch.no_grad()
def _hugging_face(options: Verify, tokens: Tensor) -> Callable[[int, int], Tensor]:
    from transformers import AutoModelForCausalLM

    place = f"{options.names[0]} ({options.hugging_face})"
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            options.hugging_face, dtype=options.dtype, attn_implementation="sdpa", local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers cannot load the weights of {place} as its config.json says: {first_line(error)}"
        ) from None
    if missing := sorted(told["missing_keys"]):
        raise ConfigError(f"{place} has no {missing[0]}, which its config.json's model has")
    model = model.to(options.device).eval()
    hidden = model.base_model(
        input_ids=tokens[None].to(options.device), use_cache=False
    ).last_hidden_state[0]
    head = model.get_output_embeddings().weight
    return lambda begin, end: hidden[begin:end] @ head.T


@torch.no_grad()
def _megatron(options: Verify, source, tokens: Tensor) -> Callable[[int, int], Tensor]:
    from megatron.core.transformer.enums import AttnBackend

    from ... import register
    from ...models.environment import quietly, single_process

    quietly(register)

    def ours(config) -> None:
        config.attention_backend = AttnBackend.mtraining
        config.mtraining = MTrainingConfig(price=0.0)  # keeps everything

    with single_process(options.device):
        model = quietly(lambda: source.model(output_layer=True, prepare=ours))
        tied = model.share_embeddings_and_output_weights
        head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        # What comes before the output layer, for its logits to be made in parts.
        model.post_process = False
        ids = tokens[None].to(options.device)
        positions = torch.arange(len(tokens), device=options.device)[None]
        hidden = quietly(lambda: model(ids, positions, None))[:, 0]
    return lambda begin, end: hidden[begin:end] @ head.T


@torch.no_grad()
def _compare(tokens: Tensor, theirs, ours) -> dict:
    length = len(tokens)
    edges = [length * part // RANGES for part in range(RANGES + 1)]
    losses = torch.zeros(2, dtype=torch.float64)
    broken = [0, 0]  # positions with logits that are not finite
    ranges = []
    for begin, end in zip(edges, edges[1:]):
        largest, total, same, count = 0.0, 0.0, 0, 0
        for low, high in _parts(begin, end):
            first = theirs(low, high).float()
            second = ours(low, high).float()[:, : first.shape[1]]
            difference = (first - second).abs()
            largest = _max([largest, float(difference.max())])
            total += float(difference.double().sum())
            count += difference.numel()
            same += int((first.argmax(1) == second.argmax(1)).sum())
            following = tokens[low + 1 : high + 1].to(first.device)
            for number, logits in enumerate((first, second)):
                broken[number] += int((~logits.isfinite()).any(1).sum())
                losses[number] += torch.nn.functional.cross_entropy(
                    logits[: len(following)], following, reduction="sum"
                ).double().cpu()  # fmt: skip
        ranges.append(
            dict(
                first=begin,
                last=end - 1,
                max=largest,
                mean=total / count,
                top1=same / (end - begin),
            )
        )
    perplexity = (losses / (length - 1)).exp().tolist()
    whole = dict(
        max=_max([part["max"] for part in ranges]),
        mean=sum(part["mean"] * (part["last"] + 1 - part["first"]) for part in ranges) / length,
        top1=sum(part["top1"] * (part["last"] + 1 - part["first"]) for part in ranges) / length,
        perplexity_hugging_face=perplexity[0],
        perplexity_megatron=perplexity[1],
        not_finite_hugging_face=broken[0],
        not_finite_megatron=broken[1],
    )
    return dict(tokens=length, ranges=ranges, all=whole)


def _max(values: list[float]) -> float:
    """With NaN, which Python's drops, as the largest."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _differs(options: Verify, found: dict, minimum: float) -> str | None:
    """What is wrong, or None where the two are one model."""
    whole = found["all"]
    for name, count in zip(
        options.names, (whole["not_finite_hugging_face"], whole["not_finite_megatron"])
    ):
        if count:
            return f"logits of {name} are not finite at {count} of {found['tokens']} positions"
    if whole["top1"] < minimum:
        return (
            f"the most likely word is the same at {whole['top1']:.2%} of positions, and {minimum:.2%} are "
            "asked for (--min-agreement): they are not the same model"
        )
    return None


def _parts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for low in range(begin, end, ROWS):
        yield low, min(low + ROWS, end)


def as_text(found: dict) -> str:
    """The table."""
    from ..report.table import table

    rows = [
        [f"{p['first']} to {p['last']}", f"{p['max']:.2e}", f"{p['mean']:.2e}", f"{p['top1']:.2%}"]
        for p in found["ranges"]
    ]
    whole = found["all"]
    rows.append(["all", f"{whole['max']:.2e}", f"{whole['mean']:.2e}", f"{whole['top1']:.2%}"])
    header = ["positions", "max difference", "mean difference", "same top-1 word"]
    said = f"PASS: the most likely word is the same at {whole['top1']:.2%} of positions"
    if found["differs"]:
        said = f"FAIL: {found['differs']}"
    return (
        f"{table(header, rows)}\n\nPerplexity: {whole['perplexity_hugging_face']:.5f} (Hugging Face), "
        f"{whole['perplexity_megatron']:.5f} (Megatron)\n{said}"
    )


def as_json(found):
    """The numbers for a file: JSON has no NaN, and null is in its place."""
    if isinstance(found, dict):
        return {name: as_json(value) for name, value in found.items()}
    if isinstance(found, list):
        return [as_json(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
