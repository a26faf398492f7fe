# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Reading checkpoints: nothing that their files say is run.

``.metadata`` and the objects in ``common.pt`` and ``.distcp`` files are pickles, and a pickle calls what it
names. torch loads some of them without any restriction, so they are read with its restrictions or ours.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata, planner

from ..errors import ConfigError
from ..files import read_bytes, size_of
from ..requirements import first_line

CLASSES = {
    (module.__name__, name): getattr(module, name)
    for module, names in {
        metadata: "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
        planner: "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
        filesystem: "_StorageInfo",
    }.items()
    for name in names.split()
    if hasattr(module, name)
}
"""What the metadata of Megatron-Core 0.16 to 0.19 are made of: data classes and enumerations of torch."""


class Refused(pickle.UnpicklingError):
    """A checkpoint's file asks for something that such files do not have."""


class _Unpickler(pickle.Unpickler):
    """Builds the classes of a checkpoint's metadata, and calls nothing else."""

    def find_class(self, module: str, name: str):
        if (module, name) in CLASSES:
            return CLASSES[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Functions of our own: a pickle can set attributes of what it is given.
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: torch.serialization._get_layout(layout)
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: "/".join(map(str, parts))
        raise Refused(
            f"it asks for {module}.{name}, which no checkpoint's metadata have and which may run code"
        )


@contextmanager
def _unchanged(classes: list[type]) -> Iterator[None]:
    """Undo and refuse changes of classes: a pickle can set their attributes."""
    before = [(each, dict(vars(each))) for each in classes]
    changed = None
    try:
        yield
    finally:
        for each, attributes in before:
            now = dict(vars(each))
            for name in now.keys() | attributes.keys():
                if now.get(name) is attributes.get(name):
                    continue
                changed = f"{each.__name__}.{name}"
                if name in attributes:
                    setattr(each, name, attributes[name])
                else:
                    delattr(each, name)
    if changed:
        raise Refused(f"it changes {changed}")


def read_metadata(folder: Path) -> metadata.Metadata:
    """The ``.metadata`` of a torch_dist checkpoint, in the form that torch's reader returns.

    Raises:
        ConfigError: it cannot be read, asks for classes that metadata do not have, or names files outside
            of the folder.
    """
    file = folder / ".metadata"
    content = read_bytes(file, str(file))
    try:
        with _unchanged(list(CLASSES.values())):
            found = _Unpickler(io.BytesIO(content)).load()
        _check_files(folder, found)
    except ConfigError:
        raise
    except Refused as error:
        raise ConfigError(
            f"{file} is not opened: {error}; get the checkpoint from a place that you trust"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be read by torch {torch.__version__}: it is damaged, or was saved by a newer "
            f"one ({first_line(error)})"
        ) from None
    return found


def _check_files(folder: Path, found: metadata.Metadata) -> None:
    """Raise :class:`ConfigError` unless the files with the entries are in the folder, and whole."""
    ends: dict[str, int] = {}
    for stored in found.storage_data.values():
        ends[stored.relative_path] = max(
            ends.get(stored.relative_path, 0), stored.offset + stored.length
        )
    for name, end in ends.items():
        if Path(name).name != name:
            raise Refused(f"it names {name!r:.120}, which is not the name of a file in its folder")
        size = size_of(folder / name, "by .metadata, it has tensors")
        if size < end:
            raise ConfigError(f"{folder / name} is cut off: {size} of {end} bytes")


def _read_metadata(self, *args, **kwargs) -> metadata.Metadata:
    """In place of FileSystemReader's, which unpickles whatever is there."""
    found = read_metadata(Path(self.path))
    if getattr(found, "storage_meta", None) is None:
        found.storage_meta = metadata.StorageMeta()
    found.storage_meta.load_id = getattr(self, "load_id", None)
    return found


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Let torch and Megatron-Core read a checkpoint without running anything in it, while the context lasts.

    torch unpickles ``.metadata`` and the objects in ``.distcp`` files (Megatron-Core 0.19 has a run's
    arguments there) without restriction, and nothing can be set to have it do otherwise.
    """
    load = torch.load

    def load_weights_only(*args, **kwargs):
        return load(*args, **{**kwargs, "weights_only": True})

    with (
        mock.patch.object(FileSystemReader, "read_metadata", _read_metadata),
        mock.patch.object(torch, "load", load_weights_only),
    ):
        yield
