# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Starting a recipe of examples/ with commands of our own in place of torchrun and Slurm's."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
EVERY_RECIPE = sorted(folder.parent.name for folder in EXAMPLES.glob("*/run.sh"))
RECIPES = [name for name in EVERY_RECIPE if "NODES:=1" in (EXAMPLES / name / "run.sh").read_text()]
"""Those that start on one node unless told otherwise."""
RECORDING = """#!{python}
import json, os, sys
with open({file!r}, "a") as file:
    print(json.dumps([sys.argv[1:], os.environ.get("{variable}")]), file=file)
"""
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
SRUN = """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" || exit; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[07-10]" ] && printf 'node%s\\n' 07 08 09 10
"""
CLEAN = {"NODES", "GPUS", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DATA_PATH", "TOKENIZER"}
CLEAN |= {"CHECKPOINT", "BATCH", "ITERATIONS", "PRICE", "RECALL", "VERTICAL", "SLASH", "SETTINGS"}
CLEAN |= {"MODEL", "TP", "PP", "CP", "SEQ_LENGTH", "TRAINED_LENGTH", "SPLIT", "EVAL_ITERS", "LR"}
CLEAN |= {"ATTENTION", "MIN_LR", "EVAL_INTERVAL", "SAVE_INTERVAL", "SHAPE"}


def command(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def start(script: Path, *words, commands: Path, timeout: float = 60, **environment):
    """Run ``script`` with ``commands`` first on the PATH, and nothing from outside that it reads.

    Without a ``python`` there, a dry run checks nothing: that takes Megatron-LM, and many seconds.
    """
    if not (commands / "python").exists():
        command(commands, "python", "#!/bin/sh\n")
    env = {k: v for k, v in os.environ.items() if k not in CLEAN and not k.startswith("SLURM_")}
    env["PATH"] = f"{commands}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        ["bash", str(script), *map(str, words)],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def stand_in(folder: Path) -> Path:
    """What run.sh looks for in a checkout of Megatron-LM."""
    (folder / "megatron/training").mkdir(parents=True)
    (folder / "pretrain_gpt.py").write_text("")
    options = folder / "megatron/training/arguments.py"
    options.write_text("'--yarn-original-max-position-embeddings'")
    return folder


def dataset(prefix: Path, sequences: int) -> Path:
    """The files of an indexed dataset, as far as run.sh reads them."""
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, sequences, sequences + 1)
    prefix.with_name(prefix.name + ".idx").write_bytes(header)
    prefix.with_name(prefix.name + ".bin").write_bytes(b"")
    return prefix


def config_of(recipe: str, positions: int = 32768) -> dict:
    """config.json of the model that a recipe is for."""
    config = dict(
        architectures=["Qwen2ForCausalLM"], hidden_act="silu", max_position_embeddings=positions,
        rms_norm_eps=1e-6, rope_theta=1000000.0, use_sliding_window=False, vocab_size=151936,
        tie_word_embeddings=True,
    )  # fmt: skip
    sizes = {
        "qwen2.5-0.5b-128k": (24, 896, 4864, 14, 2),
        "qwen2.5-3b-512k": (36, 2048, 11008, 16, 2),
        "qwen2.5-7b-256k": (28, 3584, 18944, 28, 4),
    }[recipe]
    names = (
        "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads"
    )
    config |= dict(zip(names.split(), sizes))
    if recipe.startswith("qwen2.5-7b"):
        config |= dict(vocab_size=152064, tie_word_embeddings=False)
    return config


def converted(folder: Path, config: dict, yarn: float | None, tokenizer: bool = True) -> Path:
    """A folder with the ``megatron_args.sh`` of a model, and no weights."""
    from megatron_mtraining.tools.convert import families, megatron_args, rope

    folder.mkdir()
    file = folder / "config.json"
    positions = rope.extended(rope.arguments_of(config, file), None, yarn, None)
    args = megatron_args.namespace(families.model_of(config, file), positions)
    text = megatron_args.script(args, "a test's model", tokenizer)
    (folder / "megatron_args.sh").write_text(text)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


class Recorder:
    """Runs recipes without starting anything."""

    def __init__(self, folder: Path):
        self.commands, self.file = folder / "commands", folder / "started.jsonl"
        text = RECORDING.format(python=sys.executable, file=str(self.file), variable=VARIABLE)
        command(self.commands, "torchrun", text)
        command(self.commands, "srun", SRUN)
        command(self.commands, "scontrol", SCONTROL)
        self.checkout = stand_in(folder / "Megatron-LM")

    def start(self, script: Path, *words, **environment):
        """The process, and of each node what it gave to torchrun and its :data:`VARIABLE`."""
        self.file.unlink(missing_ok=True)
        run = start(script, *words, commands=self.commands, **environment)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return run, [json.loads(line) for line in lines]
