# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Runs of pretrain_gpt.py in a copy of a Megatron-LM checkout, on CPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_mtraining.tools.cli import main
from tests.support import cpu_shim
from tests.support.ranks import ON_CPU
from tests.support.running import torchrun, torchrun_command

SHIM = Path(cpu_shim.__file__)
GPT = "pretrain_gpt.py"
STEPS = 20
SEQUENCE = 512
MODEL = f"""
    --transformer-impl local --num-layers 2 --hidden-size 256 --ffn-hidden-size 256
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 64
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --attention-dropout 0
    --hidden-dropout 0
"""
# The shim has one random generator: tensor-parallel weights are the same if made on the CPU.
TRAINING = f"""
    --distributed-backend gloo --use-cpu-initialization --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --lr-decay-style constant
    --train-iters {STEPS} --log-interval 1 --eval-iters 0 --eval-interval 1000 --seed 11
"""
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 500"
INTER_DOCUMENT = "--dataloader-inter-document-masking"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
# With a larger vocabulary no token of the mock data but the last of a document is its end.
PACKING = "--eod-mask-loss --calculate-per-token-loss --vocab-size 4200"


class Tree:
    """A copy of a checkout, and the runs made with it."""

    def __init__(self, checkout: Path, root: Path):
        self.roots = {"launcher": root / "plain", "patch": root / "patched"}
        plain, patched = self.roots.values()
        plain.mkdir()
        for script in checkout.glob("*.py"):
            shutil.copy(script, plain)
        shutil.copytree(
            checkout / "megatron", plain / "megatron", ignore=shutil.ignore_patterns("*.so")
        )
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        includes = subprocess.run(
            [sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True
        ).stdout.strip()
        subprocess.run(
            ["make", "-s", f"LIBEXT={suffix}", f"CPPFLAGS={includes}"],
            cwd=plain / "megatron/core/datasets",
            check=True,
        )
        shutil.copytree(plain, patched)
        assert main(["patch", "apply", str(patched)]) == 0
        self._plain: dict[tuple, subprocess.CompletedProcess] = {}

    def skip_without(self, words: str) -> None:
        """Skip the test if ``words`` have options that this Megatron-LM does not have."""
        known = (self.roots["launcher"] / "megatron/training/arguments.py").read_text()
        for option in ("--yarn-original-max-position-embeddings", INTER_DOCUMENT):
            if option in words and option not in known:
                pytest.skip(f"this Megatron-LM has no {option}")

    def null_tokenizer(self, eod: int) -> str:
        """Arguments of a tokenizer whose last word is ``eod``, for datasets that have it."""
        null = "megatron/core/tokenizers/text/libraries/null_tokenizer.py"
        less = "self._vocab_size - 1" in (self.roots["launcher"] / null).read_text()
        return f"--tokenizer-type NullTokenizer --vocab-size {eod + less}"

    def run(
        self,
        way: str,
        processes: int,
        *words: str,
        timeout: float = 300,
        data: str = MOCK,
        script=GPT,
    ):
        """A script of Megatron-LM: ``way`` is "launcher", "patch", or "plain" for neither."""
        command, root = self.command(way, *words, data=data, script=script)
        return torchrun(processes, *command, timeout=timeout, PYTHONPATH=_path(root))

    def run_until(
        self, is_time: Callable[[], object], output: Path, processes: int, *words, data: str = MOCK
    ) -> str:
        """Kill all processes of a run as soon as ``is_time``: nothing of it cleans up. What it printed goes
        to ``output``, and is returned."""
        command, root = self.command("launcher", *words, data=data)
        command, environment = torchrun_command(processes, *command, PYTHONPATH=_path(root))
        end = time.monotonic() + 240
        with output.open(
            "w"
        ) as file:  # a pipe that nobody reads would stop the run when it is full
            run = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while not is_time():
                assert run.poll() is None and time.monotonic() < end, output.read_text()[-4000:]
                time.sleep(0.001)
        finally:
            parent = psutil.Process(run.pid) if run.poll() is None else None
            for process in [*(parent.children(recursive=True) if parent else []), parent]:
                if process is not None and process.is_running():
                    process.kill()
            run.wait(60)
        return output.read_text()

    def command(self, way: str, *words: str, data: str = MOCK, script=GPT) -> tuple[list, Path]:
        """The words after torchrun's own of :meth:`run`, and the folder that Python looks in."""
        root = self.roots["patch" if way == "patch" else "launcher"]
        how = ["-m", "megatron_mtraining.launch"] if way == "launcher" else []
        return [
            SHIM,
            *how,
            root / script,
            *MODEL.split(),
            *TRAINING.split(),
            *data.split(),
            *words,
        ], root

    def plain(self, processes: int = 1, *words: str):
        """The run of Megatron's own attention, without the plug-in; made once."""
        at = processes, *words
        if at not in self._plain:
            self._plain[at] = self.run("plain", *at)
        return self._plain[at]


def _path(root: Path) -> str:
    """What Python looks in: where this process takes the package from, too, which may not be the one that is
    installed."""
    return os.pathsep.join((str(root), ON_CPU["PYTHONPATH"]))


def step_losses(printed: list[float]) -> list[float]:
    """The loss of each step of a run that logs every step.

    Megatron's ``training_log`` does not reset its sums after a run's first log line, so the second line is
    the mean of the first two steps.
    """
    first, mean_of_two, *others = printed
    return [first, 2 * mean_of_two - first, *others]


def check_same(run, expected, within: float = 1e-5, steps: int = STEPS) -> None:
    """Check that losses of all steps are equal ``within`` that, and gradient norms to the digits of the log:
    losses alone do not show how gradients are scaled, on which Adam's steps do not depend."""
    assert losses(run, steps) == pytest.approx(losses(expected, steps), abs=within, rel=0)
    assert norms(run, steps) == pytest.approx(norms(expected, steps), abs=2e-3, rel=1e-3)


def norms(run, steps: int = STEPS) -> list[float]:
    """Gradient norms of all steps."""
    found = [float(norm) for norm in re.findall(r"grad norm: (\S+)", run.stdout)]
    assert len(found) == steps, run.stdout[-4000:]
    return found


def losses(run, steps: int = STEPS) -> list[float]:
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    found = [float(loss) for loss in re.findall(r"lm loss: (\S+)", run.stdout)]
    assert len(found) == steps, run.stdout[-4000:]
    return found
