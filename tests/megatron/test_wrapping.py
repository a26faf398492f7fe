# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Functions are replaced once, everywhere they are bound."""

import sys
import types

from megatron_mtraining.megatron.wrapping import is_wrapped, wrap


def make_twice(original):
    def twice(value):
        """Why it exists."""
        return 2 * original(value)

    return twice


def test_wraps_once_and_keeps_what_the_original_says():
    owner = types.ModuleType("owner")

    def plain(value: int) -> int:
        """What it does."""
        return value + 1

    owner.plain = plain
    assert wrap(owner, "plain", make_twice)
    assert not wrap(owner, "plain", make_twice)
    assert owner.plain(1) == 4
    assert is_wrapped(owner.plain) and not is_wrapped(plain)
    assert owner.plain.__wrapped__ is plain
    assert owner.plain.__name__ == "plain"
    assert owner.plain.__doc__ == "What it does."


def test_rebinds_every_module_that_imported_by_name(monkeypatch):
    owner, user = types.ModuleType("owner"), types.ModuleType("user_of_owner")
    owner.plain = lambda value: value + 1
    user.alias = owner.plain
    user.other = other = lambda value: value
    monkeypatch.setitem(sys.modules, "user_of_owner", user)
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "imported_by_name", owner.plain, raising=False)
    wrap(owner, "plain", make_twice)
    assert user.alias is owner.plain
    assert main.imported_by_name is owner.plain
    assert user.other is other


def test_wraps_methods_of_a_class():
    class Owner:
        def plain(self, value):
            return value + 1

    def make(original):
        def plain(self, value):
            """Why."""
            return -original(self, value)

        return plain

    wrap(Owner, "plain", make)
    wrap(Owner, "plain", make)
    assert Owner().plain(1) == -2
