# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The table of live changes: what is wrapped, what is logged, and what a moved upstream name says."""

import pytest
from megatron.core import __version__

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron import arguments, registration, wrapping
from megatron_mtraining.megatron.checks import is_from
from megatron_mtraining.megatron.registration import LiveChange, find_owner, live_changes, register
from tests.support.megatron_cases import parse
from tests.support.ranks import run_alone

TRAINING = "megatron.training."


def test_every_row_is_wrapped_once():
    register()
    rows = live_changes()
    assert len({(row.owner, row.name) for row in rows}) == len(rows)
    for row in rows:
        if row.owner.startswith(TRAINING) and not registration._has_training():
            continue
        if not is_from(row.since):
            continue
        function = getattr(find_owner(row, __version__), row.name)
        assert wrapping.is_wrapped(function) and not wrapping.is_wrapped(function.__wrapped__)
        assert len(row.why) > 20


@pytest.mark.parametrize(
    "owner, name",
    [
        ("megatron.core.gone.away", "function"),
        ("megatron.core.models.gpt.gpt_model", "no_such_function"),
        ("megatron.core.models.gpt.gpt_model:GPTModel", "_no_such_method"),
        ("megatron.core.models.gpt.gpt_model:NoSuchModel", "__init__"),
    ],
    ids=["module", "function", "method", "class"],
)
def test_a_moved_name_is_refused_by_name_and_version(owner, name, monkeypatch):
    moved = LiveChange(owner, name, lambda original: original, "")
    monkeypatch.setattr(registration, "live_changes", lambda: (*live_changes(), moved))
    with pytest.raises(ConfigError) as raised:
        register()
    symbol = f"{owner.replace(':', '.')}.{name}"
    assert f"Megatron-Core {__version__} does not have {symbol}," in str(raised.value)


def test_nothing_is_replaced_where_a_name_has_moved(monkeypatch):
    moved = LiveChange("megatron.core.utils", "no_such_function", lambda original: original, "")
    monkeypatch.setattr(registration, "live_changes", lambda: (*live_changes(), moved))
    monkeypatch.setattr(registration, "wrap", lambda *_: pytest.fail("replaced something"))
    with pytest.raises(ConfigError, match="no_such_function"):
        register()


def test_an_error_inside_megatron_is_not_taken_for_a_moved_name(tmp_path, monkeypatch):
    (tmp_path / "broken_megatron.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        find_owner(LiveChange("broken_megatron", "f", lambda original: original, ""), __version__)


def test_too_old():
    with pytest.raises(ConfigError, match="Megatron-Core is 0.15.3, but .* needs 0.16 or later"):
        registration.check_version("0.15.3")
    registration.check_version("0.20.0rc0")


def validated(backends):
    register()
    validate_args = arguments.wrap_validate_args(lambda args, defaults: args)
    for backend in backends:
        validate_args(parse(backend=backend), {})


@pytest.mark.parametrize(
    "backends, rank, count",
    [
        pytest.param(["auto", "mtraining", "mtraining"], 0, 1, id="our-run"),
        pytest.param(["auto"], 0, 0, id="other-backend", marks=pytest.mark.slow),
        pytest.param(["mtraining"], 1, 0, id="other-rank", marks=pytest.mark.slow),
    ],
)
def test_one_line_says_what_was_replaced(backends, rank, count):
    run = run_alone(validated, backends, RANK=str(rank))
    assert run.returncode == 0, run.stdout
    lines = [line for line in run.stdout.splitlines() if "replaced" in line]
    assert len(lines) == count
    if count:
        assert f"functions of Megatron-Core {__version__}" in lines[0]
        assert "GPTModel.__init__" in lines[0] and "random.checkpoint" in lines[0]
