# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of ``mtraining eval``."""

from importlib.util import find_spec

import pytest

from tests.support import eval_cases


@pytest.fixture(scope="module", autouse=True)
def packages():
    for name in ("transformers", "lm_eval", "longppl"):
        if find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")


@pytest.fixture(scope="module")
def llama(packages, tmp_path_factory):
    return eval_cases.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(eval_cases.text())
    return path


@pytest.fixture(autouse=True)
def no_description_of_the_machine(monkeypatch):
    """lm-eval asks pip and 10 more commands what is installed, in each run. Its answer is not kept."""
    from lm_eval import evaluator

    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)


@pytest.fixture
def lm(monkeypatch):
    """lm-eval's model with answers of the test's own in place of what ``KeptLM`` generates: a function that
    takes one, from a request to its text, and returns a list of the requests that are asked."""
    from megatron_mtraining.tools.eval import harness

    def answer_with(answer):
        asked = []

        def measured(self, request):
            asked.append(request)
            return {"id": request.doc_id, "prompt": self._digest(request), "answer": answer(request),
                    "loss": 1.0, "tokens": 9, "truncated": 0, "answer_tokens": 2, "seconds": 0.0}  # fmt: skip

        monkeypatch.setattr(harness.KeptLM, "_measured", measured)
        return asked

    return answer_with
