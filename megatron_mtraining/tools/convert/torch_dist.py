# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's torch_dist through torch.distributed.checkpoint: written and read by parts, without a model.

Neither way needs a process group or a GPU, and neither has more than a part in memory.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...config import ConfigError

PART_BYTES = 256 << 20
"""Larger tensors are read and written in parts of so many bytes."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor to be written.

    Attributes:
        key, size, dtype: the whole tensor's.
        offset, region: where in it this part is.
        make: gives the part, in any shape with as many elements.
    """

    key: str
    size: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    region: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.region).numel() * self.dtype.itemsize


def write(folder: Path, pieces: list[Piece], extra: list[str], advance) -> None:
    """Write a checkpoint's tensors: ``.metadata`` and one data file.

    Args:
        folder: where to; made by the caller.
        pieces: all parts of all tensors, made in this order, one after the other.
        extra: keys of entries that hold nothing.
        advance: called with the bytes of each part.

    Raises:
        Exception: what making or writing a part has raised.
    """
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files = _Files()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        try:
            dcp.save({}, storage_writer=writer, planner=_Saving(pieces, extra, advance))
        except CheckpointException as error:
            # What went wrong itself: a full disk, an interruption.
            raise files.error or next(iter(error.failures.values()))[0] from None
    metadata = FileSystemReader(folder).read_metadata()
    with open(folder / ".metadata", "wb") as file:
        _Pickler(file).dump(metadata)


def same_bits(rows: int, row_bytes: int, read: Callable[[int, int], tuple[Tensor, Tensor]]) -> bool:
    """Whether two tensors of so many rows are alike to the bit; ``read`` gives both, from row to row."""
    step = max(1, PART_BYTES // max(1, row_bytes))
    parts = (read(begin, min(begin + step, rows)) for begin in range(0, rows, step))
    return all(torch.equal(*(each.view(torch.uint8) for each in both)) for both in parts)


class _Files(FileSystem):
    """Keeps what ended writing, such as a full disk: torch's zip writer raises an error of its own."""

    error: BaseException | None = None

    @contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            yield _Noting(stream, self) if mode == "wb" else stream


class _Noting:
    """A file that tells of its first error in writing."""

    def __init__(self, stream, files: _Files):
        self._stream, self._files = stream, files

    def write(self, data) -> int:
        try:
            return self._stream.write(data)
        except BaseException as error:
            self._files.error = self._files.error or error
            raise

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


class _Pickler(pickle.Pickler):
    """Leaves out tensors' strides, which newer versions of torch (2.15) keep: older ones cannot read what has
    them, newer ones do without, and they are None here."""

    def reducer_override(self, value):
        if type(value) is not TensorProperties:
            return NotImplemented
        return copyreg.__newobj__, (TensorProperties,), value.__getstate__()[:5]


class _Saving(SavePlanner):
    def __init__(self, pieces: list[Piece], extra: list[str], advance):
        self.extra, self.advance = extra, advance
        self.pieces = {MetadataIndex(p.key, p.offset): p for p in pieces}
        if len(self.pieces) != len(pieces):
            raise ValueError("two parts of a tensor begin at the same place")

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.region)),
                    properties=TensorProperties(dtype=p.dtype),
                    size=torch.Size(p.size),
                ),
            )
            for index, p in self.pieces.items()
        ]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.extra]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        (plan,) = all_plans
        tensors: dict = {}
        items = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                tensors[item.index.fqn] = BytesStorageMetadata()
                items.append(item)
                continue
            data = item.tensor_data
            whole = tensors.setdefault(
                item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
            )
            index = dataclasses.replace(item.index, index=len(whole.chunks))
            items.append(dataclasses.replace(item, index=index))
            whole.chunks.append(data.chunk)
        return [dataclasses.replace(plan, items=items)], Metadata(tensors)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # Megatron's form: a list of one object
            return empty
        piece = self.pieces[write_item.index]
        self.advance(piece.bytes)
        part = piece.make().to(piece.dtype).reshape(piece.region)
        # Of its own storage: torch.save writes the whole of a view's.
        return part.clone() if part.untyped_storage().nbytes() != piece.bytes else part.contiguous()


class Reader:
    """A checkpoint's tensors, by region, however they were sharded when they were saved.

    Attributes:
        tensors: size and dtype of each, by key.
    """

    def __init__(self, folder: Path):
        self.folder, self._last = folder, (None, None)
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
        except Exception as error:
            raise ConfigError(
                f"{folder / '.metadata'} cannot be read by torch {torch.__version__}; was it saved by a "
                f"newer one? ({error})"
            ) from None
        self.tensors = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._check_files()

    def _check_files(self) -> None:
        """Every data file has all of its bytes."""
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), end)
        for name, end in ends.items():
            file = self.folder / name
            if not file.is_file():
                raise ConfigError(f"{file} is missing: .metadata says it has tensors")
            if file.stat().st_size < end:
                raise ConfigError(f"{file} is cut off: {file.stat().st_size} of {end} bytes")

    def read(self, key: str, offset: tuple[int, ...], region: tuple[int, ...]) -> Tensor:
        """A part of a tensor, ``region`` large; the last one read is kept.

        Raises:
            ConfigError: it cannot be read, or was not saved whole.
        """
        place = (key, offset, region)
        if self._last[0] != place:
            self._last = (None, None)
            self._last = (place, self._read(*place))
        return self._last[1]

    def _read(self, key, offset, region) -> Tensor:
        entry = self._metadata.state_dict_metadata[key]
        target = torch.empty(region, dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(region))
        items = create_read_items_for_chunk_list(key, entry, [chunk])
        if sum(torch.Size(item.lengths).numel() for item in items) < target.numel():
            raise ConfigError(f"{self.folder}: {key} was not saved whole")
        try:
            self._reader.read_data(LoadPlan(items), _Loading(target)).wait()
        except Exception as error:
            raise ConfigError(f"{self.folder}: {key} cannot be read: {error}") from None
        return target


class _Loading(LoadPlanner):
    def __init__(self, target: Tensor):
        self.target = target

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item, value) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item) -> Tensor:
        part = self.target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item, tensor: Tensor) -> None:
        pass
