# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Packed conversations (``--sft``) in Megatron-LM's own pretrain_gpt.py on CPU: however tokens, layers and
weights are spread over ranks, and whatever ends a run, steps are those of one process."""

import json
import random
import re

import pytest

from benchmarks.model import conversations
from tests.support.pretrain_tree import SEQUENCE, check_same, losses, step_losses

pytestmark = pytest.mark.slow
pytest.importorskip("datasets")
pytest.importorskip("transformers")

STEPS = 4
GRANULARITY = 16
"""Megatron pads conversations to multiples of 2 cp: these need no padding with any of the sizes here."""
STAGES = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "CP 2": (2, "--context-parallel-size 2"),
    "CP 4 in nodes of 2": (
        4,
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 --mtraining-loss-chunk 100",
    ),
    "CP 2 x PP 2": (4, f"--context-parallel-size 2 {STAGES}"),
    "CP 2 x TP 2, recomputed": (
        4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Options of a set of conversations of 16 to 300 tokens, packed, and of a tokenizer of words."""
    folder = tmp_path_factory.mktemp("chat")
    words = [f"w{i}" for i in range(500)]  # padded to 512, over one rank and over two
    conversations.save_tokenizer(folder / "tokenizer", words)
    draw = random.Random(5)

    def conversation():
        count = GRANULARITY * draw.randint(1, 12) - 6  # of words, beside those of the template
        text = draw.choices(words, k=count)
        asked = draw.randint(1, count - 1)
        yield {"role": "system", "content": ""}
        yield {"role": "user", "content": " ".join(text[:asked])}
        yield {"role": "assistant", "content": " ".join(text[asked:])}

    with open(folder / "chat.jsonl", "w") as file:
        for _ in range(40):
            packed = [turn for _ in range(draw.randint(1, 6)) for turn in conversation()]
            file.write(json.dumps({"messages": packed}) + "\n")
    return (
        f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {folder / 'tokenizer'} "
        f"--sft-tokenizer-prompt-format default --data-path {folder / 'chat.jsonl'} --split 100,0,0"
    )


OURS = (
    "--attention-backend mtraining --mtraining-block-size 64 --mtraining-price 0 --calculate-per-token-loss "
    f"--train-iters {STEPS} --no-create-attention-mask-in-dataloader"
).split()


@pytest.fixture(autouse=True)
def _prompt_format(tree):
    [tokenizer] = tree.roots["launcher"].glob("megatron/**/sft_tokenizer.py")
    if '"default"' not in tokenizer.read_text():
        pytest.skip("this Megatron-LM has no --sft-tokenizer-prompt-format default")


def test_layouts_train_as_one_process(tree, chat):
    one = tree.run("launcher", 1, *OURS, data=chat)
    assert losses(one, STEPS)[-1] < losses(one, STEPS)[0]
    # Stages draw weights of their own.
    staged = tree.run("launcher", 2, *OURS, *STAGES.split(), data=chat)
    for name, (processes, words) in LAYOUTS.items():
        run = tree.run("launcher", processes, *OURS, *words.split(), data=chat)
        print(name)
        check_same(run, staged if STAGES in words else one, within=2e-5, steps=STEPS)


def test_a_pattern_trains(tree, chat):
    words = "--context-parallel-size 2 --mtraining-price 4 --mtraining-backward-threshold 3".split()
    ours = [word for word in OURS if word not in ("--mtraining-price", "0")]
    run = tree.run("launcher", 2, *ours, *words, data=chat)
    assert losses(run, STEPS)[-1] < losses(run, STEPS)[0]
    assert SEQUENCE == 512


def test_a_killed_run_goes_on_in_other_layouts(tree, chat, tmp_path):
    """Killed in a step, then in the middle of a save: of whole checkpoints the last is loaded."""
    iterations = 8
    whole = tree.run("launcher", 1, *OURS, "--train-iters", str(iterations), data=chat)
    expected = step_losses(losses(whole, iterations))
    folder, log = tmp_path / "run", tmp_path / "log"
    saved = folder / "latest_checkpointed_iteration.txt"
    kept = f"--save {folder} --load {folder} --save-interval 2 --train-iters {iterations} "

    def run_until(is_time, words: str) -> None:
        tree.run_until(is_time, log, 2, *OURS, *(kept + words).split(), data=chat)

    run_until(
        lambda: log.exists() and re.search(r"iteration +3/", log.read_text()),
        "--context-parallel-size 2",
    )
    assert saved.read_text() == "2"
    run_until((folder / "iter_0000004").exists, "--tensor-model-parallel-size 2")
    at = int(saved.read_text())
    assert at in (2, 4)
    words = kept + "--context-parallel-size 2 --pipeline-model-parallel-size 2"
    run = tree.run("launcher", 4, *OURS, *words.split(), data=chat)
    found = step_losses(losses(run, iterations - at))
    assert found == pytest.approx(expected[at:], abs=2e-5, rel=0)
