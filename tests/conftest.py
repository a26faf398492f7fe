# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings of the whole suite: GPU tests are skipped, saying so, where there is no GPU."""

import os

# Before torch starts its threads: several test processes share the cores of the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
import pkgutil

import pytest
import torch


def import_kernels_interpreted() -> None:
    """Import the kernels' modules under Triton's interpreter, which is chosen as they are imported.

    Else the tests that interpret them pass or fail by what was imported before. The variable does
    not stay set: CPU tensors take the PyTorch twins again, except in those tests.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        package = importlib.import_module("megatron_mtraining.kernels")
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if not torch.cuda.is_available():
    import_kernels_interpreted()


@pytest.fixture
def fresh_inputs():
    """Different inputs in every run; pytest shows the seed of a failure."""
    print("torch seed", torch.seed())


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter: the kernels run on CPU tensors, as they were imported for it above."""
    if torch.cuda.is_available():
        pytest.skip("the kernels run compiled here: see the GPU tests")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_report_header(config):
    from importlib.metadata import PackageNotFoundError, version

    def of(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        f"torch {torch.__version__}, megatron-core {of('megatron-core')}, "
        f"triton {of('triton')}, transformer-engine {of('transformer-engine')}, {gpus} GPUs"
    )


# Of the tests of ``mtraining data``


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    pytest.importorskip("transformers")
    from data_cases import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """A quick one for several processes, which need not import transformers then."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from data_cases import make_documents

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokens"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_documents(100)), model_prefix=str(prefix), vocab_size=30,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.fixture
def documents():
    from data_cases import make_documents

    return make_documents(200)


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Run the command over inputs, into ``tmp_path/out`` or another prefix; returns the exit status."""
    from data_cases import SEQ

    from megatron_mtraining import cli

    def run(*inputs, output="out", **options):
        defaults = {"tokenizer": tokenizer, "seq_length": SEQ, "workers": 1}
        words = ["data", "prepare", *map(str, inputs), "--output", str(tmp_path / output)]
        for name, value in {**defaults, **options}.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return cli.main(words)

    return run
