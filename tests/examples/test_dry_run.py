# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``run.sh --dry-run`` refuses what a start refuses: the launcher's check, with a real checkout."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.support.recipes import EXAMPLES, command, config_of, converted, stand_in, start

PYTHON = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'


@pytest.fixture
def dry_run(tmp_path):
    """A dry run of a Llama with 8192 positions and 14 heads on 4 GPUs."""
    command(tmp_path / "commands", "python", PYTHON)
    config = config_of("qwen2.5-0.5b-128k", positions=8192)
    config |= dict(architectures=["LlamaForCausalLM"])
    model = converted(tmp_path / "model", config, None, tokenizer=False)
    given = dict(MODEL=str(model), GPUS="4", commands=tmp_path / "commands", timeout=300)
    local = ("--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm")

    def run(checkout, *words, **environment):
        script = EXAMPLES / "run.sh"
        return start(script, "--dry-run", checkout, *local, *words, **{**given, **environment})

    return run


def test_a_python_that_the_checkout_does_not_run_on(dry_run, tmp_path):
    if sys.version_info >= (3, 12):
        pytest.skip("every Megatron-LM runs on this Python")
    checkout = stand_in(tmp_path / "Megatron-LM")
    (checkout / "megatron/core").mkdir()
    (checkout / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 19\n")
    run = dry_run(checkout)
    assert (run.returncode, run.stdout) == (2, "")
    assert "Megatron-LM 0.17 and later need Python 3.12" in run.stderr


REFUSED = {
    "heads": ({"TP": "4"}, [], "num_attention_heads (14) must be a multiple of"),
    "tokens": ({"SEQ_LENGTH": "8000"}, [], "--seq-length is 8000, which is not a multiple of 512"),
    "a layer too many": ({"PP": "2"}, ["--num-layers", "25"], "ayers"),
    "an unknown flag": ({}, ["--nonsense", "5"], "unrecognized arguments: --nonsense 5"),
    "nothing": ({"TP": "2"}, [], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_start_refuses(case, checkout, dry_run):
    environment, words, message = REFUSED[case]
    run = dry_run(checkout, *words, **environment)
    if message is None:
        assert (run.returncode, run.stderr) == (0, "") and "torchrun" in run.stdout
    else:
        assert (run.returncode, run.stdout) == (2, "")
        assert message in run.stderr and run.stderr.count("\n") == 1, run.stderr
