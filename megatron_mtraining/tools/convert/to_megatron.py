# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face to Megatron: ``mtraining convert hf-to-megatron``."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from ...config import ConfigError
from . import arguments, positions, torch_dist
from .dtypes import check_loss
from .families import Model, model_of
from .hf_folder import Shards, copy_files, has_tokenizer, read_json, write_json
from .names import Mapped, extra_states, interleave, mapped
from .target import CHECKPOINT, Progress, Target
from .torch_dist import PART_BYTES, Piece, same_bits

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    target = Target(options.target, options.overwrite, CHECKPOINT, options.source)
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
    check_names(shards, tensors, model)
    if model.tied:
        _check_tied(shards)
    pieces = _pieces(options, shards, tensors, model)
    size = sum(piece.bytes for piece in pieces)
    args = arguments.namespace(model, found)
    with target.whole(size) as folder:
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
        whole_file = io.BytesIO()  # torch's own error of a full disk is not the system's
        torch.save(common, whole_file)
        (inside / "common.pt").write_bytes(whole_file.getbuffer())
        (folder / "megatron_args.sh").write_text(
            arguments.script(args, str(options.source), has_tokenizer(options.source)),
            encoding="utf-8",
        )
        kept = folder / "hf"
        kept.mkdir()
        copy_files(options.source, kept)
        shutil.copyfile(file, kept / "config.json")
        (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")


def check_names(shards: Shards, tensors: list[Mapped], model: Model) -> None:
    """Raise :class:`ConfigError` unless tensors and their shapes are those that the model has."""
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
    tied = {HEAD} if model.tied else set()
    for name, stored in shards.tensors.items():
        if name not in wanted | tied and not IGNORED.search(name):
            raise ConfigError(
                f"{stored.file}: {name} is not a tensor of a {model.family.architecture}: nothing is left out"
            )


def _check_tied(shards: Shards) -> None:
    """An output layer that is stored although it is the embedding has the embedding's bits."""
    ours, theirs = shards.tensors[EMBEDDING], shards.tensors.get(HEAD)
    if theirs is None:
        return

    def read(*rows):
        both = tuple(shards.read(name, rows) for name in (EMBEDDING, HEAD))
        shards.close()
        return both

    alike = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if not (alike and same_bits(ours.shape[0], ours.dtype.itemsize * ours.shape[1], read)):
        raise ConfigError(
            f"{theirs.file}: {HEAD} is not the same as {EMBEDDING}, though config.json has "
            "tie_word_embeddings true: set it to false, or leave the tensor out"
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
