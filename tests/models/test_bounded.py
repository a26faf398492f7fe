# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers whose regular expressions take exponentially long, or which panic, end in one error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.models import bounded
from megatron_mtraining.models.bounded import BoundedEncode


def test_results_and_errors_are_those_of_the_library():
    def encode(text):
        if text == "panic":
            raise BaseException("of Rust\nmore")
        return [ord(each) for each in text]

    tested = BoundedEncode(encode, "the tokenizer of x")
    assert tested("ab") == [97, 98]
    with pytest.raises(ConfigError, match="tokenizer of x fails: .*of Rust$"):
        tested("panic")
    assert tested("c") == [99]


def test_a_call_that_does_not_end_is_left_behind(monkeypatch):
    monkeypatch.setattr(bounded, "LEAST", 0.0)
    monkeypatch.setattr(bounded, "TICK", 0.01)
    for_ever = threading.Event()
    with pytest.raises(ConfigError, match="tokenizer of x has not tokenized 3 characters"):
        BoundedEncode(lambda text: for_ever.wait(), "the tokenizer of x")("abc")
    for_ever.set()


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """The clock goes on meanwhile: a day between any two looks at it."""
    days = iter(range(0, 10**9, 86400))
    monkeypatch.setattr(bounded.time, "monotonic", lambda: next(days))
    monkeypatch.setattr(bounded, "TICK", 0.01)
    go_on, looks = threading.Event(), []

    def encode(text):
        go_on.wait()
        return [1]

    tested = BoundedEncode(encode, "x")
    get = tested._results.get

    class Results:
        put = tested._results.put

        def get(self, timeout):
            looks.append(1)
            if len(looks) == 5:
                go_on.set()
                return get()
            return get(timeout=timeout)

    tested._results = Results()
    assert tested("abc") == [1]


START = """
import sys
from megatron_mtraining.models import bounded
bounded.LEAST, bounded.TICK = 1.0, 0.1
from megatron_mtraining.tools import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Each run of 23 takes half a second, without an end in sight.
        ("a" * 23 + " ", "the tokenizer of"),
        ("a" * 40, "retry-limit"),
    ],
    ids=["slow", "panic"],
)
def test_an_exponential_regular_expression(text, said, tmp_path):
    """In mtraining data, as a process of its own: it ends although the library goes on."""
    pytest.importorskip("transformers")
    (tmp_path / "tok").mkdir()
    end = dict(id=0, content="<eos>", single_word=False, lstrip=False, rstrip=False)
    split = dict(type="Split", pattern={"Regex": "(a+)+$b"}, behavior="Isolated", invert=False)
    whole = dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None, decoder=None,
        added_tokens=[{**end, "normalized": False, "special": True}], pre_tokenizer=split,
        model=dict(type="WordLevel", vocab={"<eos>": 0, "a": 1}, unk_token="<eos>"),
    )  # fmt: skip
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps(whole))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(kind))
    (tmp_path / "a.txt").write_text(text * 1000)
    words = "data prepare a.txt --tokenizer tok --seq-length 8 --output out --workers 1"
    done = subprocess.run(
        [sys.executable, "-c", START, *words.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ},
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "a.txt" in last and said in last, done.stderr[-2000:]
    assert not list(tmp_path.glob("out*"))
