# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Starting a recipe of examples/ with commands of our own in place of torchrun and Slurm's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(folder.parent.name for folder in EXAMPLES.glob("*/run.sh"))
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


def command(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def start(script: Path, *words, commands: Path, timeout: float = 60, **environment):
    """Run ``script`` with ``commands`` first on the PATH, and nothing from outside that it reads."""
    env = {k: v for k, v in os.environ.items() if k not in CLEAN and not k.startswith("SLURM_")}
    env["PATH"] = f"{commands}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        ["bash", str(script), *map(str, words)],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Recorder:
    """Runs recipes without starting anything."""

    def __init__(self, folder: Path):
        self.commands, self.file = folder / "commands", folder / "started.jsonl"
        text = RECORDING.format(python=sys.executable, file=str(self.file), variable=VARIABLE)
        command(self.commands, "torchrun", text)
        command(self.commands, "srun", SRUN)
        command(self.commands, "scontrol", SCONTROL)
        self.checkout = folder / "Megatron-LM"
        (self.checkout / "megatron/training").mkdir(parents=True)
        (self.checkout / "pretrain_gpt.py").write_text("")
        options = self.checkout / "megatron/training/arguments.py"
        options.write_text("'--yarn-original-max-position-embeddings'")

    def start(self, script: Path, *words, **environment):
        """The process, and of each node what it gave to torchrun and its :data:`VARIABLE`."""
        self.file.unlink(missing_ok=True)
        run = start(script, *words, commands=self.commands, **environment)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return run, [json.loads(line) for line in lines]
