# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Inner groups that span hosts are refused where sizes are given, and advised against where they are not."""

from __future__ import annotations

import torch.distributed as dist

from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.megatron.hosts import advise_on_hosts, check_hosts
from tests.support.ranks import run_ranks


def run_with_hosts(rank, world, hosts, inner):
    import megatron_mtraining.megatron.hosts as module

    module.socket.gethostname = lambda: hosts[rank]
    try:
        check_hosts(CPGroup(dist.group.WORLD, inner[rank]))
    except ValueError as error:
        return str(error)


def test_inner_groups_that_span_hosts_are_refused_on_every_rank():
    said = run_ranks(4, run_with_hosts, ["a", "b", "b", "b"], [2] * 4)
    assert len(set(said)) == 1 and "ranks 0 to 1 spans hosts: a, b" in said[0]
    assert run_ranks(4, run_with_hosts, ["a", "a", "b", "b"], [2] * 4) == [None] * 4
    said = run_ranks(4, run_with_hosts, ["a"] * 4, [2, 2, 2, 1])
    assert len(set(said)) == 1 and "[2, 2, 2, 1]" in said[0]


def run_with_advice(rank, world, cases):
    import warnings

    import megatron_mtraining.megatron.hosts as module

    said = []
    for hosts, inner in cases:
        module.socket.gethostname = lambda hosts=hosts: hosts[rank]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            cp = CPGroup(dist.group.WORLD, inner)
            advise_on_hosts(cp)
            advise_on_hosts(cp)  # once
        said.append([str(warning.message) for warning in found])
    return said


def test_gathering_over_hosts_is_advised_against_on_one_rank():
    two = "--hierarchical-context-parallel-sizes 2 2"
    cases = {
        ("aabb", None): ["4 context-parallel ranks", "a, b", two],
        ("aabb", 4): [two],
        ("abab", 2): ["host after host"],
        ("aaaa", None): None, ("aabb", 2): None, ("aabb", 1): None, ("abbb", None): None,
    }  # fmt: skip
    first, *others = run_ranks(4, run_with_advice, list(cases))
    assert others == [[[]] * len(cases)] * 3
    for said, expected in zip(first, cases.values()):
        assert len(said) == (expected is not None)
        assert all(words in said[0] for words in expected or ())
    said = run_ranks(6, run_with_advice, [("aaabbb", 2)])[0][0]
    assert "--hierarchical-context-parallel-sizes 3 2" in said[0]


def run_with_other_inner_groups(rank, world, inner):
    """Ranks with sizes (2) check their hosts, those without advise on them."""
    cp = CPGroup(dist.group.WORLD, inner[rank])
    try:
        check_hosts(cp) if inner[rank] == 2 else advise_on_hosts(cp)
    except ValueError as error:
        return str(error)


def test_ranks_that_disagree_about_inner_groups_all_say_so():
    for inner in ([2, 2, 4, 4], [1, 1, 4, 4]):
        said = run_ranks(4, run_with_other_inner_groups, inner)
        assert len(set(said)) == 1 and str(inner) in said[0] and "gathered-ranks" in said[0]
