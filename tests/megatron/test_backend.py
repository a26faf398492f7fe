# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The enum member ``AttnBackend.mtraining`` behaves as Megatron's own members do."""

import argparse
import copy
import enum
import pickle
from types import SimpleNamespace

from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining.megatron import register
from megatron_mtraining.megatron.backend import VALUE, add_member, is_active


def test_member_works_like_one_written_in_the_file():
    member = AttnBackend.mtraining
    assert list(AttnBackend).count(member) == 1
    assert AttnBackend["mtraining"] is member
    assert AttnBackend(VALUE) is member and member.value == VALUE
    assert member.name == "mtraining" and repr(member) == f"<AttnBackend.mtraining: {VALUE}>"
    assert isinstance(member, AttnBackend) and member in AttnBackend
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member and copy.copy(member) is member
    assert hash(member) is not None and member != AttnBackend.auto
    assert len({*AttnBackend}) == len(AttnBackend)


def test_older_members_are_as_before():
    assert [member.value for member in AttnBackend if member.name != "mtraining"] == [1, 2, 3, 4, 5]
    assert AttnBackend(5) is AttnBackend.auto


def test_add_member_is_idempotent_and_takes_a_patched_file_s_member():
    class Plain(enum.Enum):
        flash = 1
        mtraining = 6
        auto = 5

    assert add_member(Plain) is Plain.mtraining
    assert len(Plain) == 3
    before = list(AttnBackend)
    register()
    register()
    assert list(AttnBackend) == before


def test_a_value_that_is_taken_is_not_stolen():
    class Newer(enum.Enum):
        auto = 5
        other = VALUE

    member = add_member(Newer)
    assert member.value == VALUE + 1 and Newer(VALUE) is Newer.other


def test_argparse_choice_as_megatron_makes_it():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--attention-backend", type=lambda t: AttnBackend[t], choices=[*AttnBackend]
    )
    args = parser.parse_args(["--attention-backend", "mtraining"])
    assert is_active(args)
    assert not is_active(parser.parse_args(["--attention-backend", "flash"]))


def test_is_active_on_what_has_no_backend():
    assert not is_active(None)
    assert not is_active(SimpleNamespace())
    assert not is_active(SimpleNamespace(attention_backend=None))
