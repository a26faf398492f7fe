# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""lm-eval's tasks on a loaded model: its prompts, its generation and its scores; the answers are kept."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from unittest import mock

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from ...errors import ConfigError
from ...requirements import first_line
from ..common.digests import digest_of_value
from .kept_samples import KeptSamples
from .model import AttendingModel, check_finite
from .planned import Planned

TAIL = 200
"""Characters of a prompt that decide how the text behind it is tokenized."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's notices, and what its tasks print."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def made_task(
    folder: str, name: str, metadata: dict, download: Callable[[ConfigurableTask], object]
) -> ConfigurableTask:
    """One of lm-eval's tasks with data from this machine, from the seeds of lm-eval's own run of this task.

    Args:
        folder: of lm-eval's tasks, that has it.
        name: of the task.
        metadata: what its data is made with.
        download: makes the task's data, in place of lm-eval's own.

    Raises:
        ConfigError: the data cannot be made.
    """
    import lm_eval.tasks

    path = os.path.join(os.path.dirname(lm_eval.tasks.__file__), folder)
    with (
        quiet(),
        mock.patch.object(
            ConfigurableTask, "download", lambda self, *args, **kwargs: download(self)
        ),
    ):
        manager = TaskManager(include_path=path, include_defaults=False, metadata=metadata)
        if name not in manager.task_index:
            raise ConfigError(f"lm-eval has no task {name} in {folder}: install lm-eval>=0.4.13")
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        try:
            [task] = manager.load([name])["tasks"].values()
        except (ConfigError, ModuleNotFoundError, MemoryError):
            raise
        except ImportError as error:  # a task names what it needs
            raise ConfigError(f"lm-eval's {name}: {first_line(error)}") from None
        except (ValueError, LookupError, TypeError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"lm-eval cannot make the data of {name}: {first_line(error)}"
            ) from error
    return task


class KeptLM(HFLM):
    """lm-eval's Hugging Face model, one request at a time: answers that are kept are not generated again, and
    the loss of the right answer comes from the same prefill.

    Args:
        model: a loaded model.
        tokenizer: its tokenizer.
        positions: the most tokens of prompt and answer.
    """

    def __init__(self, model: AttendingModel, tokenizer, positions: int):
        with quiet():
            super().__init__(
                pretrained=model.model, tokenizer=tokenizer, batch_size=1, max_length=positions
            )
        self.attending = model
        self._last: tuple | None = None

    def begin(self, planned: Planned, kept: KeptSamples, title: str) -> None:
        """Set the task whose requests come next."""
        self.planned, self.kept, self.title = planned, kept, title

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """lm-eval's interface: the answer to each request."""
        for request in requests:  # before anything runs
            self.kept.get(request.doc_id, self._digest(request))
        answers = []
        with tqdm(total=len(requests), desc=self.title, unit="sample", file=sys.stderr) as bar:
            for request in requests:
                row = self.kept.get(request.doc_id, self._digest(request))
                if row is None:
                    row = self._measured(request)
                    self.kept.add(row)
                answers.append(row["answer"])
                bar.update()
        return answers

    def _target(self, request) -> str | None:
        return self.planned.target(request.doc) if self.planned.target else None

    def _digest(self, request) -> str:
        return digest_of_value([*request.args, self._target(request)])

    def _measured(self, request) -> dict:
        prompt, how = request.args
        started = time.perf_counter()
        self.attending.density()
        [answer] = super().generate_until([request], disable_tqdm=True)
        density = self.attending.density()
        cache, first, used = self._last
        self._last = None
        where, dtype = f"sample {request.doc_id} ({self.title})", self.attending.options.dtype
        check_finite(first.float().logsumexp(-1), f"the logits of {where}", dtype)
        tokens = len(self.tok_encode(prompt))
        row = {
            "id": request.doc_id,
            "prompt": self._digest(request),
            "answer": answer,
            "tokens": tokens,
            "truncated": max(0, tokens - used),
            **density,
        }
        target = self._target(request)
        if target is not None:
            loss, count = self._loss(prompt, target, cache, first, used)
            check_finite(loss, f"the losses of {where}", dtype)
            row |= {"loss": round(loss.item(), 6), "answer_tokens": count}
        return {**row, "seconds": round(time.perf_counter() - started, 3)}

    def _model_generate(self, context, max_length, stop, **how):
        out = super()._model_generate(
            context, max_length, stop, return_dict_in_generate=True, output_logits=True, **how
        )
        self._last = out.past_key_values, out.logits[0], context.shape[1]
        return out.sequences

    @torch.no_grad()
    def _loss(self, prompt: str, target: str, cache, first, used: int) -> tuple[torch.Tensor, int]:
        """Mean cross entropy of the right answer's tokens, in nats (float32 ``[]``), and their number: what
        follows the prompt attends to the whole cache, as generated tokens do.

        Args:
            cache: keys and values of the prompt and the tokens generated.
            first: logits of the first token after the prompt, ``[1, vocabulary]``.
            used: tokens of the prompt.
        """
        _, ids = self._encode_pair(prompt[-TAIL:], target)
        answer = torch.tensor([ids], device=first.device)
        generated = cache.get_seq_length() - used
        if generated:
            cache.crop(-generated)
        logits = first[:, None].float()
        if len(ids) > 1:
            rest = self.model(input_ids=answer[:, :-1], past_key_values=cache, use_cache=True)
            logits = torch.cat((logits, rest.logits.float()), 1)
        return torch.nn.functional.cross_entropy(logits[0], answer[0]), len(ids)


def evaluated(
    lm: KeptLM, planned: Planned, kept: KeptSamples, title: str, *, samples: int, chat: bool
) -> list[dict]:
    """Run a task, and return its samples' results: rows of :class:`.KeptSamples` with ``score``.

    Args:
        samples: the most samples.
        chat: put prompts into the tokenizer's chat template.
    """
    lm.begin(planned, kept, title)
    with quiet():
        found = simple_evaluate(
            model=lm, tasks=[planned.task], limit=samples, bootstrap_iters=0, log_samples=True,
            apply_chat_template=chat,
            task_manager=TaskManager(include_defaults=False),  # else it reads 14,000 files for names
        )  # fmt: skip
    rows = []
    for sample in sorted(found["samples"][planned.task.task_name], key=lambda each: each["doc_id"]):
        row = {name: v for name, v in kept.rows[sample["doc_id"]].items() if name != "prompt"}
        rows.append({**row, "score": float(sample[planned.metric]), **planned.about(sample["doc"])})
    return rows
