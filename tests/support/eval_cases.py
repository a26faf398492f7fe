# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What tests of ``mtraining eval`` share: a tiny model and its tokenizer, the command, its samples."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from megatron_mtraining.tools import cli
from megatron_mtraining.tools.eval.needle import KEYS, NEEDLE, NOISE, QUESTION

VOCABULARY, POSITIONS = 1024, 2048
QUIET = ("--device", "cpu", "--dtype", "float32")
SPARSE = ("--mtraining-price", "4", "--mtraining-window", "64", "--mtraining-block-size", "64")
"""Settings that leave much out at 1024 tokens."""
HOTPOT_TOO_LONG = (*range(20), 21)
"""Questions of :func:`ruler_data` whose documents do not fit 1024 tokens."""


@functools.cache
def text() -> str:
    """About 30K tokens of Python's own sources."""
    return Path(argparse.__file__).read_text(encoding="utf-8")


def tokenizer():
    """Byte-pair encoding of text like RULER's and this package's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vt = "Memorize and track the chain(s) of variable assignment hidden in the following text. VAR = "
    words = [NOISE, NEEDLE, QUESTION, vt, *KEYS]
    found.train_from_iterator([" ".join(words)] * 20 + [text()[:20_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>")


def save_model(folder: Path, **changes) -> Path:
    """An untrained model whose attention is uneven, and its tokenizer."""
    from tests.support.transformers_cases import small_model

    sizes = dict(
        vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, num_attention_heads=2, hidden_size=128,
        num_key_value_heads=1, eos_token_id=0,
    )  # fmt: skip
    small_model(**{**sizes, **changes}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def ruler_data(folder: Path) -> Path:
    """Essays, SQuAD and HotpotQA in the forms that they are published in.

    SQuAD's questions have two right answers, and the first documents of HotpotQA have more than 1024 tokens.
    """
    folder.mkdir()
    essay = " ".join(f"Sentence {n} of the essay is about the number {n * 7}." for n in range(400))
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": essay}))
    answers = [{"text": "two"}, {"text": "Two, as before"}]
    paragraphs = [
        {
            "context": f"Paragraph {n} says two.",
            "qas": [
                {"question": f"What says {n}-{k}?", "is_impossible": False, "answers": answers}
                for k in range(17)
            ],
        }
        for n in range(30)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {
            "question": f"Who is {n}?",
            "answer": "Ann",
            "context": [[f"Title {n}", ["Ann is here. " * (400 if n in HOTPOT_TOO_LONG else 1)]]],
        }
        for n in range(510)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    return folder


def run(*words) -> int:
    return cli.main(["eval", *map(str, words)])


def samples(output: Path) -> dict[str, list[dict]]:
    """All files of samples: their rows by the file's name, without what a clock says."""
    found = {}
    for file in sorted((output / "samples").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        found[file.stem] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return found


def results(output: Path, benchmark: str) -> dict:
    """The file of results, without what a clock says."""
    found = json.loads((output / f"{benchmark}.json").read_text())
    for row in (*found["rows"], *found["samples"]):
        del row["seconds"]
    return found


def refused(capsys, named, *words) -> None:
    """Assert that the command ends in status 2 with one line that has all of ``named``, and no samples."""
    status = run(*words)
    lines = capsys.readouterr().err.strip().splitlines()
    error = lines[-1] if lines else ""
    assert status == 2 and error.startswith("mtraining eval: "), lines
    for word in named:
        assert str(word) in error, error
