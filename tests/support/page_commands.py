# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The commands that README, docs and examples show, and a folder in which they run as printed.

A page's commands run in one shell, in order, with a tiny model under every name that pages use. No training
starts: a stand-in of torchrun copies the checkpoint that would be trained, and gives it prices.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

from tests.support.recipes import command as write_command
from tests.support.recipes import stand_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)
PROGRAMS = re.compile(
    r"((export )?[A-Z_]+=\S|mtraining|torchrun|make|pip|git|hf|vllm|sbatch|source|sed|cp|examples/)"
)
NOT_RUN = {
    r"pip install|pip download|git clone|hf download": "downloads",
    r"make (quickstart|test)": "installs an environment; .ci/run does, and tests/tools/quickstart",
    r"make -C": "compiles in a checkout; test_training_on_a_cpu does",
    r"vllm serve": "needs a GPU",
    r".*sbatch ": "needs Slurm; tests/examples/test_recipes.py runs slurm.sh",
    r"mtraining patch": "changes a checkout; tests/tools/test_patching.py does",
    r"mtraining plan memory .*\.\.\.": "abbreviated; tests/tools/plan runs its table",
    r"mtraining data prepare prolong": "needs mosaicml-streaming",
    r"mtraining eval": "needs a model with long positions; tests/tools/eval runs short ones",
    r"mtraining inspect .*--sensitivity": "runs for long; tests/tools/inspect does with short texts",
    r"(DATA_PATH|SPLIT)=.* \.\.\.": "shows variables of the command above it",
}
"""Commands that are not run here, by how they begin, and why."""
NAMES = {"N": "1024", "/path/to/Megatron-LM": "Megatron-LM"}
"""Words that stand for the reader's own, and what they become."""
MODELS = "Qwen2.5-0.5B Qwen2.5-3B Qwen2.5-7B MODEL MODEL_FOLDER T".split()
TORCHRUN = """#!{python}
import os, shutil, sys
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None
source, target = value("--pretrained-checkpoint") or value("--load"), value("--save")
if source and target and not os.path.exists(target):
    shutil.copytree(source, target)
    common = os.path.join(target, "release", "common.pt")
    if os.path.exists(common):  # as of a run with a target recall
        import torch
        content = torch.load(common, weights_only=False)
        content["args"].mtraining_target_recall = 0.95
        content["args"].mtraining_price_reached = 0.3
        torch.save(content, common)
        os.remove(os.path.join(target, "release", "integrity.json"))
print("started:", *sys.argv[1:])
"""


def commands(page: Path) -> list[str]:
    """The commands in a page's indented blocks, continued lines joined."""
    lines = []
    for block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        lines += textwrap.dedent(block).replace("\\\n", " ").splitlines()
    return [line for line in lines if PROGRAMS.match(line)]


def reason_not_to_run(command: str) -> str:
    """Why a command is not run; empty if it is."""
    return next((why for start, why in NOT_RUN.items() if re.match(start, command)), "")


def as_run(command: str) -> str:
    """A command with a reader's own words filled in."""
    for word, meant in NAMES.items():
        command = re.sub(rf"(?<![\w/.-]){re.escape(word)}(?![\w.-])", meant, command)
    return command


def stage(folder: Path) -> dict[str, str]:
    """Make what the commands of pages read; returns their environment."""
    from tests.support.convert_cases import save
    from tests.support.data_cases import save_tokenizer

    programs = folder / ".programs"
    write_command(programs, "torchrun", TORCHRUN.format(python=sys.executable))
    write_command(
        programs, "python", "#!/bin/sh\n"
    )  # tests/examples/test_dry_run.py has the launcher's check
    start = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m megatron_mtraining "$@"\n'
    write_command(programs, "mtraining", start)
    first = save("qwen2 tied", folder / MODELS[0], vocab_size=512, max_position_embeddings=1024)
    save_tokenizer(first)
    for name in MODELS[1:]:
        shutil.copytree(first, folder / name)
    source = Path(shlex.__file__).read_text(encoding="utf-8")
    (folder / "FILE").write_text(source, encoding="utf-8")
    long = source * (300_000 // len(source))
    # Two samples of 524288 tokens, in books and repositories of more than 32768, whose files have fewer.
    texts = dict.fromkeys(("books/a.txt", "books/b.txt", "INPUT.../g.txt"), long)
    texts |= {f"repos/{name}/{number}.py": source for name in "cd" for number in range(20)}
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(f"{place}\n" + text, encoding="utf-8")
    write_short(folder / "web.jsonl.zst", source)
    stand_in(folder / "Megatron-LM")
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
    }


def write_short(file: Path, source: str) -> None:
    """Short documents, for two samples of 524288 tokens."""
    import json

    from backports import zstd

    lines = "".join(json.dumps({"text": source[: 500 + place]}) + "\n" for place in range(1500))
    file.write_bytes(zstd.compress(lines.encode()))
