# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""Dense RULER by ``mtraining eval`` beside lm-eval's own run of its Hugging Face model, sample by sample.
Rows go to ``results/ruler_agreement.jsonl``.

    python -m benchmarks.tools.ruler_agreement --model HF_FOLDER --samples 3
    python -m benchmarks.tools.ruler_agreement --model HF_FOLDER --data RULER_DATA --chat

Each task is a run of its own on both sides: the random numbers of lm-eval's samples go on from task to task.
lm-eval runs first, as its own command (:mod:`.lm_eval_offline`). Both keep samples in ``--folder``; the same
command goes on from there. A row counts the samples whose prompt (with the arguments of generation), answer
and score are the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from ..lib import record

VERSIONS = ("lm-eval", "transformers")


def run(words: list, log: Path) -> float:
    """Run a command with its output in a file; seconds.

    Raises:
        SystemExit: it has failed.
    """
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    begun = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, words)], stdout=file, stderr=subprocess.STDOUT,
            cwd=record.ROOT, env={**os.environ, **offline},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{words[0]}: exit status {done.returncode}, see {log}")
    return round(time.perf_counter() - begun, 1)


def of_lm_eval(options: argparse.Namespace, task: str) -> tuple[list[dict], float, float]:
    """lm-eval's samples in their order, its mean score, and seconds."""
    from megatron_mtraining.tools.eval.tasks import RULER_FILES, RULER_TASKS

    name, folder = RULER_TASKS[task], options.folder / "lm-eval" / task
    words: list = [
        "benchmarks.tools.lm_eval_offline",
        options.data if task in RULER_FILES else "none",
    ]
    words += ["run", "--model", "hf", "--tasks", name, "--limit", options.samples]
    words += ["--model_args", f"pretrained={options.model.resolve()},dtype={options.dtype}"]
    words += ["--metadata", json.dumps({"max_seq_lengths": [options.length]})]
    words += ["--device", options.device, "--log_samples", "--output_path", folder]
    words += ["--apply_chat_template"] if options.chat else []
    done, command = folder / "done.json", " ".join(map(str, words))
    if not done.exists() or json.loads(done.read_text())["command"] != command:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        seconds = run(words, folder / "log")
        done.write_text(json.dumps({"command": command, "seconds": seconds}))
    seconds = json.loads(done.read_text())["seconds"]
    [results] = folder.rglob("results_*.json")
    [file] = folder.rglob("samples_*.jsonl")
    score = json.loads(results.read_text())["results"][name][f"{options.length},none"]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda each: each["doc_id"]), score, seconds


def of_mtraining(options: argparse.Namespace, task: str) -> tuple[list[dict], float, float]:
    """The samples of ``mtraining eval`` in their order, its mean score, and seconds; a sample's ``prompt`` is
    the digest of what the model was given."""
    folder = options.folder / "mtraining" / task
    folder.mkdir(parents=True, exist_ok=True)
    words = ["megatron_mtraining", "eval", "ruler", options.model.resolve(), "--tasks", task]
    words += ["--lengths", options.length, "--samples", options.samples, "--attention", "dense"]
    words += ["--dtype", {"bfloat16": "bf16"}.get(options.dtype, options.dtype)]
    words += ["--device", options.device, "--output", folder]
    words += ["--data", options.data] if options.data else []
    words += ["--chat"] if options.chat else []
    seconds = run(words, folder / "log")
    [file] = (folder / "samples").glob("*.jsonl")
    kept = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    prompts = {row["id"]: row["prompt"] for row in kept}
    found = json.loads((folder / "ruler.json").read_text())
    samples = [{**row, "prompt": prompts[row["id"]]} for row in found["samples"]]
    return samples, found["rows"][0]["score"]["mean"], seconds


def compared(options: argparse.Namespace, task: str) -> dict:
    """A task's row."""
    from megatron_mtraining.tools.common.digests import digest_of_value
    from megatron_mtraining.tools.eval.ruler import right_answer

    theirs, their_score, their_seconds = of_lm_eval(options, task)
    ours, score, seconds = of_mtraining(options, task)
    if [row["id"] for row in ours] != [row["doc_id"] for row in theirs]:
        raise SystemExit(f"{task}: {len(ours)} samples, and lm-eval has {len(theirs)} or others")
    same = {"prompts": 0, "answers": 0, "scores": 0}
    for row, other in zip(ours, theirs):
        given = [*other["arguments"]["gen_args_0"].values(), right_answer(task, other["doc"])]
        same["prompts"] += row["prompt"] == digest_of_value(given)
        same["answers"] += row["answer"] == other["resps"][0][0]
        same["scores"] += row["score"] == other[str(options.length)]
    return {
        "model": options.name or options.model.name,
        "task": task,
        "length": options.length,
        "dtype": options.dtype,
        "device": options.device,
        "chat": options.chat,
        "samples": len(ours),
        "tokens": max(row["tokens"] for row in ours),
        **{f"same_{name}": count for name, count in same.items()},
        "score": round(score, 6),
        "score_lm_eval": round(their_score, 6),
        "seconds": seconds,
        "seconds_lm_eval": their_seconds,
        **{name.replace("-", "_"): record.installed(name) for name in VERSIONS},
    }


def agrees(row: dict) -> bool:
    """Whether every sample has the same prompt, answer and score on both sides."""
    counts = {row[f"same_{name}"] for name in ("prompts", "answers", "scores")}
    return counts == {row["samples"]} and row["score"] == row["score_lm_eval"]


def parse(words=None) -> argparse.Namespace:
    from megatron_mtraining.tools.eval.tasks import RULER_FILES, RULER_TASKS

    parser = record.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--name", help="what the rows call the model (the folder's name)")
    what = "those to run (all; without --data those that need none)"
    parser.add_argument("--tasks", nargs="+", choices=RULER_TASKS, help=what)
    parser.add_argument("--data", type=Path, help="folder with RULER's essays and questions")
    parser.add_argument("--length", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="of a task (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chat", action="store_true", help="with the tokenizer's chat template")
    parser.add_argument("--folder", type=Path, required=True, help="for samples and logs")
    parser.add_argument(
        "--output", type=Path, default=record.RESULTS / "ruler_agreement.jsonl", help="rows"
    )
    options = parser.parse_args(words)
    if options.tasks is None:
        options.tasks = [each for each in RULER_TASKS if options.data or each not in RULER_FILES]
    return options


def main(words=None) -> int:
    """Compare all tasks; 1 if a sample differs."""
    options, differs = parse(words), False
    options.folder = options.folder.resolve()
    options.data = options.data and options.data.resolve()
    for row in map(partial(compared, options), options.tasks):
        names = ("same_prompts", "same_answers", "same_scores", "score", "score_lm_eval")
        print(record.line(row, "task", "samples", *names), flush=True)
        record.append(options.output, [row])
        differs |= not agrees(row)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
