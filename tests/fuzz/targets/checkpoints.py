# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Files of models, as ``mtraining convert`` and ``inspect`` read them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from struct import pack

import torch

from .common import Fault, command, folder_of_this_process

CONFIG = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", vocab_size=40, hidden_size=128,
    intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=False, use_sliding_window=False,
    sliding_window=None, max_window_layers=2, attention_dropout=0.0, torch_dtype="bfloat16",
    rope_theta=1e6, rope_scaling=None, layer_types=["full_attention"] * 2,
)  # fmt: skip
INDEX, TRACKER = "model.safetensors.index.json", "latest_checkpointed_iteration.txt"


@cache
def checkpoints() -> tuple[Path, Path]:
    """A model in two files with an index, and the checkpoint converted from it; removed at exit."""
    from safetensors.torch import save_file

    from megatron_mtraining.tools.convert.families import model_of
    from megatron_mtraining.tools.convert.mapping import mapped

    root = folder_of_this_process()
    model, checkpoint = root / "hf", root / "meg"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    tensors = {
        each.name: torch.randn(each.shape).to(torch.bfloat16)
        for each in mapped(model_of(CONFIG, model / "config.json"))
    }
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, model / file, metadata={"format": "pt"})
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (model / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    command(["convert", "hf-to-megatron", model, checkpoint], checkpoint)
    return model, checkpoint


def _with(folder: Path, place: Path, name: str, data: bytes) -> Path:
    """``folder``, by links, with another file ``name``."""
    copy = place / "in"
    shutil.copytree(folder, copy, copy_function=os.link)
    (copy / name).unlink(missing_ok=True)
    (copy / name).write_bytes(data)
    return copy


def _to_megatron(data: bytes, place: Path, name: str) -> None:
    source, out = _with(checkpoints()[0], place, name, data), place / "out"
    command(["convert", "hf-to-megatron", source, out], out)
    if not (out / "release" / ".metadata").is_file():
        raise Fault("no checkpoint was written")


def config_json(data: bytes, place: Path) -> None:
    _to_megatron(data, place, "config.json")


def index_json(data: bytes, place: Path) -> None:
    _to_megatron(data, place, INDEX)


def safetensors(data: bytes, place: Path) -> None:
    _to_megatron(data, place, "model-00001-of-00002.safetensors")


def inspect_config(data: bytes, place: Path) -> None:
    """config.json as ``inspect`` opens it, through transformers."""
    from megatron_mtraining.models.environment import quietly
    from megatron_mtraining.models.open import open_model
    from megatron_mtraining.models.types import ModelOptions

    folder = _with(checkpoints()[0], place, "config.json", data)
    quietly(lambda: open_model(ModelOptions(folder, torch.device("cpu"), torch.float32)))


def _to_hf(data: bytes, place: Path, name: str, kept: tuple = ()) -> None:
    folder = _with(checkpoints()[1], place, name, data)
    if name not in kept:
        (folder / "release" / "integrity.json").unlink(missing_ok=True)
    out = place / "out"
    command(["convert", "megatron-to-hf", folder, out], out)
    if not (out / "config.json").is_file():
        raise Fault("no model was written")


def tracker(data: bytes, place: Path) -> None:
    _to_hf(data, place, TRACKER)


def metadata(data: bytes, place: Path) -> None:
    _to_hf(data, place, "release/.metadata")


def common_pt(data: bytes, place: Path) -> None:
    _to_hf(data, place, "release/common.pt")


def distcp(data: bytes, place: Path) -> None:
    _to_hf(data, place, "release/__0_0.distcp")


def integrity(data: bytes, place: Path) -> None:
    name = "release/integrity.json"
    _to_hf(data, place, name, kept=(name,))


def file_seeds(pair: int, name: str) -> Callable[[], list[bytes]]:
    def seeds():
        if pair:  # once, and not in each process that is forked from this one
            import megatron.core.dist_checkpointing  # noqa: F401
        return [(checkpoints()[pair] / name).read_bytes()]

    return seeds


def gguf(data: bytes, place: Path) -> None:
    from megatron_mtraining.models.gguf_header import check_header

    file = place / "model.gguf"
    file.write_bytes(data)
    check_header(file, f"MODEL is {file}")


def gguf_seeds() -> list[bytes]:
    def text(value: bytes) -> bytes:
        return pack("<Q", len(value)) + value

    values = [
        text(b"general.architecture") + pack("<I", 8) + text(b"qwen2"),
        text(b"qwen2.block_count") + pack("<II", 4, 24),
        text(b"qwen2.embedding_length") + pack("<IQ", 10, 896),
        text(b"tokenizer.ggml.tokens")
        + pack("<IIQ", 9, 8, 3)
        + text(b"a")
        + text(b"bc")
        + text(b""),
        text(b"tokenizer.ggml.scores") + pack("<IIQ3f", 9, 6, 3, 0, 1, 2),
        text(b"nested") + pack("<IIQ", 9, 9, 2) + 2 * pack("<IQ2b", 1, 2, 3, 4),
    ]
    tensors = [
        text(b"token_embd.weight") + pack("<I2Q", 2, 896, 3) + pack("<IQ", 0, 0),
        text(b"output_norm.weight") + pack("<IQ", 1, 896) + pack("<IQ", 0, 10752),
    ]
    content = b"".join(values + tensors) + bytes(64)
    return [
        b"GGUF" + pack("<IQQ", version, len(tensors), len(values)) + content for version in (2, 3)
    ]


def indexed_dataset(data: bytes, place: Path) -> None:
    """The index of a dataset of Megatron's, as ``inspect --text`` reads it."""
    from megatron_mtraining.models.text import read_indexed_dataset

    (place / "a.bin").write_bytes(bytes(range(240)))
    (place / "a.idx").write_bytes(data)
    ids = read_indexed_dataset(place / "a.bin", 100)
    if ids.ndim != 1 or len(ids) > 100:
        raise Fault(f"tokens of shape {ids.shape}")


def index_seeds() -> list[bytes]:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as folder:
        builder = IndexedDatasetBuilder(f"{folder}/a.bin", np.uint16)
        for count in (40, 30, 50):
            builder.add_document(torch.arange(count), [count])
        builder.finalize(f"{folder}/a.idx")
        return [Path(folder, "a.idx").read_bytes()]
