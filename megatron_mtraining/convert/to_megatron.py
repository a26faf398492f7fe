# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face to Megatron: ``mtraining convert hf-to-megatron``."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from ..config import ConfigError
from . import arguments, positions, torch_dist
from .dtypes import check_loss
from .families import Model, model_of
from .hf_folder import Shards, copy_files, read_json, write_json
from .names import Mapped, extra_states, interleave, mapped
from .target import Progress, check, whole
from .torch_dist import Piece

PART_BYTES = 256 << 20
"""Larger tensors are read and written in parts of so many bytes."""
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old checkpoints hold and that are computed."""


@dataclass(frozen=True)
class ToMegatron:
    """What the command line asks for; see ``mtraining convert hf-to-megatron --help``."""

    source: Path
    target: Path
    dtype: torch.dtype | None = None
    allow_dtype_loss: bool = False
    padded_vocab_size: int | None = None
    rotary_base: int | None = None
    yarn: float | None = None
    max_position_embeddings: int | None = None
    overwrite: bool = False


def convert(options: ToMegatron) -> None:
    """Write a Hugging Face folder's model as a checkpoint that pretrain_gpt.py loads.

    Raises:
        ConfigError: see the checks; the target is as it was.
    """
    check(options.target, options.overwrite)
    file = options.source / "config.json"
    config = read_json(file)
    model = model_of(config, file, options.padded_vocab_size)
    found = positions.extended(
        positions.arguments_of(config, file),
        options.rotary_base,
        options.yarn,
        options.max_position_embeddings,
    )
    shards = Shards(options.source)
    tensors = list(mapped(model))
    _check_names(shards, tensors, model)
    pieces = _pieces(options, shards, tensors, model)
    size = sum(piece.bytes for piece in pieces)
    args = arguments.namespace(model, found)
    with whole(options.target, size, options.overwrite) as folder:
        inside = folder / "release"
        inside.mkdir()
        with Progress("hf-to-megatron", size) as progress:
            torch_dist.write(inside, pieces, list(extra_states(model)), progress.advance)
        shards.close()
        write_json(
            inside / "metadata.json",
            {"sharded_backend": "torch_dist", "sharded_backend_version": 1},
        )
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
        common["content_metadata"] = {"singleton_local_shards": False}
        torch.save(common, inside / "common.pt")
        (folder / "megatron_args.sh").write_text(
            arguments.script(args, str(options.source)), encoding="utf-8"
        )
        kept = folder / "hf"
        kept.mkdir()
        copy_files(options.source, kept)
        shutil.copyfile(file, kept / "config.json")
        (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")


def _check_names(shards: Shards, tensors: list[Mapped], model: Model) -> None:
    """The tensors there are, and their shapes, are those that the model has."""
    wanted = {tensor.name for tensor in tensors}
    for tensor in tensors:
        stored = shards.tensors.get(tensor.name)
        if stored is None:
            raise ConfigError(
                f"{shards.folder} has no {tensor.name}, which config.json's {model.family.architecture} has"
            )
        if stored.shape != tensor.shape:
            raise ConfigError(
                f"{stored.file}: {tensor.name} is of shape {list(stored.shape)}, and config.json says "
                f"{list(tensor.shape)}"
            )
    tied = {"lm_head.weight"} if model.tied else set()
    for name, stored in shards.tensors.items():
        if name not in wanted | tied and not IGNORED.search(name):
            raise ConfigError(
                f"{stored.file}: {name} is not a tensor of a {model.family.architecture}: nothing is left out"
            )


def _pieces(
    options: ToMegatron, shards: Shards, tensors: list[Mapped], model: Model
) -> list[Piece]:
    pieces: list[Piece] = []
    dtypes: dict[str, tuple[torch.dtype, Mapped]] = {}
    for (key, offset), group in groupby(tensors, lambda tensor: (tensor.key, tensor.offset)):
        parts = list(group)
        for tensor in parts:
            stored = shards.tensors[tensor.name]
            dtype = options.dtype or stored.dtype
            check_loss(tensor.name, stored.file, stored.dtype, dtype, options.allow_dtype_loss)
            first, by = dtypes.setdefault(key, (dtype, tensor))
            if dtype != first:
                raise ConfigError(
                    f"{stored.file}: {tensor.name} is {dtype}, but {by.name}, which is in one tensor of "
                    f"Megatron's with it, is {first}: choose one with --dtype"
                )
        first = parts[0]
        if first.part:
            read = partial(_qkv, model, shards, parts)
            pieces.append(Piece(key, first.size, dtype, offset, first.region, read))
            continue
        for name in filter(None, (key, first.also)):
            pieces += _split(shards, first, name, dtype)
    return pieces


def _qkv(model: Model, shards: Shards, parts: list[Mapped]) -> torch.Tensor:
    return interleave(model, *(shards.read(part.name) for part in parts))


def _split(shards: Shards, tensor: Mapped, key: str, dtype: torch.dtype) -> list[Piece]:
    """The parts of a tensor that is one in both, and the rows of a padded vocabulary."""
    rows, inner = tensor.shape[0], tensor.shape[1:]
    axis = len(tensor.size) - len(tensor.shape)  # of rows
    step = max(1, PART_BYTES // (dtype.itemsize * max(1, torch.Size(inner).numel())))

    def piece(begin: int, end: int, make) -> Piece:
        at = list(tensor.offset)
        at[axis] += begin
        region = (1,) * axis + (end - begin, *inner)
        return Piece(key, tensor.size, dtype, tuple(at), region, make)

    found = [
        piece(
            begin,
            min(begin + step, rows),
            partial(shards.read, tensor.name, (begin, min(begin + step, rows))),
        )
        for begin in range(0, rows, step)
    ]
    is_vocabulary = key in ("embedding.word_embeddings.weight", "output_layer.weight")
    if is_vocabulary and tensor.size[0] > rows:
        padding = (tensor.size[0] - rows, *inner)
        found.append(piece(rows, tensor.size[0], partial(torch.zeros, padding, dtype=dtype)))
    return found
