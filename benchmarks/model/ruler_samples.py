# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""RULER's samples (arXiv 2404.06654) as tokens, for a machine without lm-eval.

lm-eval makes the prompts, as for ``mtraining eval ruler``. A sample is a prompt and its right answer, as that
command's loss of the answer has it. The tasks are those that need no data.

    python -m benchmarks.model.ruler_samples --model smol.gguf --length 16384 --samples 20 --output ruler.npz

Needs the extra ``.[eval]``, no GPU and no network. ``frontier train --ruler ruler.npz`` judges by it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_mtraining import ConfigError
from megatron_mtraining.models.tokenizer import transformers_tokenizer

from ..lib import record

TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
CONTEXT = 200
"""Characters of a prompt that decide how the answer behind it is tokenized."""


class Sample(NamedTuple):
    """A prompt and its answer.

    Attributes:
        tokens: int64 ``[n]``; the last ``answer`` of them are the answer's.
    """

    tokens: Tensor
    answer: int


def make(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Tokens of all samples one after another, with their lengths, by task."""
    from megatron_mtraining.tools.eval import ruler

    folder, more = options.model, {}
    if folder.is_file():
        folder, more = folder.parent, {"gguf_file": folder.name}
    tokenizer = transformers_tokenizer(folder, **more)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        asked = SimpleNamespace(
            lengths=(options.length,), tasks=options.tasks, samples=options.samples, data=None
        )
        for planned in ruler.planned(asked, tokenizer, Path(folder)):
            planned.task.build_all_requests(limit=options.samples, rank=0, world_size=1)
            tokens, lengths, answers = [], [], []
            for request in planned.task.instances:
                prompt, target = request.args[0], planned.target(request.doc)
                # As lm-eval: the answer's tokens are what it adds to those of the prompt.
                near = tokenizer(prompt[-CONTEXT:]).input_ids
                answer = tokenizer(prompt[-CONTEXT:] + target).input_ids[len(near) :]
                tokens += [*tokenizer(prompt).input_ids, *answer]
                lengths.append(len(tokens) - sum(lengths))
                answers.append(len(answer))
            for name, values in (("tokens", tokens), ("lengths", lengths), ("answers", answers)):
                found[f"{planned.name}.{name}"] = np.array(values, dtype=np.int32)
            print(
                f"{planned.name}: {len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens"
            )
    return found


def read(path: Path, device: str | torch.device) -> dict[str, list[Sample]]:
    """The samples of a file, by task.

    Raises:
        ConfigError: the file is not one of this script's.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        tasks = [name.removesuffix(".tokens") for name in arrays if name.endswith(".tokens")]
        found = {}
        for task in tasks:
            tokens, lengths, answers = (
                arrays[f"{task}.{name}"] for name in ("tokens", "lengths", "answers")
            )
            parts = np.split(tokens.astype(np.int64), np.cumsum(lengths)[:-1])
            found[task] = [
                Sample(torch.from_numpy(part).to(device), int(count))
                for part, count in zip(parts, answers, strict=True)
            ]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--ruler {path} is no file of benchmarks.model.ruler_samples: {error}"
        ) from None
    if not found:
        raise ConfigError(
            f"--ruler {path} has no samples: make it with benchmarks.model.ruler_samples"
        )
    return found


def main(words: list[str] | None = None) -> None:
    parser = record.parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder or .gguf, for its tokenizer")
    add("--length", type=int, default=16384, help="tokens of prompt and answer, at most")
    add("--samples", type=int, default=20, help="of each task")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--output", type=Path, required=True)
    options = parser.parse_args(words)
    np.savez_compressed(options.output, **make(options))


if __name__ == "__main__":
    main()
