# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Measures cases: the pattern search, forward and backward of a layer's attention on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention import Pattern, attend
from ...balance import KINDS, AttentionShape, visible_pairs
from ...balance.terms import PARTS
from ...config import MobaPolicy, MTrainingConfig
from ...cp_group import CPGroup
from ...documents import Documents
from ...pattern import search_pattern
from ...requirements import first_line
from .cases import Case
from .timing import Clock, Time
from .workload import documents_of, lengths, operands, vertical_slash_index


@dataclass(frozen=True)
class Measurement:
    """What a case took.

    Attributes:
        pairs: visible query-key pairs of a head.
        density: the share of them that is attended, over all heads.
        search, forward, backward: milliseconds.
    """

    case: Case
    pairs: float
    density: float
    search: Time
    forward: Time
    backward: Time


COLUMNS = (
    "kind", "num_heads", "num_kv_heads", "head_dim", "tokens", "documents", "columns", "held_out", "pairs",
    "density", "search_ms", "forward_ms", "backward_ms", "search_host_ms", "forward_host_ms",
    "backward_host_ms",
)  # fmt: skip
"""Of a measurement as a row."""


def row_of(found: Measurement) -> list:
    """A measurement as a row of a file; see :data:`COLUMNS`."""
    case, times = found.case, (found.search, found.forward, found.backward)
    return [
        case.kind, *case.shape, case.tokens, case.documents, case.columns, int(case.held_out),
        int(found.pairs), round(found.density, 5),
        *(float(f"{each.gpu:.4g}") for each in times), *(round(each.host, 3) for each in times),
    ]  # fmt: skip


def measurement_of(values: Mapping[str, Any]) -> Measurement:
    """A measurement from a row's values by :data:`COLUMNS`; the wanted density is the one that was found.

    Raises:
        KeyError, TypeError, ValueError: the values are not those of a row.
    """
    shape = AttentionShape(*(int(values[n]) for n in ("num_heads", "num_kv_heads", "head_dim")))
    density = float(values["density"])
    case = Case(
        str(values["kind"]), shape, int(values["tokens"]), density, float(values["columns"]),
        int(values["documents"]), bool(values["held_out"]),
    )  # fmt: skip
    times = [Time(float(values[f"{part}_ms"]), float(values[f"{part}_host_ms"])) for part in PARTS]
    numbers = (*shape, case.tokens, case.documents, *(time.gpu for time in times))
    if case.kind not in KINDS or not all(0 < number < 1e15 for number in numbers):
        raise ValueError(f"{case} is no case, or its times {times} are none")
    return Measurement(case, float(values["pairs"]), density, *times)


def measure_all(
    cases: Sequence[Case],
    device: torch.device,
    tell: Callable[[Case, Measurement | None, str], None],
) -> tuple[list[Measurement], list[str]]:
    """Measure cases one after the other; what fails is left out.

    Args:
        tell: called after each case with its measurement, or with None and why there is none.

    Returns:
        The measurements; and the cases that were left out, each with the reason.
    """
    clock, searches = Clock(device), {}
    found, left_out = [], []
    broken = ""
    for case in cases:
        reason, measured = broken, None
        if not broken:
            try:
                torch.manual_seed(0)  # the same pattern, whichever cases are measured
                measured = measure(case, device, clock, searches)
            except torch.cuda.OutOfMemoryError:
                reason = "out of memory"
            except (RuntimeError, ValueError, OSError) as error:
                reason = first_line(error)
                broken = _broken(device)
            except Exception as error:  # of a compiler
                reason = first_line(error)
                broken = _broken(device)
        if measured is None:
            left_out.append(f"{case}: {reason}")
            _free(device, broken)
        else:
            found.append(measured)
        tell(case, measured, reason)
    return found, left_out


def measure(
    case: Case, device: torch.device, clock: Callable[..., Time], searches: dict
) -> Measurement:
    """Measure one case.

    Args:
        clock: a :class:`Clock`, or what is called like one.
        searches: times of searches that do not depend on the pattern, by what they depend on; added to.
    """
    config, documents = config_of(case), documents_of(case, device)
    query, key, value, grad_out = operands(case, device)
    cp, scale = CPGroup(None), case.shape.head_dim**-0.5
    search = partial(search_pattern, query, key, config, cp, scale, documents=documents)
    index: Pattern = search()  # compiles
    same = case.kind, case.shape, case.tokens, case.documents, config
    if same not in searches:
        searches[same] = clock(search)
    if case.kind == "vertical_slash":
        index = vertical_slash_index(case, config, documents, device)
    forward, backward = _attention_times(
        clock, (query, key, value, grad_out), config, index, documents
    )
    density = float(index.density().double().mean())
    pairs = visible_pairs(lengths(case) if documents is not None else [case.tokens])
    return Measurement(case, pairs, density, searches[same], forward, backward)


def config_of(case: Case) -> MTrainingConfig:
    """The settings whose pattern search is measured: policy price and default sampling, moba, or dense."""
    config = MTrainingConfig()
    if case.kind == "dense":
        return config.dense()
    if case.kind == "vertical_slash":
        return config
    # A query block sees, in the mean over all, half of the sequence's blocks; in documents the search takes
    # what is visible.
    blocks = case.tokens / config.block_size / case.documents
    return replace(config, policy=MobaPolicy(top_k=max(1, round(case.density * blocks / 2))))


def _attention_times(
    clock: Callable[..., Time],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    config: MTrainingConfig,
    index: Pattern,
    documents: Documents | None,
) -> tuple[Time, Time]:
    """Forward and backward with a pattern that is there."""
    *inputs, grad_out = tensors
    run = partial(attend, config=config, documents=documents, first_pass=index)
    with torch.no_grad():
        run(*inputs)
        forward = clock(lambda: run(*inputs))
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = run(*leaves).out
    backward = partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)
    backward()
    return forward, clock(backward)


def _broken(device: torch.device) -> str:
    """Why nothing more can be measured after an error; empty if it can."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the GPU has failed before: {first_line(error)}"
    return ""


def _free(device: torch.device, broken: str) -> None:
    if device.type == "cuda" and not broken:
        torch.cuda.empty_cache()
