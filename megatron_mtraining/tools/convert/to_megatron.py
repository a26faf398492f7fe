# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face to Megatron: ``mtraining convert hf-to-megatron``."""

from __future__ import annotations

import io
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from ...errors import ConfigError
from ...models.integrity import write_checksums
from . import megatron_args, rope, torch_dist
from .families import Model, model_of
from .fields import wrong_types_refused
from .hf_folder import Shards, check_lossless, copy_files, has_tokenizer, read_json, write_json
from .mapping import Mapped, Region, extra_states, interleave, mapped
from .target_folder import CHECKPOINT, Target, progress
from .torch_dist import PART_BYTES, Part, same_bits

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that Megatron computes."""


def convert(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    allow_dtype_loss: bool = False,
    padded_vocab_size: int | None = None,
    rotary_base: int | None = None,
    yarn: float | None = None,
    max_position_embeddings: int | None = None,
    overwrite: bool = False,
) -> Namespace:
    """Write a Hugging Face folder's model as a checkpoint that pretrain_gpt.py loads.

    The arguments are the command line's; see ``mtraining convert hf-to-megatron --help``.

    Returns:
        Megatron's arguments for the model.

    Raises:
        ConfigError: the model or the target cannot be used; nothing has changed then.
    """
    output = Target(target, overwrite, CHECKPOINT, source)
    file = source / "config.json"
    config = read_json(file)
    with wrong_types_refused(file):
        model = model_of(config, file, padded_vocab_size)
        positions = rope.arguments_of(config, file)
        positions = rope.extended(positions, rotary_base, yarn, max_position_embeddings)
        args = megatron_args.namespace(model, positions)
    shards = Shards(source)
    tensors = list(mapped(model))
    check_tensors(shards, tensors, model)
    if model.tied:
        _check_tied(shards)
    parts = list(_parts(shards, tensors, model, dtype, allow_dtype_loss))
    size = sum(part.bytes for part in parts)
    with output.written(size) as folder:
        release, kept = folder / "release", folder / "hf"
        release.mkdir()
        with progress("hf-to-megatron", size) as bar:
            torch_dist.write(release, parts, list(extra_states(model)), bar.update)
        shards.close()
        write_json(
            release / "metadata.json",
            {"sharded_backend": "torch_dist", "sharded_backend_version": 1},
        )
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
        common["content_metadata"] = {"singleton_local_shards": False}
        buffer = io.BytesIO()  # a full disk raises an OSError then, and not an error of torch's
        torch.save(common, buffer)
        (release / "common.pt").write_bytes(buffer.getbuffer())
        write_checksums(release)
        script = megatron_args.script(args, str(source), has_tokenizer(source))
        (folder / "megatron_args.sh").write_text(script, encoding="utf-8")
        kept.mkdir()
        copy_files(source, kept)
        shutil.copyfile(file, kept / "config.json")
        (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")
    return args


def check_tensors(shards: Shards, tensors: list[Mapped], model: Model) -> None:
    """Raise :class:`ConfigError` unless a folder has the model's tensors, in their shapes, and no others."""
    architecture = model.family.architecture
    for tensor in tensors:
        stored = shards.tensors.get(tensor.name)
        if stored is None:
            raise ConfigError(
                f"{shards.folder} has no {tensor.name}, which config.json's {architecture} has"
            )
        if stored.shape != tensor.shape:
            raise ConfigError(
                f"{stored.file}: {tensor.name} has shape {list(stored.shape)}, but by config.json "
                f"{list(tensor.shape)}"
            )
    known = {tensor.name for tensor in tensors} | ({HEAD} if model.tied else set())
    for name, stored in shards.tensors.items():
        if name not in known and not IGNORED.search(name):
            raise ConfigError(
                f"{stored.file}: {name} is not a tensor of a {architecture}, and would be lost"
            )


def _check_tied(shards: Shards) -> None:
    """A stored output layer must be bit-identical to the embedding that it is tied to."""
    embedding, head = shards.tensors[EMBEDDING], shards.tensors.get(HEAD)
    if head is None:
        return

    def read(*rows):
        both = shards.read(EMBEDDING, rows), shards.read(HEAD, rows)
        shards.close()
        return both

    alike = (embedding.shape, embedding.dtype) == (head.shape, head.dtype)
    row_bytes = embedding.dtype.itemsize * embedding.shape[1]
    if not (alike and same_bits(embedding.shape[0], row_bytes, read)):
        raise ConfigError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, though tie_word_embeddings in config.json is "
            "true: set it to false, or remove the tensor"
        )


def _parts(
    shards: Shards,
    tensors: list[Mapped],
    model: Model,
    wanted: torch.dtype | None,
    allow_dtype_loss: bool,
) -> Iterator[Part]:
    """The parts of Megatron's tensors, in the order of ``tensors``; in the wanted dtype, if there is one."""
    dtypes: dict[str, tuple[torch.dtype, str]] = {}
    for region, group in groupby(tensors, lambda tensor: tensor.region):
        group = list(group)
        for tensor in group:
            stored = shards.tensors[tensor.name]
            dtype = wanted or stored.dtype
            check_lossless(tensor.name, stored.file, stored.dtype, dtype, allow_dtype_loss)
            first, name = dtypes.setdefault(region.key, (dtype, tensor.name))
            if dtype != first:
                raise ConfigError(
                    f"{stored.file}: {tensor.name} is {dtype}, but {name} is {first}, and Megatron has both "
                    "in one tensor: choose a type with --dtype"
                )
        if group[0].part:
            yield Part(region, dtype, partial(_interleaved, model, shards, group))
            continue
        for key in filter(None, (region.key, group[0].also)):
            yield from _split(shards, group[0], replace(region, key=key), dtype)


def _interleaved(model: Model, shards: Shards, group: list[Mapped]) -> torch.Tensor:
    return interleave(model, *(shards.read(tensor.name) for tensor in group))


def _split(shards: Shards, tensor: Mapped, region: Region, dtype: torch.dtype) -> Iterator[Part]:
    """The parts of a tensor that Megatron has in one region, and the padding of a vocabulary."""
    rows, *inner = tensor.shape
    axis = len(region.shape) - len(tensor.shape)  # the axis of the rows in Megatron's tensor
    step = max(1, PART_BYTES // (dtype.itemsize * max(1, torch.Size(inner).numel())))

    def part(begin: int, end: int, load) -> Part:
        offsets = list(region.offsets)
        offsets[axis] += begin
        sizes = (*region.sizes[:axis], end - begin, *inner)
        return Part(replace(region, offsets=tuple(offsets), sizes=sizes), dtype, load)

    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield part(begin, end, partial(shards.read, tensor.name, (begin, end)))
    padded = region.shape[0]
    if tensor.name in (EMBEDDING, HEAD) and padded > rows:
        yield part(rows, padded, partial(torch.zeros, (padded - rows, *inner), dtype=dtype))
