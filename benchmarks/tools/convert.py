# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Conversion: time, peak memory, and whether every tensor comes back, without a GPU. Rows go to
``results/convert.jsonl``. (``mtraining convert verify`` compares logits.)

    python -m benchmarks.tools.convert time --shape qwen2.5-3b          random weights, made on disk
    python -m benchmarks.tools.convert time --model HF_FOLDER --name NAME

``time`` takes disk for the model twice: one that was made is deleted once it is converted, and digests of
its tensors are kept. ``--layers`` takes fewer layers of a shape, where the whole has no room. Each conversion
is a process of its own, whose peak memory is what the system says (``ru_maxrss``, with the pages of the files
it has mapped).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from megatron_mtraining.tools.plan import shapes

from ..lib import record

GB = 10**9
BUDGET = 4 * 10**9
"""Bytes that a conversion may have beside the largest shard."""
SIZES = dict(
    max_position_embeddings=32768, rope_theta=1e6, model_type="qwen2", hidden_act="silu",
    use_sliding_window=False,
)  # fmt: skip
TINY = dict(
    architectures=["Qwen2ForCausalLM"], num_hidden_layers=4, hidden_size=128, intermediate_size=176,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=320, tie_word_embeddings=True,
    rms_norm_eps=1e-6,
)  # fmt: skip
SHAPES = ("qwen2.5-0.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-72b", "tiny")


def config_of(shape: str, layers: int | None, dtype: str) -> dict:
    """A config.json as Qwen2.5's are."""
    found = (TINY if shape == "tiny" else shapes.config_of(shape)) | SIZES
    return found | dict(torch_dtype=dtype, num_hidden_layers=layers or found["num_hidden_layers"])


def make(folder: Path, config: dict, shard_bytes: int) -> None:
    """A Hugging Face folder of random weights, written shard by shard.

    Raises:
        SystemExit: there is no room for the model and its checkpoint.
    """
    import torch

    from megatron_mtraining.tools.convert.families import model_of
    from megatron_mtraining.tools.convert.hf_folder import Planned, write_json, write_shards
    from megatron_mtraining.tools.convert.mapping import mapped

    folder.mkdir()
    dtype = getattr(torch, config["torch_dtype"])
    model = model_of(config, folder / "config.json")
    plan = [Planned(tensor.name, tensor.shape, dtype) for tensor in mapped(model)]
    needed, free = 2 * sum(p.bytes for p in plan), shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(
            f"{folder.parent} has {free / GB:.1f} GB free, and {needed / GB:.1f} GB are needed: give another "
            "--folder, or fewer --layers"
        )
    torch.manual_seed(1)
    tensors = (torch.empty(p.shape, dtype=dtype).uniform_(-0.1, 0.1) for p in plan)
    write_shards(folder, plan, tensors, shard_bytes, lambda size: None)
    write_json(folder / "config.json", config)


def digests(folder: Path) -> dict[str, str]:
    """Type, shape and a digest of the bytes of each tensor, by name."""
    import torch

    from megatron_mtraining.tools.convert.hf_folder import Shards

    shards, found = Shards(folder), {}
    for name, stored in shards.tensors.items():
        content = shards.read(name).contiguous().view(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        found[name] = f"{stored.dtype} {list(stored.shape)} {digest}"
    return found


def apart(function, *words):
    """A function's result, from a process of its own: what a child's peak says begins with its parent's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *words).result()


def converted(*words) -> tuple[float, int]:
    """Run ``mtraining convert``: seconds, and bytes of its peak memory."""
    command = [sys.executable, "-m", "megatron_mtraining", "convert", *map(str, words)]
    begun = time.perf_counter()
    # Elsewhere than in a checkout, whose kernels/ would be taken for a package.
    run = subprocess.Popen(command, cwd=tempfile.gettempdir(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)
    seconds = time.perf_counter() - begun
    run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {run.returncode}")
    return seconds, usage.ru_maxrss * 1024


def files_of(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.rglob("*") if file.is_file()]


def shard_sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in folder.glob("*.safetensors")]


def times(options) -> dict:
    """There and back of one model."""
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.folder) as name:
        root = Path(name)
        source = options.model.resolve() if options.model else root / "hf"
        if not options.model:
            config = config_of(options.shape, options.layers, options.dtype)
            apart(make, source, config, options.shard_bytes)
        before = apart(digests, source)
        config = json.loads((source / "config.json").read_text())
        size, largest = sum(shard_sizes(source)), max(shard_sizes(source))
        row = dict(
            what="time",
            model=options.name or f"shape of {options.shape}, random weights",
            layers=config["num_hidden_layers"],
            dtype=config.get("dtype") or config.get("torch_dtype"),
            tensors=len(before),
            shards=len(shard_sizes(source)),
            bytes=size,
            largest_shard=largest,
        )
        seconds, peak = converted("hf-to-megatron", source, root / "megatron")
        row["hf_to_megatron"] = dict(
            seconds=round(seconds, 2), peak_bytes=peak, disk=sum(files_of(root / "megatron"))
        )
        if not options.model:
            shutil.rmtree(source)
        back = ("megatron-to-hf", root / "megatron", root / "back")
        seconds, peak = converted(*back, "--shard-size", options.shard_bytes)
        row["megatron_to_hf"] = dict(
            seconds=round(seconds, 2),
            peak_bytes=peak,
            disk=sum(files_of(root / "back")),
            largest_shard=max(shard_sizes(root / "back")),
        )
        row["identical"] = apart(digests, root / "back") == before
    row["within_budget"] = all(
        row[way]["peak_bytes"] <= row[way].get("largest_shard", largest) + BUDGET
        for way in ("hf_to_megatron", "megatron_to_hf")
    )
    return row


def parse(words=None):
    from megatron_mtraining.tools.convert.command import size

    parser = record.parser(__doc__, "convert.jsonl")
    parser.add_argument("what", choices=("time",))
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer of them (default: the shape's)")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--name", help="what the row calls the model")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16",
        help="of weights that are made (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--shard-bytes", type=size, default="4GB", metavar="SIZE")
    parser.add_argument("--folder", type=Path, help="where there is room (default: that of TMPDIR)")
    options = parser.parse_args(words)
    if bool(options.model) == bool(options.shape):
        parser.error("give --shape, or --model")
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers {options.layers}: use 1 or more")
    return options


def main() -> int:
    options = parse()
    row = times(options)
    print(json.dumps(row), flush=True)
    record.append(options.output, [row])
    return 0 if row["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
