# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron to Hugging Face: ``mtraining convert megatron-to-hf``."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...config import ConfigError
from . import arguments, positions
from .dtypes import check_loss
from .families import Model, model_of
from .hf_folder import Planned, copy_files, read_json, write_json, write_shards
from .names import Mapped, mapped, part_of, places
from .target import MODEL, Progress, Target
from .torch_dist import Reader, same_bits

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class ToHuggingFace:
    """What the command line asks for; see ``mtraining convert megatron-to-hf --help``."""

    source: Path
    target: Path
    like: Path | None = None
    dtype: torch.dtype | None = None
    allow_dtype_loss: bool = False
    vocab_size: int | None = None
    shard_bytes: int = 5 * 10**9
    overwrite: bool = False


def convert(options: ToHuggingFace) -> None:
    """Write a Megatron checkpoint's model as a Hugging Face folder.

    Raises:
        ConfigError: see the checks; the target is as it was.
    """
    from ...models.megatron_folder import find_iteration

    if not options.source.is_dir():
        raise ConfigError(f"SRC is {options.source}, which is no folder")
    target = Target(options.target, options.overwrite, MODEL, options.source)
    folder = find_iteration(options.source, "SRC")
    like = _like(options, folder)
    target.check_place(folder, like)
    file = like / "config.json"
    config = read_json(file)
    if options.vocab_size is not None:
        config["vocab_size"] = options.vocab_size
    args = read_args(folder)
    model = model_of(config, file)
    arguments.check_same(model, args, str(folder), str(file))
    reader = Reader(folder)
    model = replace(model, padded_vocab=_rows(reader, model, folder, file))
    found = _locate(reader, model, folder, file)
    if model.tied:
        _check_tied(reader, model, folder, file)
    config = positions.into_config(config, args, file)
    plan = []
    for tensor, (key, *_) in found:
        stored = reader.tensors[key][1]
        dtype = options.dtype or stored
        check_loss(key, folder, stored, dtype, options.allow_dtype_loss)
        plan.append(Planned(tensor.name, tensor.shape, dtype))
    _set_dtype(config, plan)

    def tensors():
        for planned, (tensor, (key, _, offset, region)) in zip(plan, found):
            part = reader.read(key, offset, region)
            if tensor.part:
                part = part_of(
                    model, part.reshape(region[len(region) - len(tensor.shape) :]), tensor.part
                )
            part = part.reshape(tensor.shape)
            # A copy of its own: the part that was read is let go.
            yield part.to(planned.dtype, copy=bool(tensor.part))

    size = sum(planned.bytes for planned in plan)
    with target.whole(size) as made:
        with Progress("megatron-to-hf", size) as progress:
            write_shards(made, plan, tensors(), options.shard_bytes, progress.advance)
        copy_files(like, made)
        write_json(made / "config.json", config)


def read_args(folder: Path) -> Namespace:
    """The arguments of the run that saved a checkpoint."""
    from ...models.megatron_folder import args_in, read_common

    return args_in(read_common(folder, str(folder)), str(folder))


def _like(options: ToHuggingFace, folder: Path) -> Path:
    """Where config.json and the tokenizer come from."""
    if options.like is not None:
        if not (options.like / "config.json").is_file():
            raise ConfigError(f"--like is {options.like}, which has no config.json")
        return options.like
    for place in (options.source / "hf", folder.parent / "hf"):
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        f"SRC is {options.source}, which keeps no config.json and tokenizer (hf/ of a converted checkpoint "
        "does): name the folder of the model that training began from with --like"
    )


def _rows(reader: Reader, model: Model, folder: Path, file: Path) -> int:
    key = EMBEDDING
    if key not in reader.tensors:
        near = ", ".join(sorted(reader.tensors)[:3]) or "none"
        raise ConfigError(
            f"{folder} has no {key}; among its tensors are {near}: is it a GPT model's?"
        )
    rows = reader.tensors[key][0][0]
    if rows < model.vocab:
        raise ConfigError(
            f"{folder}: {key} has {rows} rows, fewer than vocab_size in {file} ({model.vocab}): the run was "
            f"without --padded-vocab-size {model.vocab}; --vocab-size {rows} writes what there is"
        )
    return rows


def _locate(reader: Reader, model: Model, folder: Path, file: Path) -> list[tuple[Mapped, tuple]]:
    """Each tensor of Hugging Face's, and where the checkpoint has it."""
    found, used = [], set()
    for tensor in mapped(model):
        place = next((place for place in places(tensor) if place[0] in reader.tensors), None)
        if place is None:
            raise ConfigError(f"{folder} has no {tensor.key}, which {tensor.name} of {file} is in")
        key, size, *_ = place
        if reader.tensors[key][0] != size:
            raise ConfigError(
                f"{folder}: {key} is of shape {list(reader.tensors[key][0])}, and {file} says {list(size)}"
            )
        found.append((tensor, place))
        used |= {key, tensor.also}
    for key in reader.tensors:
        ours = key.startswith(("decoder.", "embedding.", "output_layer."))
        tied = model.tied and key == HEAD
        if ours and key not in used and "_extra_state" not in key and not tied:
            raise ConfigError(
                f"{folder}: {key} is not a tensor of a {model.family.architecture}: nothing is left out"
            )
    return found


def _check_tied(reader: Reader, model: Model, folder: Path, file: Path) -> None:
    """An output layer that was saved although it is the embedding has the embedding's bits."""
    if HEAD not in reader.tensors:
        return

    def read(begin, end):
        place = (begin, 0), (end - begin, model.hidden)
        return tuple(reader.read(key, *place) for key in (EMBEDDING, HEAD))

    alike = reader.tensors[EMBEDDING] == reader.tensors[HEAD]
    if not (alike and same_bits(model.padded_vocab, 4 * model.hidden, read)):
        raise ConfigError(
            f"{folder}: {HEAD} is not the same as {EMBEDDING}, though {file} has tie_word_embeddings true: "
            "give the folder of a model with an output layer of its own with --like"
        )


def _set_dtype(config: dict, plan: list[Planned]) -> None:
    """config.json's dtype, which transformers loads a model in: as it was, if weights of it are there, else
    that of most bytes."""
    fields = [field for field in ("torch_dtype", "dtype") if field in config] or ["torch_dtype"]
    sizes: Counter[str] = Counter()
    for planned in plan:
        sizes[str(planned.dtype).removeprefix("torch.")] += planned.bytes
    if any(config.get(field) not in list(sizes) for field in fields):
        for field in fields:
            config[field] = sizes.most_common(1)[0][0]
