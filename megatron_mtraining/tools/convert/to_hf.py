# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron to Hugging Face: ``mtraining convert megatron-to-hf``."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import ConfigError
from ...models.integrity import verify_checksums
from ...models.megatron_folder import args_in, find_iteration, read_common
from . import megatron_args, rope
from .families import Model, model_of
from .fields import wrong_types_refused
from .hf_folder import Planned, check_lossless, copy_files, read_json, write_json, write_shards
from .mapping import Mapped, Region, locations, mapped, part_of
from .target_folder import MODEL, Target, progress
from .torch_dist import Reader, same_bits

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def convert(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    allow_dtype_loss: bool = False,
    vocab_size: int | None = None,
    shard_size: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write a Megatron checkpoint's model as a Hugging Face folder.

    The arguments are the command line's; see ``mtraining convert megatron-to-hf --help``.

    Raises:
        ConfigError: the checkpoint or the target cannot be used; nothing has changed then.
    """
    if not source.is_dir():
        raise ConfigError(f"SRC is {source}, which is not a folder")
    output = Target(target, overwrite, MODEL, source)
    folder = find_iteration(source, "SRC")
    like = like or _kept_config(source, folder)
    output.check_place(folder, like)
    file = like / "config.json"
    config = read_json(file)
    said = f"vocab_size in {file}"
    if vocab_size is not None:
        config["vocab_size"], said = vocab_size, "--vocab-size"
    args = read_args(folder)
    with wrong_types_refused(file):
        model = model_of(config, file)
    with wrong_types_refused(folder):
        megatron_args.check_same(model, args, str(folder), str(file))
    reader = Reader(folder)
    model = replace(model, padded_vocab=_embedding_rows(reader, model, folder, said))
    tensors = _locate(reader, model, folder, file)
    verify_checksums(folder)
    if model.tied:
        _check_tied(reader, model, folder, file)
    with wrong_types_refused(folder):
        config = rope.into_config(config, args, file)
    plan = []
    for tensor, region in tensors:
        stored = reader.tensors[region.key][1]
        check_lossless(region.key, folder, stored, dtype or stored, allow_dtype_loss)
        plan.append(Planned(tensor.name, tensor.shape, dtype or stored))
    _set_dtype(config, plan)

    def converted():
        for planned, (tensor, region) in zip(plan, tensors):
            content = reader.read(region)
            if tensor.part:
                # Without the dimensions of layers and experts.
                content = content.reshape(region.sizes[-len(tensor.shape) :])
                content = part_of(model, content, tensor.part)
            # A copy, for the region that was read not to be kept.
            yield content.reshape(tensor.shape).to(planned.dtype, copy=bool(tensor.part))

    size = sum(planned.bytes for planned in plan)
    with output.written(size) as made:
        with progress("megatron-to-hf", size) as bar:
            write_shards(made, plan, converted(), shard_size, bar.update)
        copy_files(like, made)
        write_json(made / "config.json", config)


def read_args(folder: Path) -> Namespace:
    """The arguments of the run that saved a checkpoint."""
    return args_in(read_common(folder, str(folder)), str(folder))


def _kept_config(source: Path, folder: Path) -> Path:
    """The folder with config.json and tokenizer in a checkpoint that was converted."""
    for place in (source / "hf", folder.parent / "hf"):
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        f"SRC is {source}, which has no hf/ with config.json and tokenizer (a converted checkpoint "
        "has): name the folder of the model that training began from with --like"
    )


def _embedding_rows(reader: Reader, model: Model, folder: Path, said: str) -> int:
    if EMBEDDING not in reader.tensors:
        some = ", ".join(sorted(reader.tensors)[:3]) or "none"
        raise ConfigError(
            f"{folder} has no {EMBEDDING}, as a GPT model has; among its tensors are {some}"
        )
    rows = reader.tensors[EMBEDDING][0][0]
    if rows < model.vocab:
        raise ConfigError(
            f"{folder}: {EMBEDDING} has {rows} rows, fewer than {said} ({model.vocab}): the "
            f"run had no --padded-vocab-size {model.vocab}; --vocab-size {rows} writes all rows"
        )
    return rows


def _locate(reader: Reader, model: Model, folder: Path, file: Path) -> list[tuple[Mapped, Region]]:
    """Where the checkpoint has each tensor of Hugging Face."""
    found, used = [], {HEAD} if model.tied else set()
    for tensor in mapped(model):
        region = next((place for place in locations(tensor) if place.key in reader.tensors), None)
        if region is None:
            raise ConfigError(
                f"{folder} has no {tensor.region.key}, which has {tensor.name} of {file}"
            )
        shape = reader.tensors[region.key][0]
        if shape != region.shape:
            raise ConfigError(
                f"{folder}: {region.key} has shape {list(shape)}, but by {file} {list(region.shape)}"
            )
        found.append((tensor, region))
        used |= {region.key, tensor.also}
    for key in reader.tensors:
        is_weight = key.startswith(("decoder.", "embedding.", "output_layer."))
        if is_weight and key not in used and "_extra_state" not in key:
            raise ConfigError(
                f"{folder}: {key} is not a tensor of a {model.family.architecture}, and would be lost"
            )
    return found


def _check_tied(reader: Reader, model: Model, folder: Path, file: Path) -> None:
    """A saved output layer must be bit-identical to the embedding that it is tied to."""
    if HEAD not in reader.tensors:
        return
    shape, dtype = reader.tensors[EMBEDDING]

    def read(begin, end):
        place = shape, (begin, 0), (end - begin, model.hidden)
        return tuple(reader.read(Region(key, *place)) for key in (EMBEDDING, HEAD))

    alike = reader.tensors[HEAD] == (shape, dtype)
    if not (alike and same_bits(shape[0], dtype.itemsize * model.hidden, read)):
        raise ConfigError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, though tie_word_embeddings in {file} is true: give "
            "the folder of a model with an output layer of its own with --like"
        )


def _set_dtype(config: dict, plan: list[Planned]) -> None:
    """Set config.json's dtype, in which transformers loads the model: unchanged if any weight has it, else
    the dtype of most bytes."""
    fields = [field for field in ("torch_dtype", "dtype") if field in config] or ["torch_dtype"]
    sizes: Counter[str] = Counter()
    for planned in plan:
        sizes[str(planned.dtype).removeprefix("torch.")] += planned.bytes
    if any(config.get(field) not in list(sizes) for field in fields):
        for field in fields:
            config[field] = sizes.most_common(1)[0][0]
