# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's torch_dist, through torch.distributed.checkpoint: written and read by parts, without a model.

Neither needs a process group or a GPU, or holds more than one part in memory.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...errors import ConfigError
from ...models.untrusted import read_metadata
from .mapping import Region

PART_BYTES = 256 << 20
"""Larger tensors are read and written in parts of this size."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor to write.

    Attributes:
        dtype: the tensor's.
        load: returns the part, in any shape with as many elements.
    """

    region: Region
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.region.sizes).numel() * self.dtype.itemsize

    @property
    def write_data(self) -> TensorWriteData:
        """The part as torch plans it."""
        offsets, sizes = torch.Size(self.region.offsets), torch.Size(self.region.sizes)
        return TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(self.dtype),
            torch.Size(self.region.shape),
        )


def write(
    folder: Path, parts: list[Part], extra: list[str], advance: Callable[[int], object]
) -> None:
    """Write a checkpoint's tensors: ``.metadata`` and one data file.

    Args:
        folder: an existing folder.
        parts: all parts of all tensors; they are loaded in this order, one after the other.
        extra: keys of empty entries beside the tensors.
        advance: called with the bytes of each part.

    Raises:
        Exception: what loading or writing a part has raised.
    """
    writer = dcp.FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files = _Files()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        try:
            dcp.save({}, storage_writer=writer, planner=_SavePlanner(parts, extra, advance))
        except CheckpointException as error:
            # The cause itself: a full disk, an interrupt.
            raise files.error or next(iter(error.failures.values()))[0] from None
    metadata = read_metadata(folder)
    with open(folder / ".metadata", "wb") as file:
        _Pickler(file).dump(metadata)


def same_bits(rows: int, row_bytes: int, read: Callable[[int, int], tuple[Tensor, Tensor]]) -> bool:
    """Whether two tensors are bit-identical.

    Args:
        rows, row_bytes: their number of rows, and the size of one.
        read: returns the rows of both from one row to another.
    """
    step = max(1, PART_BYTES // max(1, row_bytes))
    parts = (read(begin, min(begin + step, rows)) for begin in range(0, rows, step))
    return all(torch.equal(*(each.view(torch.uint8) for each in both)) for both in parts)


class _Files(FileSystem):
    """Keeps the error that ended writing: torch's zip writer replaces it by one of its own."""

    error: BaseException | None = None

    def create_stream(self, path, mode):
        if mode != "wb":
            return super().create_stream(path, mode)
        file = _File(path, mode)
        file.files = self
        return io.BufferedWriter(file)


class _File(io.FileIO):
    files: _Files

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BaseException as error:
            self.files.error = self.files.error or error
            raise


class _Pickler(pickle.Pickler):
    """Leaves out the strides of tensors, which are None here. torch 2.15 added them: older versions cannot
    read metadata that has them, newer ones do without."""

    def reducer_override(self, value):
        if type(value) is not TensorProperties:
            return NotImplemented
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans given parts instead of a state dict's."""

    def __init__(self, parts: list[Part], extra: list[str], advance: Callable[[int], object]):
        super().__init__(flatten_state_dict=False)
        self.extra, self.advance = extra, advance
        self.parts = {dcp.metadata.MetadataIndex(p.region.key, p.region.offsets): p for p in parts}
        if len(self.parts) != len(parts):
            raise ValueError("two parts of a tensor begin at the same place")

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(index, WriteItemType.SHARD, tensor_data=part.write_data)
            for index, part in self.parts.items()
        ]
        items += [
            WriteItem(dcp.metadata.MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.extra
        ]
        return SavePlan(items)

    def create_global_plan(self, all_plans):
        # The default planner also checks each pair of a tensor's parts, which is slow for experts.
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # Megatron's form: a list of one object
            return empty
        part = self.parts[write_item.index]
        self.advance(part.bytes)
        tensor = part.load().to(part.dtype).reshape(part.region.sizes)
        # torch.save writes the whole storage of a view.
        is_view = tensor.untyped_storage().nbytes() != part.bytes
        return tensor.clone() if is_view else tensor.contiguous()


class Reader:
    """A checkpoint's tensors, read by region, whatever their sharding was when they were saved.

    Attributes:
        tensors: shape and dtype of each, by key.

    Raises:
        ConfigError: the metadata cannot be read, or a data file is missing or cut off.
    """

    def __init__(self, folder: Path):
        self.folder, self._last = folder, (None, None)
        self._reader = dcp.FileSystemReader(folder)
        self._metadata = read_metadata(folder)
        self._reader.set_up_storage_reader(self._metadata, True)
        self.tensors = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.metadata.TensorStorageMetadata)
        }
        self._chunks = {
            (key, chunk.offsets): chunk
            for key in self.tensors
            for chunk in self._metadata.state_dict_metadata[key].chunks
        }

    def read(self, region: Region) -> Tensor:
        """A part of a tensor. The last one is kept, for parts that several tensors are in.

        Raises:
            ConfigError: it cannot be read, or was not saved completely.
        """
        if self._last[0] != region:
            self._last = (None, None)
            self._last = (region, self._read(region))
        return self._last[1]

    def _read(self, region: Region) -> Tensor:
        entry = self._metadata.state_dict_metadata[region.key]
        target = torch.empty(region.sizes, dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
        if self._chunks.get((region.key, chunk.offsets)) == chunk:
            entry = replace(entry, chunks=[chunk])  # else torch compares it with all chunks
        items = create_read_items_for_chunk_list(region.key, entry, [chunk])
        if sum(torch.Size(item.lengths).numel() for item in items) < target.numel():
            raise ConfigError(f"{self.folder}: {region.key} was not saved completely")
        try:
            self._reader.read_data(dcp.planner.LoadPlan(items), _LoadPlanner(target)).wait()
        except Exception as error:
            raise ConfigError(f"{self.folder}: {region.key} cannot be read: {error}") from None
        return target


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Loads into one tensor, in place of a state dict."""

    def __init__(self, target: Tensor):
        super().__init__()
        self.target = target

    def lookup_tensor(self, index: dcp.metadata.MetadataIndex) -> Tensor:
        return self.target
