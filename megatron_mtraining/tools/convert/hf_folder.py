# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face folders: safetensors files, read tensor by tensor and written file by file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...errors import ConfigError
from ...files import read_json, size_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""By their names in safetensors files."""
LOSSLESS = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
"""Changes of dtype that keep every value."""
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.json",
    "chat_template.jinja", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
"""Files that are copied to the converted model, beside config.json and weights."""
TEMPLATES = "additional_chat_templates"
"""A folder of .jinja files, which is copied too."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""transformers needs one of these files for a tokenizer."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of the files with weights that :func:`write_shards` writes."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Shards:
    """The weights of a folder. All headers are read at once, a tensor only on demand.

    Attributes:
        tensors: all tensors, by name.

    Raises:
        ConfigError: a file is missing, cut off, or lacks a tensor that the index promises.
    """

    def __init__(self, folder: Path):
        self.folder, self._file, self._open = folder, None, None
        weight_map = self._weight_map()
        self.tensors: dict[str, Stored] = {}
        for file in sorted(set(weight_map.values())) or [SINGLE]:
            self._read_header(folder / file)
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise ConfigError(f"{folder / file} has no {name}, which {INDEX} promises")
        self.close()

    def _weight_map(self) -> dict[str, str]:
        """The files of the tensors, by the index; empty if there is a single file."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise ConfigError(
                    f"{self.folder} has neither {SINGLE} nor {INDEX}: no safetensors weights"
                )
            return {}
        if index_is_unused(self.folder):
            return {}
        weight_map = _weight_map_of(index)
        for key, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(
                    f"{index}: weight_map has {name!r} for {key}, which is not the name of a file in the "
                    "same folder"
                )
        for name, key in {name: key for key, name in weight_map.items()}.items():
            if not (self.folder / name).is_file():
                raise ConfigError(f"{self.folder / name} is missing; by {INDEX}, {key} is in it")
        return weight_map

    def _read_header(self, file: Path) -> None:
        shard = self._shard(file)
        for name in shard.keys():
            tensor = shard.get_slice(name)
            dtype = tensor.get_dtype()
            if dtype not in DTYPES:
                raise ConfigError(
                    f"{file}: {name} is of type {dtype}; {', '.join(DTYPES)} can be converted"
                )
            if name in self.tensors:
                raise ConfigError(
                    f"{file}: {name} is also in {self.tensors[name].file.name}: remove one of them"
                )
            self.tensors[name] = Stored(file, tuple(tensor.get_shape()), DTYPES[dtype])

    def _shard(self, file: Path):
        from safetensors import safe_open

        if self._file != file:
            self.close()
            try:
                self._open = safe_open(file, "pt")
            except Exception as error:
                raise ConfigError(f"{file} is not a complete safetensors file: {error}") from None
            self._file = file
        return self._open

    def close(self) -> None:
        """Close the open file, whose pages count as this process's memory."""
        self._file = self._open = None

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A copy of a tensor, or of some of its rows."""
        tensor = self._shard(self.tensors[name].file).get_slice(name)
        tensor = tensor[:] if rows is None else tensor[rows[0] : rows[1]]
        return tensor.clone()  # the tensor itself would keep the file mapped


@dataclass(frozen=True)
class Planned:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, plan: list[Planned], tensors: Iterator[Tensor], shard_bytes: int, advance
) -> None:
    """Write tensors as safetensors files, with an index if there are several.

    Args:
        plan: the tensors to come.
        tensors: the tensors of the plan, in its order; each is taken when it is needed.
        shard_bytes: largest size of a file, unless one tensor is larger.
        advance: called with the bytes of each tensor.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[list[Planned]] = [[]]
    size = 0
    for planned in plan:
        if shards[-1] and size + planned.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += planned.bytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for planned in shard:
            content[planned.name] = next(tensors).contiguous()
            advance(planned.bytes)
            weight_map[planned.name] = file
        try:
            save_file(content, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(0, str(error)) from None
    if len(shards) > 1:
        total = sum(planned.bytes for planned in plan)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _weight_map_of(index: Path) -> dict:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    return weight_map


def index_is_unused(folder: Path) -> bool:
    """Whether there is a single file of weights beside an index of other files: transformers loads the single
    file, which is the newer one if a small model was saved into the folder of a large one."""
    index = folder / INDEX
    both = index.is_file() and (folder / SINGLE).is_file()
    return both and SINGLE not in _weight_map_of(index).values()


def write_json(file: Path, value: dict) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def check_lossless(
    name: str, place: Path, stored: torch.dtype, wanted: torch.dtype, allowed: bool
) -> None:
    """Raise :class:`ConfigError` if a change of dtype rounds, unless that is allowed."""
    if stored == wanted or (stored, wanted) in LOSSLESS or allowed:
        return
    stored, wanted = (str(dtype).removeprefix("torch.") for dtype in (stored, wanted))
    raise ConfigError(
        f"{place}: {name} is {stored}, and --dtype {wanted} would round it: leave --dtype out, or add "
        "--allow-dtype-loss"
    )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def copy_files(source: Path, target: Path) -> None:
    """Copy generation config, tokenizer files and chat templates.

    Raises:
        ConfigError: one is a link that leads nowhere: it would be left out in silence.
    """
    templates = sorted((source / TEMPLATES).glob("*.jinja"))
    for file in (*(source / name for name in COPIED), *templates):
        if not os.path.lexists(file):
            continue
        size_of(file, "its folder has a link to it")
        copied = target / file.relative_to(source)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)
