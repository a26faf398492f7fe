# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face folders: safetensors shards, read tensor by tensor and written shard by shard."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...config import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
KEPT = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.json",
    "chat_template.jinja", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
"""Files of a model, beside config.json and weights, that go along."""
TEMPLATES = "additional_chat_templates"
"""A folder of .jinja files, which goes along too."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files that transformers makes a tokenizer of; one is enough."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of the files with weights that are written."""


def read_json(file: Path) -> dict:
    """A JSON file's object.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return found


@dataclass(frozen=True)
class Stored:
    """A tensor in a shard."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Shards:
    """The weights of a folder. Every shard's header is read at once, a tensor only when asked for.

    Attributes:
        tensors: all that there are, by name.

    Raises:
        ConfigError: a shard is missing, cut off, or lacks what the index says it has.
    """

    def __init__(self, folder: Path):
        self.folder, self._name, self._open = folder, None, None
        files, promised = self._files()
        self.tensors: dict[str, Stored] = {}
        for file in files:
            shard = self._shard(file)
            for name in shard.keys():
                part = shard.get_slice(name)
                kind = part.get_dtype()
                if kind not in DTYPES:
                    raise ConfigError(
                        f"{file}: {name} is of type {kind}: {', '.join(DTYPES)} convert"
                    )
                if name in self.tensors:
                    raise ConfigError(
                        f"{file}: {name} is also in {self.tensors[name].file.name}: leave one of them"
                    )
                self.tensors[name] = Stored(file, tuple(part.get_shape()), DTYPES[kind])
        for name, file in promised.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise ConfigError(f"{folder / file} has no {name}, which {INDEX} says it has")
        self.close()

    def _files(self) -> tuple[list[Path], dict[str, str]]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not index.is_file():
            if not single.is_file():
                raise ConfigError(
                    f"{self.folder} has neither {SINGLE} nor {INDEX}: no safetensors weights"
                )
            return [single], {}
        promised = read_json(index).get("weight_map")
        if not isinstance(promised, dict) or not promised:
            raise ConfigError(f"{index} has no weight_map")
        for key, name in promised.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(
                    f"{index}: weight_map has {name!r} for {key}: the name of a file in the same folder is "
                    "needed"
                )
        files = [self.folder / name for name in sorted(set(promised.values()))]
        for file in files:
            if not file.is_file():
                key = next(k for k, v in promised.items() if v == file.name)
                raise ConfigError(f"{file} is missing: {INDEX} says it has {key}")
        return files, promised

    def _shard(self, file: Path):
        from safetensors import safe_open

        if self._name != file:
            self.close()
            try:
                self._open = safe_open(file, "pt")
            except Exception as error:
                raise ConfigError(f"{file} is not a whole safetensors file: {error}") from None
            self._name = file
        return self._open

    def close(self) -> None:
        """Let go of the shard that is open, and of its pages in memory."""
        self._name = self._open = None

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or some of its rows, in memory of its own."""
        part = self._shard(self.tensors[name].file).get_slice(name)
        part = part[:] if rows is None else part[rows[0] : rows[1]]
        return part.clone()  # as it is, it would keep the whole shard


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, plan: list[Planned], tensors: Iterator[Tensor], shard_bytes: int, advance
) -> None:
    """Write tensors as safetensors, with an index where there is more than one file.

    Args:
        folder: where to.
        plan: what will come.
        tensors: those of the plan, in its order, made when they are asked for.
        shard_bytes: most bytes of a file, unless one tensor has more.
        advance: called with the bytes of each tensor.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[list[Planned]] = [[]]
    held = 0
    for planned in plan:
        if shards[-1] and held + planned.bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(planned)
        held += planned.bytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE if len(shards) == 1 else many
        content = {}
        for planned in shard:
            content[planned.name] = next(tensors).contiguous()
            advance(planned.bytes)
            weight_map[planned.name] = file
        try:
            save_file(content, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(0, str(error)) from None  # such as a full disk
    if len(shards) > 1:
        total = sum(planned.bytes for planned in plan)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def copy_files(source: Path, target: Path) -> None:
    """Copy generation config, tokenizer files and chat templates."""
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for template in sorted((source / TEMPLATES).glob("*.jinja")):
        (target / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, target / TEMPLATES / template.name)
