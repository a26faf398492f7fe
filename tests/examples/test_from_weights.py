# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A recipe's page, command by command, with a tiny model on CPU: from Hugging Face's weights and back.

MEGATRON_LM_PATH=/path/to/Megatron-LM pytest tests/examples/test_from_weights.py
"""

from __future__ import annotations

import sys

import pytest

from megatron_mtraining.tools.cli import main
from tests.support import recipes
from tests.support.pretrain_tree import SHIM, losses

SEQUENCE = 512
TINY = """
    --transformer-impl local --mtraining-block-size 64 --mtraining-loss-chunk 100 --distributed-backend gloo
    --use-cpu-initialization --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --lr-warmup-fraction 0 --no-save-optim
"""
"""What the CPU cannot do, and what is too large for it."""
TORCHRUN = """#!{python}
import os, sys
words = [word for word in sys.argv[1:] if word != "--bf16"]
at = words.index("-m")
command = [sys.executable, "-m", "torch.distributed.run", *words[:at], {shim!r}, *words[at:]]
os.execv(sys.executable, command)
"""


def test_from_hugging_face_weights_and_back(tree, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.support.convert_cases import config_of, save
    from tests.support.data_cases import make_documents, save_tokenizer, write_jsonl

    root = tree.roots["launcher"]
    if "--yarn-original-" not in (root / "megatron/training/arguments.py").read_text():
        pytest.skip("YaRN needs Megatron-LM 0.19")
    hf = save("qwen2", tmp_path / "hf", max_position_embeddings=128)
    save_tokenizer(hf, eos_token="<eod>")
    words = ["hf-to-megatron", hf, tmp_path / "model", "--yarn", SEQUENCE // 128]
    assert main(["convert", *map(str, words)]) == 0
    text = write_jsonl(tmp_path / "text.jsonl", make_documents(200))
    words = [
        "--tokenizer",
        hf,
        "--seq-length",
        SEQUENCE,
        "--output",
        tmp_path / "data",
        "--workers",
        1,
    ]
    assert main(["data", "prepare", str(text), *map(str, words)]) == 0

    recipes.command(tmp_path, "torchrun", TORCHRUN.format(python=sys.executable, shim=str(SHIM)))
    given = dict(
        MODEL=str(tmp_path / "model"), DATA_PATH=str(tmp_path / "data"), CHECKPOINT=str(tmp_path / "run"),
        GPUS="2", BATCH="1", RECALL="0.9", SPLIT="80,20,0", EVAL_ITERS="1", EVAL_INTERVAL="3", LR="1e-3",
        SAVE_INTERVAL="3", PYTHONPATH=str(root), OMP_NUM_THREADS="1",
    )  # fmt: skip

    def run(iterations: int, *more: str):
        script, words = recipes.EXAMPLES / "run.sh", [*TINY.split(), *more]
        return recipes.start(
            script,
            root,
            *words,
            commands=tmp_path,
            timeout=300,
            ITERATIONS=str(iterations),
            **given,
        )

    first = run(3)
    found = losses(first, 3)
    assert found[-1] < found[0] and "attempting to finetune" in first.stdout
    # A healthy run's lines, in the order that examples/README.md has them.
    said = (recipes.EXAMPLES / "README.md").read_text().partition("## A healthy run")[2]
    said = [
        line[4:].partition("...")[0].rstrip() for line in said.splitlines() if line[:4] == " " * 4
    ]
    said[0] = "using world size: 2, data-parallel size: 1, context-parallel size: 2,"
    said[3] = (
        f"Checkpoint file not found in load directory {tmp_path / 'run'} attempting to finetune with"
    )
    starts = [said[0], "[mtraining] replaced", "[mtraining] settings: policy=price", said[3]]
    assert [line.startswith(start) for line, start in zip(said, starts)] == [True] * 4
    starts += [" [", " [mtraining] iteration 1 | density"]
    text = "\n" + first.stdout
    places = [text.find("\n" + start) for start in starts]
    assert places == sorted(places) and min(places) >= 0, (places, first.stdout[:3000])
    assert first.stdout.count(" [mtraining] iteration ") == 3
    assert "loss at iteration 3 on validation set" in first.stdout
    # Megatron's distributed optimizer loads only with Transformer Engine's Adam.
    again = run(5, "--no-load-optim")
    assert len(losses(again, 2)) == 2, "it goes on from its own checkpoint"

    words = ["megatron-to-hf", tmp_path / "run", tmp_path / "back", "--like", tmp_path / "model/hf"]
    assert main(["convert", *map(str, words)]) == 0
    words = ["verify", tmp_path / "back", tmp_path / "run", "--seq", SEQUENCE]
    assert main(["convert", *map(str, words)]) == 0
    config = config_of(tmp_path / "back")
    assert config["max_position_embeddings"] == SEQUENCE
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back") is not None
