# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The member ``mtraining`` of Megatron's enum ``AttnBackend``."""

from __future__ import annotations

import sys
from enum import Enum

NAME = "mtraining"
# What `mtraining patch` writes into the file too, so that a checkpoint's arguments, pickled by
# value, are read back the same in both.
VALUE = 6


def add_member(enum: type[Enum] | None = None) -> Enum:
    """Add ``mtraining`` to an enum (None for ``AttnBackend``), and return it; the one that is there if it is.

    ``--attention-backend`` takes its choices from the enum when Megatron builds its parser, so that
    this must have happened before. Python's enums cannot be subclassed once they have members,
    hence the member is put into the class's own tables, from which iteration, look-up by name
    and by value, copying and pickling all work.
    """
    if enum is None:
        # Here, because a plan needs no Megatron, whose import takes seconds.
        from megatron.core.transformer.enums import AttnBackend as enum
    if NAME in enum.__members__:
        return enum[NAME]
    value = VALUE
    while value in enum._value2member_map_:
        value += 1
    member = object.__new__(enum)
    member._name_ = NAME
    member._value_ = value
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(NAME)
    enum._member_map_[NAME] = member
    enum._value2member_map_[value] = member
    # Past EnumType.__setattr__; from Python 3.11 on, members are attributes of the class.
    type.__setattr__(enum, NAME, member)
    return member


def is_active(settings) -> bool:
    """Whether ``settings`` (training arguments or a TransformerConfig) choose this backend.

    A name in place of the enum's member counts too: Megatron's YAML configs leave it a string.
    """
    backend = getattr(settings, "attention_backend", None)
    return getattr(backend, "name", backend) == NAME


def training_arguments():
    """Megatron-LM's parsed arguments, or None without Megatron-LM or before they are parsed."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
