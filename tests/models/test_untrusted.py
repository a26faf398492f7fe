# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints: no pickle in them runs code or leads out of their folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_mtraining import ConfigError
from megatron_mtraining.models.megatron_folder import (
    find_iteration,
    read_common,
    read_keys,
)
from megatron_mtraining.models.untrusted import nothing_runs, read_metadata
from megatron_mtraining.tools import cli
from megatron_mtraining.tools.convert import torch_dist
from megatron_mtraining.tools.convert.mapping import Region
from tests.support.convert_cases import MOE_CONFIG

KEY = "decoder.final_layernorm.weight"


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def plain(tmp_path):
    """A checkpoint of one tensor, as ``mtraining convert`` writes it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    region = Region(KEY, (4,), (0,), (4,))
    part = torch_dist.Part(region, torch.float32, lambda: torch.arange(4.0))
    torch_dist.write(folder, [part], ["some._extra_state/shard_0_1"], lambda size: None)
    torch.save({"args": Namespace(swiglu=True)}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran"


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def put(folder: Path, value) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(value))


def store(folder: Path, key: str, data: bytes) -> None:
    """Add an object to a checkpoint."""
    found = metadata_of(folder)
    (folder / "other.distcp").write_bytes(data)
    found.state_dict_metadata[key] = BytesStorageMetadata()
    info = filesystem._StorageInfo("other.distcp", 0, len(data))
    found.storage_data[MetadataIndex(key)] = info
    put(folder, found)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_whole_checkpoint_is_read(plain):
    assert KEY in read_keys(plain)
    reader = torch_dist.Reader(plain)
    assert reader.read(Region(KEY, (4,), (0,), (4,))).tolist() == [0, 1, 2, 3]
    assert read_common(plain, "it")["args"].swiglu


@pytest.mark.parametrize("command", ["inspect", "convert megatron-to-hf"])
def test_hostile_metadata_do_not_run(command, plain, ran, tmp_path, capsys):
    put(plain, Touch(ran))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(MOE_CONFIG))
    (tmp_path / "ids.npy").write_bytes(b"")
    words = {
        "inspect": [plain, "--text", tmp_path / "ids.npy", "--device", "cpu"],
        "convert megatron-to-hf": [plain, tmp_path / "out", "--like", tmp_path / "hf"],
    }[command]
    assert cli.main([*command.split(), *map(str, words)]) == 2
    assert not ran.exists()
    error = capsys.readouterr().err
    assert "Traceback" not in error and ".metadata is not opened" in error.splitlines()[-1]


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "state_dict_metadata"])
def test_hostile_parts_of_metadata_do_not_run(place, plain, ran):
    found = metadata_of(plain)
    setattr(found, place, Touch(ran))
    put(plain, found)
    for read in (read_keys, torch_dist.Reader):
        with pytest.raises(ConfigError, match=r"\.metadata is not opened: .*posix.system"):
            read(plain)
    assert not ran.exists()


def test_megatron_core_reads_with_the_same_care(plain, ran):
    from megatron.core import dist_checkpointing

    put(plain, Touch(ran))
    with nothing_runs(), pytest.raises(BaseException, match="not opened"):
        dist_checkpointing.load_tensors_metadata(str(plain))
    assert not ran.exists()


def test_hostile_common_does_not_run(plain, ran, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"args": Touch(ran)}, plain / "common.pt")
    with pytest.raises(ConfigError, match="the arguments in it cannot be read"):
        read_common(plain, "it")
    assert not ran.exists()


def test_hostile_objects_in_data_files_do_not_run(plain, ran):
    """Megatron-Core 0.19 has the arguments there, and reads them through torch without restriction."""
    (plain / "common.pt").unlink()
    store(plain, "common_state/shard_0_1", saved([{"args": Touch(ran)}]))
    refused = "the arguments in it cannot be read|it has no common.pt"  # by those before 0.19
    with pytest.raises(ConfigError, match=refused):
        read_common(plain, "it")
    state = {"common_state/shard_0_1": io.BytesIO()}
    with nothing_runs(), pytest.raises(BaseException, match="[Ww]eights.only|WeightsUnpickler"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(plain), no_dist=True)
    assert not ran.exists()


def test_hostile_tensors_do_not_run(plain, ran):
    data = saved(Touch(ran))
    found = metadata_of(plain)
    (index,) = [each for each in found.storage_data if each.fqn == KEY]
    (plain / "other.distcp").write_bytes(data)
    found.storage_data[index] = filesystem._StorageInfo("other.distcp", 0, len(data))
    put(plain, found)
    with pytest.raises(ConfigError, match="cannot be read"):
        torch_dist.Reader(plain).read(Region(KEY, (4,), (0,), (4,)))
    assert not ran.exists()


def test_classes_stay_as_they_are(plain):
    """A pickle can set attributes of classes that it may name."""
    before = dict(vars(Metadata))
    name = "ctorch.distributed.checkpoint.metadata\nMetadata\n"
    content = f"{name}(N}}V__repr__\nI1\nstb.".encode()
    (plain / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match="it changes Metadata.__repr__"):
        read_metadata(plain)
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "a/b.distcp"])
def test_data_files_are_in_the_folder(name, plain):
    (plain.parent / "outside.distcp").write_bytes(b"0" * 9999)
    found = metadata_of(plain)
    for info in found.storage_data.values():
        info.relative_path = name
    put(plain, found)
    with pytest.raises(ConfigError, match="not the name of a file in its folder"):
        read_metadata(plain)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"1\n2", b"../..", b"iter_0000001"])
def test_trackers(content, plain, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(plain, folder / "iter_0000001")
    (folder / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^SRC is .*latest_checkpointed_iteration\.txt"):
        find_iteration(folder, "SRC")
