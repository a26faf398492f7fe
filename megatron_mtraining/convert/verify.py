# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert verify``: logits of the two models on the same text, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from ..config import ConfigError, MTrainingConfig
from .hf_folder import Shards

ROWS = 256
"""Tokens whose logits exist at once."""
RANGES = 8
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


def verify(options: Verify) -> dict:
    """Run both models, and compare.

    Returns:
        ``tokens``, ``ranges`` (of each: its first and last position, max and mean difference of logits,
        and the share of tokens whose most likely word is the same), and the same over all under
        ``all``, with the perplexities.

    Raises:
        ConfigError: a model cannot be loaded, or the text is too short.
    """
    tokens, source = _tokens(options)
    theirs = _hugging_face(options, tokens)
    ours = _megatron(options, source, tokens)
    return _compare(tokens, theirs, ours)


def _tokens(options: Verify) -> tuple[Tensor, object]:
    """The tokens, int64 ``[s]``, and the opened Megatron checkpoint."""
    from ..inspect.hugging_face import HuggingFace
    from ..inspect.megatron_checkpoint import open_checkpoint
    from ..inspect.options import require
    from ..inspect.text import tokens_for

    require("transformers")
    if not (options.hugging_face / "config.json").is_file():
        raise ConfigError(f"SRC is {options.hugging_face}, which has no config.json")
    Shards(options.hugging_face)  # are whole
    common = dict(
        device=options.device, dtype=options.dtype, yarn=None, tokenizer=None, seq_length=None
    )
    megatron = open_checkpoint(SimpleNamespace(model=options.megatron, **common))
    folder = HuggingFace(
        SimpleNamespace(model=options.hugging_face, **common), options.hugging_face, {}, nullcontext
    )
    if folder.shape.vocabulary > megatron.shape.vocabulary:
        raise ConfigError(
            f"{options.hugging_face} has {folder.shape.vocabulary} words, and {options.megatron} "
            f"{megatron.shape.vocabulary}: they are not the same model"
        )
    paths = options.text or (Path(argparse.__file__),)
    tokens = tokens_for(
        list(paths), options.seq_length, min(folder.shape.positions, megatron.shape.positions),
        MTrainingConfig(price=0.0).block_size, folder.tokenizer, "give fewer"
    )  # fmt: skip
    if int(tokens.max()) >= folder.shape.vocabulary:
        raise ConfigError(
            f"--text has the token {int(tokens.max())}, but SRC has {folder.shape.vocabulary} words"
        )
    return tokens, megatron


@torch.no_grad()
def _hugging_face(options: Verify, tokens: Tensor) -> Callable[[int, int], Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        options.hugging_face, dtype=options.dtype, attn_implementation="sdpa", local_files_only=True
    )
    model = model.to(options.device).eval()
    hidden = model.base_model(
        input_ids=tokens[None].to(options.device), use_cache=False
    ).last_hidden_state[0]
    head = model.get_output_embeddings().weight
    return lambda begin, end: hidden[begin:end] @ head.T


@torch.no_grad()
def _megatron(options: Verify, source, tokens: Tensor) -> Callable[[int, int], Tensor]:
    from megatron.core.transformer.enums import AttnBackend

    from .. import register
    from ..inspect.megatron_checkpoint import _one_process, _quietly

    _quietly(register)

    def ours(config) -> None:
        config.attention_backend = AttnBackend.mtraining
        config.mtraining = MTrainingConfig(price=0.0)  # keeps everything

    with _one_process(options.device):
        model = _quietly(lambda: source._model(output_layer=True, prepare=ours))
        tied = model.share_embeddings_and_output_weights
        head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        model.post_process = (
            False  # what comes before the output layer, for its logits to be made in parts
        )
        ids = tokens[None].to(options.device)
        positions = torch.arange(len(tokens), device=options.device)[None]
        hidden = _quietly(lambda: model(ids, positions, None))[:, 0]
    return lambda begin, end: hidden[begin:end] @ head.T


@torch.no_grad()
def _compare(tokens: Tensor, theirs, ours) -> dict:
    length = len(tokens)
    edges = [length * part // RANGES for part in range(RANGES + 1)]
    losses = torch.zeros(2, dtype=torch.float64)
    ranges = []
    for begin, end in zip(edges, edges[1:]):
        largest, total, same, count = 0.0, 0.0, 0, 0
        for low, high in _parts(begin, end):
            first = theirs(low, high).float()
            second = ours(low, high).float()[:, : first.shape[1]]
            difference = (first - second).abs()
            largest = max(largest, float(difference.max()))
            total += float(difference.double().sum())
            count += difference.numel()
            same += int((first.argmax(1) == second.argmax(1)).sum())
            following = tokens[low + 1 : high + 1].to(first.device)
            for number, logits in enumerate((first, second)):
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
        max=max(part["max"] for part in ranges),
        mean=sum(part["mean"] * (part["last"] + 1 - part["first"]) for part in ranges) / length,
        top1=sum(part["top1"] * (part["last"] + 1 - part["first"]) for part in ranges) / length,
        perplexity_hugging_face=perplexity[0],
        perplexity_megatron=perplexity[1],
    )
    return dict(tokens=length, ranges=ranges, all=whole)


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
    return (
        f"{table(header, rows)}\n\nPerplexity: {whole['perplexity_hugging_face']:.5f} (Hugging Face), "
        f"{whole['perplexity_megatron']:.5f} (Megatron)"
    )
