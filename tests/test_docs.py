# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pages name files, headings and modules that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
PAGES = sorted(path.relative_to(ROOT) for pattern in PATTERNS for path in ROOT.glob(pattern))
ROOMS = "megatron_mtraining|kernels|benchmarks|tests|examples|docs|patches"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(rf"`((?:{ROOMS})/[\w./-]+)`")
every_page = pytest.mark.parametrize("page", PAGES, ids=str)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[`*]|\]\([^)]*\)", "", heading.lstrip("#").strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@every_page
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if not file.exists():
            broken.append(target)
        elif fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ .*$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if fragment not in map(anchor, headings):
                broken.append(target)
    assert broken == []


@every_page
def test_files_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []


def test_readme_fits_a_newcomer():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
