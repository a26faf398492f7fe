# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which room may import which: floors, the few places that touch Megatron or process groups, and no circles.

The floors of the package, from the ground up (a module imports from its own floor's room or from below):
"""

from __future__ import annotations

import pytest

from tests.support.imports import circles, graph, imports, sources

PACKAGE = "megatron_mtraining"
FLOORS = [
    ["errors"],
    ["requirements", "tensors", "files", "switches", "labels"],
    ["layout"],
    ["checkout", "stream_graphs", "visibility"],
    ["kernels.limits", "kernels.types"],
    ["kernels.common"],
    ["kernels.attention", "kernels.selection", "kernels.loss"],
    ["cp_group"],
    ["agreement", "relayout"],
    ["config"],
    ["pattern"],
    ["ring"],
    ["attention_call"],
    ["attention", "loss", "advice"],
    ["balance"],
    ["patches"],
    ["megatron"],
    ["launch"],
    ["transformers"],
    ["models"],
    ["tools.common"],
    ["tools.report"],
    ["tools.run_report"],
    ["tools.data", "tools.convert", "tools.inspect", "tools.patching", "tools.quickstart"],
    ["tools.doctor", "tools.eval", "tools.plan"],
    ["tools.cli"],
]  # fmt: skip
"""Rooms or modules of a floor stand beside each other: none imports another."""
MEGATRON = (
    "megatron", "launch", "models", "tools.convert.verify", "tools.data.indexed", "tools.plan",
    "tools.quickstart",
)  # fmt: skip
"""What imports Megatron: the plug-in, and tools that build its models or write its datasets."""
PROCESS_GROUPS = ("cp_group", "megatron", "models", "tools.doctor", "tools.quickstart")
"""What talks to process groups: imports ``torch.distributed``, but for its ``checkpoint``, which is files."""
OF_OTHER_TOOLS = {"eval": {"convert"}, "plan": {"convert"}, "doctor": {"patching"}}
"""Commands that a command is made of, beside what all share: ``tools.common`` and ``tools.report``."""
BENCHMARKS = [["lib"], ["kernels", "layer", "model", "tools"], ["sparsebalance"], ["hosts"]]


def room_of(module: str, floors=FLOORS, package=PACKAGE) -> tuple[int, str] | None:
    """The floor and the room of a module of the package; None for the package itself and what is outside."""
    inside = module.removeprefix(package + ".")
    for floor, rooms in enumerate(floors):
        for room in rooms:
            if inside == room or inside.startswith(room + "."):
                return floor, room
    return None


def upward(edges, floors=FLOORS, package=PACKAGE) -> list[str]:
    """Imports that go up, or sideways to another room of the same floor."""
    found = []
    for module, others in edges.items():
        own = room_of(module, floors, package)
        for other in sorted(others):
            to = room_of(other, floors, package)
            if own is None or to is None or own[1] == to[1]:
                continue
            if to[0] >= own[0]:
                found.append(f"{module} imports {other}")
    return found


def outside(edges, name: str, allowed: tuple[str, ...]) -> list[str]:
    """Modules that import ``name`` or a part of it, though not ``allowed``."""
    return [
        module
        for module, others in edges.items()
        if any(
            f"{other}.".startswith(f"{name}.") and not other.startswith(f"{name}.checkpoint")
            for other in others
        )
        and not any(f"{module}.".startswith(f"{PACKAGE}.{place}.") for place in allowed)
    ]


@pytest.fixture(scope="module")
def files():
    return sources(PACKAGE)


@pytest.fixture(scope="module")
def edges(files):
    return graph(files)


def test_every_module_has_a_floor(edges):
    entries = {PACKAGE, f"{PACKAGE}.__main__", f"{PACKAGE}.tools"}
    assert [name for name in edges if name not in entries and room_of(name) is None] == []


def test_rooms_import_from_below(edges):
    assert upward(edges) == []


def test_no_circles(edges):
    assert circles(edges) == []


def test_who_imports_megatron(edges):
    assert outside(edges, "megatron", MEGATRON) == []


def test_who_talks_to_process_groups(edges):
    assert outside(edges, "torch.distributed", PROCESS_GROUPS) == []


def test_references_are_imported_by_their_room_alone(edges):
    """By its ``__init__`` or ``backends``, which dispatch; kernels and references share ``common``."""
    found = [
        f"{module} imports {other}"
        for module, others in edges.items()
        for other in others
        if other.rpartition(".")[2].startswith("reference")
        and module.removeprefix(other.rpartition(".")[0]) not in ("", ".backends")
        and not module.rpartition(".")[2].startswith("reference")
    ]
    assert found == []


def tools_of_other_tools(edges) -> dict[str, set[str]]:
    """By command, the other commands that its modules import."""
    found: dict[str, set[str]] = {}
    for module, others in edges.items():
        own = _tool(module)
        if own not in (None, "cli"):
            found.setdefault(own, set()).update(filter(None, map(_tool, others)))
    return {
        own: more for own, others in found.items() if (more := others - {own, "common", "report"})
    }


def _tool(module: str) -> str | None:
    room = module.removeprefix(f"{PACKAGE}.tools.")
    return None if room == module else room.partition(".")[0]


def test_commands_know_few_others(edges):
    assert tools_of_other_tools(edges) == OF_OTHER_TOOLS


def test_balance_is_entered_by_its_doors(edges):
    """Core attention has an observer, the run one object for all else; neither recomputation nor the pattern
    knows of it."""
    rooms = tuple(f"{PACKAGE}.{room}balance" for room in ("", "megatron."))
    doors = {
        module.removeprefix(f"{PACKAGE}."): inside
        for module, others in edges.items()
        if not module.startswith(rooms)
        and (inside := {other.rpartition(".")[2] for other in others if other.startswith(rooms)})
    }
    assert doors == {
        "megatron.core_attention": {"observer"},
        "megatron.run_state": {"run"},
        "megatron.registration": {"batching"},
        "megatron.arguments": {"options"},
        "tools.plan.options": {"options"},
    }


def test_benchmarks():
    edges = graph(sources("benchmarks"))
    assert upward(edges, BENCHMARKS, "benchmarks") == [] and circles(edges) == []


def test_test_modules_do_not_import_each_other():
    edges = graph(sources("tests"))
    tests = {name for name in edges if name.rpartition(".")[2].startswith("test_")}
    assert {name: others & tests for name, others in edges.items() if others & tests} == {}


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("kernels.common.tiles", "from ...pattern import index", "upward"),
        ("tools.data.packing", "from ..inspect import options", "upward"),
        ("ring.schedule", "def f():\n    from ..attention import attend", "upward"),
        ("layout", "from .visibility import VisibleRanges", "circles"),
        ("kernels.attention.backends", "from ...cp_group import CPGroup", "upward"),
        ("pattern.search", "import torch.distributed as dist", "torch.distributed"),
        ("pattern.sampled_rows", "from torch import distributed", "torch.distributed"),
        ("config", "from megatron.core import parallel_state", "megatron"),
    ],
)
def test_a_forbidden_import_is_found(files, edges, module, line, broken):
    name = f"{PACKAGE}.{module}"
    edges = {**edges, name: imports(name, f"{files[name]}\n{line}\n", files)}
    if broken == "upward":
        assert any(text.startswith(name) for text in upward(edges))
    elif broken == "circles":
        assert any(name in circle for circle in circles(edges))
    else:
        allowed = MEGATRON if broken == "megatron" else PROCESS_GROUPS
        assert name in outside(edges, broken, allowed)
