# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the tests of ``mtraining data``."""

import signal

import pytest


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    pytest.importorskip("transformers")
    from tests.support.data_cases import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """A quick one for several processes, which need not import transformers then."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from tests.support.data_cases import make_documents

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokens"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_documents(100)), model_prefix=str(prefix), vocab_size=30,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.fixture
def documents():
    from tests.support.data_cases import make_documents

    return make_documents(200)


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Run the command over inputs, into ``tmp_path/out`` or another prefix; returns the exit status."""
    from megatron_mtraining.tools import cli
    from tests.support.data_cases import SEQ

    def run(*inputs, output="out", **options):
        defaults = {"tokenizer": tokenizer, "seq_length": SEQ, "workers": 1}
        words = ["data", "prepare", *map(str, inputs), "--output", str(tmp_path / output)]
        for name, value in {**defaults, **options}.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return cli.main(words)

    return run


@pytest.fixture
def no_hang():
    """A test that waits at a pipe fails."""

    def fail(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
