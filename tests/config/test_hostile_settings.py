# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings files of strangers: refused at once, in one line that names the file."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("yaml")

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import check_settings_file, settings_of_run
from megatron_mtraining.config.settings_content import LARGEST


def times_ten(line: str, count: int) -> str:
    """``count`` lines, each with ten aliases of what the line before has."""
    names = "abcdefghijk"
    return "".join(
        line.format(number + 1, names[number + 1], ", ".join([f"*{names[number]}"] * 10))
        for number in range(count)
    )


FILES = {
    "laughs.yaml": "layers:\n  0: &a {price: 0.2}\n" + times_ten("  {0}: &{1} [{2}]\n", 9),
    "merges.yaml": "layers:\n  0: &a {price: 0.2}\n" + times_ten("  {0}: &{1} {{<<: [{2}]}}\n", 9),
    "itself.yaml": "layers: &a\n  0: *a\n",
    "control.yaml": 'layers: "\0"\n',
    "octal.yaml": "layers:\n  0: {vertical_cap: 010}\n",
    "sexagesimal.yaml": "layers:\n  0: {price: 1:30}\n",
    "binary.yaml": "layers:\n  0: {price: 0b_}\n",
    "date.yaml": "layers:\n  0: {price: 2001-99-99}\n",
    "digits.yaml": f"layers:\n  0: {{price: {'9' * 5000}}}\n",
    "tag.yaml": "layers: !!python/object/apply:os.system ['false']\n",
    "boolean.yaml": "!!bool coverage: 1\n",
    "timestamp.yaml": "price: !!timestamp soon\n",
    "key.yaml": "layers:\n  ? [1, 2]\n  : {price: 1}\n",
    "documents.yaml": "layers: {}\n---\nlayers: {}\n",
    "alias.yaml": "layers: *nothing\n",
    "deep.yaml": "[" * 9999,
    "deep.json": "[" * 100_000,
    "deeper.json": '{"layers":' * 100_000,
    "digits.json": f'{{"layers": {{"0": {{"price": {"9" * 5000}}}}}}}',
    "escape.json": '{"\\u001b[31m\\n\\ud800": 1}',
    "long.json": f'{{"{"k" * 100_000}": 1}}',
    "values.json": f'{{"layers": {{"0": {{"price": {list(range(9999))}}}}}}}',
    "large.json": " " * (LARGEST + 1),
}


@pytest.mark.parametrize("name", FILES)
def test_refused_in_one_line(name, tmp_path):
    file = tmp_path / name
    file.write_text(FILES[name], encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        settings_of_run(str(file))
        check_settings_file(MTrainingConfig.from_options(settings=str(file)), 4, 4)
    message = str(refusal.value)
    assert str(file) in message and message.isprintable() and len(message) < 2100, message


def test_a_decimal_number_may_be_written_in_other_ways(tmp_path):
    (tmp_path / "s.yaml").write_text("price: 2.5e-1\nsink: 1_0\nwindow: +64\nslash_cap: 0\n")
    found = settings_of_run(str(tmp_path / "s.yaml"))
    assert found == dict(price=0.25, sink=10, window=64, slash_cap=0)


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", "/dev/zero", "/dev/stdin", tmp_path, "n" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            settings_of_run(str(path))


def test_a_message_is_one_line():
    message = str(ConfigError("two\nlines, \x1b[31m and \ud800: " + "é" * 9999))
    assert message.isprintable() and message.startswith(r"two lines, \x1b[31m and \ud800: é")
    assert len(message) < 2100
