# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A Hugging Face model to Megatron, trained on with sparse attention, and back: losses all the way.

    python -m benchmarks.model.continued MEGATRON_LM --model HF_FOLDER [--seq N] [--steps N]

Converts the model (``mtraining convert``), prepares Python's own sources (``mtraining data prepare``), trains
with ``pretrain_gpt.py`` from the converted checkpoint, dense (``fused``) and with the mtraining backend, on
the same data in the same order; saves, converts the sparse run back, and has transformers read held-out
sources with the model before and after. One process, one GPU. Appends a row to ``results/continued.jsonl``:
losses of every step, held-out losses, and seconds of each part.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

from ..lib import record
from .pretrain import megatron_version, read_log

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
LAUNCH = [*TORCHRUN, "-m", "megatron_mtraining.launch"]
HELD_OUT = 12
"""Every so many-th file is held out."""


def share_out(folder: Path, most: int) -> tuple[list[Path], list[Path]]:
    """Copy Python's sources, at least so many bytes, to ``train/`` and ``held-out/`` in a folder."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if not {"site-packages", "test", "idlelib"} & set(file.parts)]
    parts: tuple[list[Path], list[Path]] = ([], [])
    total = 0
    for number, file in enumerate(files):
        held_out = number % HELD_OUT == HELD_OUT - 1
        part = folder / ("held-out" if held_out else "train")
        part.mkdir(parents=True, exist_ok=True)
        copy = part / f"{number:04d}_{file.name}"
        shutil.copyfile(file, copy)
        parts[held_out].append(copy)
        total += file.stat().st_size
        if total > most and held_out:
            break
    return parts


def mtraining(megatron: Path, *words) -> None:
    """Run the package's command beside a checkout; its error ends this."""
    command = [sys.executable, "-m", "megatron_mtraining", *map(str, words)]
    # The data's indexed files are written by Megatron, which may be there as a checkout alone.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(megatron)]))
    # Elsewhere than in a checkout of ours, whose kernels/ would be taken for a package.
    run = subprocess.run(command, cwd=tempfile.gettempdir(), env={**os.environ, "PYTHONPATH": path})
    if run.returncode:
        sys.exit(f"{shlex.join(command)}: exit status {run.returncode}")


