# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Whether the inner groups of context-parallel ranks fit the hosts that they run on."""

from __future__ import annotations

import itertools
import socket
import warnings
from weakref import WeakSet

from ..cp_group import CPGroup

_checked: WeakSet[CPGroup] = WeakSet()


def check_hosts(cp: CPGroup) -> None:
    """Raise ValueError, on every rank, if an inner group spans hosts.

    A collective over the group, once a group: :func:`advise_on_hosts` on other ranks is the same one.
    """
    hosts = _hosts(cp)
    for first in range(0, len(hosts), cp.inner):
        names = hosts[first : first + cp.inner]
        if len(set(names)) > 1:
            raise ValueError(
                f"the inner group of context-parallel ranks {first} to {first + cp.inner - 1} spans "
                f"hosts: {', '.join(names)}, in rank order; use an inner size that divides the "
                "context-parallel ranks of a host (its GPUs / --tensor-model-parallel-size), or leave the "
                "sizes out"
            )


def advise_on_hosts(cp: CPGroup) -> None:
    """Warn, on the first rank, if inner groups span hosts although ranks could be grouped by host. A
    collective over the group, once a group.

    Raises:
        ValueError: on every rank, if ranks disagree about the size of inner groups.
    """
    hosts = _hosts(cp)
    groups = [hosts[first : first + cp.inner] for first in range(0, len(hosts), cp.inner)]
    if cp.rank or all(len(set(group)) == 1 for group in groups):
        return
    together = [len(list(run)) for _, run in itertools.groupby(hosts)]
    names = ", ".join(dict.fromkeys(hosts))
    if len(together) > len(set(hosts)):
        advice = "start ranks host after host, so that the ranks of a host are neighbours"
    elif len(set(together)) == 1:
        advice = (
            f"--hierarchical-context-parallel-sizes {together[0]} {len(together)} gathers keys within each "
            "host only"
        )
    else:
        return
    warnings.warn(
        f"inner groups of {cp.inner} context-parallel ranks, which gather keys, span hosts {names}; {advice}",
        stacklevel=2,
    )


def _hosts(cp: CPGroup) -> tuple[str, ...]:
    """Each rank's host, in rank order; nothing if there is one rank, or they were looked at.

    Raises:
        ValueError: on every rank, if their inner sizes differ.
    """
    if cp in _checked or cp.world == 1:
        return ()
    _checked.add(cp)
    hosts, inners = zip(*cp.gather_objects((socket.gethostname(), cp.inner)))
    if len(set(inners)) > 1:
        raise ValueError(
            f"context-parallel ranks disagree about the size of inner groups: {list(inners)}, in rank order; "
            "give all the same --hierarchical-context-parallel-sizes or --mtraining-gathered-ranks"
        )
    return hosts