def flags_of(checkpoint: Path) -> list[str]:
    """MEGATRON_ARGS of a converted checkpoint."""
    script = 'source "$1" && printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    words = ["bash", "-c", script, "bash", str(checkpoint / "megatron_args.sh")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def train(options, root: Path, attention: str) -> str:
    """Megatron's log of one run from ``root/megatron``, saved to ``root/attention``."""
    words = [*flags_of(root / "megatron"), "--seq-length", options.seq]
    words += ["--transformer-impl", options.transformer_impl, "--bf16", "--micro-batch-size", 1]
    words += ["--global-batch-size", 1, "--train-iters", options.steps, "--lr", options.lr]
    words += ["--lr-decay-style", "constant", "--lr-warmup-fraction", 0.1, "--clip-grad", 1.0]
    words += ["--weight-decay", 0.1, "--adam-beta2", 0.95, "--seed", 1]
    words += ["--use-distributed-optimizer", "--no-create-attention-mask-in-dataloader"]
    words += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    words += ["--recompute-num-layers", 1, "--no-gradient-accumulation-fusion"]
    words += ["--log-interval", 1, "--eval-iters", 0, "--eval-interval", 1000]
    words += ["--data-path", root / "data", "--data-cache-path", root / "cache"]
    words += ["--split", "100,0,0", "--attention-backend", attention]
    if attention == "mtraining":
        words += ["--mtraining-target-recall", options.target_recall]
        words += ["--save", root / attention, "--save-interval", options.steps]
    words += options.more
    command = list(map(str, [*LAUNCH, options.megatron / "pretrain_gpt.py", *words]))
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = subprocess.run(
        command, env=environment, cwd=tempfile.gettempdir(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if options.log:
        options.log.mkdir(parents=True, exist_ok=True)
        (options.log / f"{attention}.log").write_text(run.stdout)
    if run.returncode:
        sys.exit(f"{run.stdout[-6000:]}\n{shlex.join(command)}: exit status {run.returncode}")
    return run.stdout


@torch.no_grad()
def held_out_loss(folder: Path, files: list[Path], options) -> float:
    """Mean loss of transformers' own model on one sequence of the held-out sources."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: options.seq + 1]
    )
    if len(tokens) <= options.seq:
        sys.exit(f"held-out sources have {len(tokens)} tokens, fewer than --seq {options.seq}")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    hidden = model.base_model(input_ids=tokens[None, :-1].to(device)).last_hidden_state[0]
    parts = zip(hidden.split(2048), tokens[1:].to(device).split(2048))
    losses = [
        torch.nn.functional.cross_entropy(model.lm_head(part).float(), labels, reduction="sum")
        for part, labels in parts
    ]
    return torch.stack(losses).sum().item() / options.seq


def continued(options, root: Path) -> dict:
    """The whole way, and the row it leaves."""
    seconds, last = {}, [time.perf_counter()]

    def did(what: str) -> None:
        now = time.perf_counter()
        seconds[what], last[0] = round(now - last[0], 1), now
        print(f"{what}: {seconds[what]} s", flush=True)

    model, most = options.model.resolve(), 8 * max(options.steps, HELD_OUT) * (options.seq + 1)
    training, held_out = share_out(root / "text", most)
    before = held_out_loss(model, held_out, options)
    did("transformers, before")
    mtraining(options.megatron, "convert", "hf-to-megatron", model, root / "megatron")
    did("hf-to-megatron")
    words = ["--seq-length", options.seq, "--output", root / "data"]
    mtraining(
        options.megatron, "data", "prepare", root / "text" / "train", "--tokenizer", model, *words
    )
    did("data prepare")
    found = {}
    for attention in ("fused", "mtraining"):
        found[attention] = read_log(train(options, root, attention))
        did(attention)
    sparse = found["mtraining"]
    back = root / "back"
    mtraining(
        options.megatron, "convert", "megatron-to-hf", root / "mtraining", back, "--like", model
    )
    did("megatron-to-hf")
    after = held_out_loss(back, held_out, options)
    did("transformers, after")
    mean = {name: sum(sparse[name]) / len(sparse[name]) for name in ("density", "recall")}
    return dict(
        model=options.name or model.name, seq=options.seq, steps=options.steps, lr=options.lr,
        transformer_impl=options.transformer_impl, target_recall=options.target_recall,
        losses=list(sparse["loss"].values()), losses_dense=list(found["fused"]["loss"].values()),
        density=round(mean["density"], 4), recall=round(mean["recall"], 4),
        held_out_before=round(before, 5), held_out_after=round(after, 5), files=len(training),
        seconds=seconds,
        versions={
            "megatron": megatron_version(options.megatron),
            "transformer_engine": record.installed("transformer-engine"),
            "transformers": record.installed("transformers"),
        },
    )  # fmt: skip


def parse(words=None):
    parser = record.parser(__doc__, "continued.jsonl")
    parser.add_argument("megatron", type=Path, metavar="MEGATRON_LM")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--name", help="what the row calls the model")
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--target-recall", type=float, default=0.95)
    parser.add_argument(
        "--transformer-impl", choices=("transformer_engine", "local"), default="transformer_engine"
    )
    parser.add_argument("--folder", type=Path, help="where there is room (default: that of TMPDIR)")
    parser.add_argument("--log", type=Path, help="keep Megatron's logs in this folder")
    # What this does not know goes to Megatron.
    options, options.more = parser.parse_known_args(words)
    options.megatron = options.megatron.resolve()  # runs start elsewhere
    if options.folder:
        options.folder = options.folder.resolve()
    if not (options.megatron / "pretrain_gpt.py").is_file():
        parser.error(f"there is no pretrain_gpt.py in {options.megatron}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model is {options.model}, which has no config.json")
    for name in ("seq", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: use 1 or more")
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="continued-", dir=options.folder) as name:
        row = continued(options, Path(name))
    print(json.dumps(row), flush=True)
    record.append(options.output, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
