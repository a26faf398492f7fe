# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Draw the pictures of docs/how-it-works.md from the code they show: ``python docs/drawings.py [FOLDER]``.

Layouts come from ``megatron_mtraining/layout.py``, work lists from ``megatron_mtraining/ring/schedule.py``.
Nothing is measured: durations in the timeline are schematic. Without FOLDER, docs/images/ is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # this checkout's package, whatever is installed

import matplotlib  # noqa: E402

matplotlib.use("Agg")  # before pyplot: there may be no display
import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_mtraining.kernels.types import BackwardPath  # noqa: E402
from megatron_mtraining.layout import owner_of  # noqa: E402
from megatron_mtraining.pattern.vertical_slash_index import (  # noqa: E402
    VerticalSlashIndex,
    build_index,
)
from megatron_mtraining.ring.schedule import (  # noqa: E402
    Action,
    Link,
    Op,
    backward_ops,
    forward_ops,
    rounds,
)

BLOCK = 64
RANKS, INNER = 4, 2
OUTER = RANKS // INNER
BLOCKS = 24
"""Blocks of the pattern in the picture of layouts: a multiple of 2 x RANKS, for zigzag chunks."""
SLASHES = (0, 1, 5, 12)
COLUMNS = (*range(8), *range(7 * BLOCK + 20, 7 * BLOCK + 28))

RANK_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's: told apart with any kind of colour vision."""
KERNEL, SEND, WAIT = "#bcd9ec", "#fbe0b0", "#f6f6f6"
LINE = "#404040"
STYLE = {
    "font.size": 8,
    "axes.edgecolor": LINE,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "hatch.linewidth": 0.6,
}


def contiguous(block: Tensor) -> Tensor:
    """The rank of each block: one stretch of the sequence for each rank."""
    return block // (BLOCKS // RANKS)


def zigzag(block: Tensor) -> Tensor:
    """The rank of each block: chunks r and 2 W - 1 - r of 2 W, as in Megatron."""
    chunk = block // (BLOCKS // (2 * RANKS))
    return torch.minimum(chunk, 2 * RANKS - 1 - chunk)


def block_striped(block: Tensor) -> Tensor:
    """The rank of each block in ``megatron_mtraining/layout.py``."""
    return owner_of(block, RANKS, INNER)[0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "block-striped": block_striped,
}


def index_of(slashes: Sequence[int], columns: Sequence[int], num_blocks: int) -> VerticalSlashIndex:
    """The index of one head."""
    distances = torch.zeros(1, 1, num_blocks, dtype=torch.bool)
    distances[..., list(slashes)] = True
    positions = torch.tensor(columns, dtype=torch.int64).view(1, 1, -1)
    return build_index(distances, positions, num_blocks * BLOCK, BLOCK, RANKS, INNER)


def pairs_by_rank(index: VerticalSlashIndex, layout: Callable[[Tensor], Tensor]) -> Tensor:
    """Attended query-key pairs, int64 ``[OUTER + 1, RANKS]``: of slashes in each round, and of columns."""
    blocks = torch.arange(index.seq_length // BLOCK)
    pairs = index.token_mask(0, 0).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((1, 3))
    rank = layout(blocks)
    group = rank // INNER
    apart = blocks[:, None] - blocks[None, :]
    in_slash = index.distances()[0, 0, apart.clamp(min=0)]
    part = torch.where(in_slash, (group[:, None] - group[None, :]) % OUTER, OUTER)
    found = torch.zeros(OUTER + 1, RANKS, dtype=torch.int64)
    return found.index_put_((part, rank[:, None].expand_as(part)), pairs, accumulate=True)


def imbalance(pairs: Tensor) -> float:
    """Largest over mean, over ranks."""
    return (pairs.max() / pairs.double().mean()).item()


def striping() -> pyplot.Figure:
    """Three layouts of one vertical-slash pattern, and the work of each rank in each."""
    index = index_of(SLASHES, COLUMNS, BLOCKS)
    figure, axes = pyplot.subplots(
        2, 3, figsize=(8, 5.3), height_ratios=(2.5, 1), layout="constrained"
    )
    most = max(pairs_by_rank(index, layout).sum(0).max().item() for layout in LAYOUTS.values())
    for column, (name, layout) in enumerate(LAYOUTS.items()):
        _draw_pattern(axes[0, column], index, layout(torch.arange(BLOCKS)).tolist())
        axes[0, column].set_title(name, fontsize=10, fontweight="bold")
        _draw_work(axes[1, column], pairs_by_rank(index, layout), most)
    axes[0, 0].set_ylabel("query block (number: its rank)")
    axes[1, 0].set_ylabel("query-key pairs")
    figure.legend(
        handles=[
            Patch(facecolor="#808080", edgecolor=LINE, label="round 0: own inner group's keys"),
            Patch(
                facecolor="#d0d0d0",
                edgecolor=LINE,
                hatch="////",
                label="round 1: the other group's keys",
            ),
            Patch(facecolor="white", edgecolor=LINE, label="columns"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return figure


def _draw_pattern(axes, index: VerticalSlashIndex, rank: Sequence[int]) -> None:
    distances = index.distances()[0, 0]
    for i, owner in enumerate(rank):
        colour = RANK_COLOURS[owner]
        axes.add_patch(Rectangle((0, i), i + 1, 1, facecolor=colour, alpha=0.13, linewidth=0))
        for j in range(i + 1):
            if distances[i - j]:
                axes.add_patch(
                    Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.4)
                )
        for position in COLUMNS:
            at = position / BLOCK
            if int(at) <= i and not distances[i - int(at)]:
                width = 1 / BLOCK
                axes.add_patch(Rectangle((at, i), width, 1, facecolor=colour, linewidth=0))
        axes.text(-0.4, i + 0.5, str(owner), ha="right", va="center", fontsize=6.3, color=LINE)
    axes.set(xlim=(-1.6, BLOCKS), ylim=(BLOCKS, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_xlabel("key block")
    axes.spines[:].set_visible(False)


def _draw_work(axes, pairs: Tensor, most: int) -> None:
    below = torch.zeros(RANKS)
    styles = [dict(alpha=1.0), dict(alpha=0.45, hatch="////"), dict(facecolor="white")]
    for part, style in zip(pairs, styles, strict=True):
        drawn = dict(color=RANK_COLOURS) | style
        if "facecolor" in style:
            drawn = style
        axes.bar(range(RANKS), part, bottom=below, edgecolor=LINE, linewidth=0.6, **drawn)
        below = below + part
    rounds_ = ", ".join(f"{imbalance(part):.2f}" for part in pairs[:OUTER])
    axes.set_title(
        f"max / mean: {imbalance(pairs.sum(0)):.2f} (round 0, 1: {rounds_})", fontsize=7.5
    )
    axes.set(xticks=range(RANKS), yticks=[], ylim=(0, 1.05 * most))
    axes.set_xlabel("rank")
    axes.spines[["top", "right"]].set_visible(False)


def text_of(op: Op, rank: int) -> str:
    """One operation of a rank's work list, for a box of the picture."""
    to_inner = rank // INNER * INNER + (rank + 1) % INNER
    to_outer = (rank + INNER) % RANKS
    part = ""
    if op.head_part is not None and op.head_part[1] > 1:
        part = f", part {op.head_part[0] + 1}/{op.head_part[1]}"
    link = op.link.value if op.link else ""
    to = f"{to_outer if op.link is Link.OUTER else to_inner} ({link})"
    keys = f"{op.round.sources[0]}-{op.round.sources[-1]}" if op.round else ""
    source = op.ring_step.source if op.ring_step else ""
    return {
        Action.COMPUTE_OUT: f"out: keys of {keys}",
        Action.COMPUTE_COLUMN_GRADS: "columns' gradients; sum them",
        Action.COMPUTE_DQ: f"dQ: keys of {keys}{part}",
        Action.COMPUTE_DKV: f"dKV: keys of {source}",
        Action.COMPUTE_OWN_DKV: f"dKV: own keys ({source})",
        Action.SEND_KV: f"send KV to {to}",
        Action.GATHER_KV: "gather KV in the group",
        Action.SEND_DKV: f"send dKV to {to}",
        Action.RECEIVE_DKV: f"wait for dKV ({link})",
        Action.ADD_DKV: f"wait for dKV ({link}), add it",
        Action.STASH_DKV: "stash dKV",
        Action.RESTORE_DKV: "restore dKV",
    }[op.action]


def colour_of(op: Op) -> str:
    """Kernels, transfers that start, and the rest."""
    if op.action.name.startswith("COMPUTE"):
        return KERNEL
    starts = (Action.SEND_KV, Action.SEND_DKV, Action.GATHER_KV)
    return SEND if op.action in starts else WAIT


def work_lists() -> pyplot.Figure:
    """The lists of operations of 4 ranks, forward and backward, in their order."""
    parts = {
        "forward": forward_ops,
        "backward": partial(backward_ops, path=BackwardPath.TWO_KERNELS, columns=True),
    }
    lists = {
        name: [make(rank, INNER, OUTER) for rank in range(RANKS)] for name, make in parts.items()
    }
    height = sum(len(ops[0]) for ops in lists.values())
    figure, axes = pyplot.subplots(figsize=(8, 0.235 * (height + 3.2)), layout="constrained")
    y = 0.0
    for rank in range(RANKS):
        axes.text(
            rank + 0.5, -0.35, f"rank {rank} (group {rank // INNER})",
            ha="center", va="bottom", fontweight="bold", color=LINE,
        )  # fmt: skip
    for name, ops_of_ranks in lists.items():
        count = len(ops_of_ranks[0])
        axes.text(-0.07, y + count / 2, name, rotation=90, ha="right", va="center", fontsize=10)
        for rank, ops in enumerate(ops_of_ranks):
            for i, op in enumerate(ops):
                axes.add_patch(
                    Rectangle(
                        (rank + 0.02, y + i + 0.06),
                        0.96,
                        0.88,
                        facecolor=colour_of(op),
                        edgecolor=LINE,
                        linewidth=0.5,
                    )
                )
                axes.text(
                    rank + 0.5, y + i + 0.52, text_of(op, rank), ha="center", va="center", fontsize=7.5
                )  # fmt: skip
        y += count + 0.7
    axes.set(xlim=(-0.25, RANKS), ylim=(y, -1.2))
    axes.axis("off")
    figure.legend(
        handles=[
            Patch(facecolor=KERNEL, edgecolor=LINE, label="kernel"),
            Patch(facecolor=SEND, edgecolor=LINE, label="transfer starts"),
            Patch(facecolor=WAIT, edgecolor=LINE, label="wait, or local"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return figure


class Span(NamedTuple):
    """A bar of the timeline."""

    lane: str
    start: float
    end: float
    text: str


LANES = ("kernels", "outer ring", "inner group")
PACK, SEARCH, ROUND, HOP, GATHER = 1.3, 3.0, 5.0, 2.4, 1.6
"""Durations in the timeline, in no unit."""


def forward_timeline(rank: int, inner: int, outer: int) -> list[Span]:
    """When kernels and transfers of a rank run in a forward, if the host launches them in time.

    The first hop and the first gather start before the pattern search. Later hops start with the kernels of
    their round, and gathers after the hop that brings what they gather.
    """
    groups = [round_.sources[0] // inner for round_ in rounds(rank, inner, outer)]
    spans = []

    def add(lane: str, start: float, duration: float, text: str) -> float:
        spans.append(Span(lane, start, start + duration, text))
        return start + duration

    packed = add("kernels", 0.0, PACK, "pack KV")
    # When the keys of the next kernels are gathered.
    ready = add("inner group", packed, GATHER, f"gather {groups[0]}")
    arrived = packed
    now = add("kernels", packed, SEARCH, "pattern search")
    launched = 0.0  # start of the last kernels
    following = 1  # the round whose keys come next
    for op in forward_ops(rank, inner, outer):
        if op.action is Action.SEND_KV:
            start = packed if following == 1 else max(now, ready)
            arrived = add("outer ring", start, HOP, f"KV of group {groups[following]}")
        elif op.action is Action.COMPUTE_OUT:
            launched = max(now, ready)
            number = op.round.round_index
            now = add("kernels", launched, ROUND, f"round {number}: keys of group {groups[number]}")
        elif op.action is Action.GATHER_KV:
            ready = add(
                "inner group", max(arrived, launched), GATHER, f"gather {groups[following]}"
            )
            following += 1
    return spans


def overlap() -> pyplot.Figure:
    """A forward of three rounds on rank 0: transfers run beside kernels."""
    spans = forward_timeline(0, INNER, 3)
    figure, axes = pyplot.subplots(figsize=(8, 2.3), layout="constrained")
    colours = dict(zip(LANES, (KERNEL, SEND, SEND)))
    for span in spans:
        y = LANES.index(span.lane)
        axes.add_patch(
            Rectangle((span.start, y + 0.12), span.end - span.start, 0.76, facecolor=colours[span.lane],
                      edgecolor=LINE, linewidth=0.7)
        )  # fmt: skip
        middle = (span.start + span.end) / 2
        axes.text(middle, y + 0.5, span.text, ha="center", va="center", fontsize=7.5)
    axes.set(xlim=(0, max(span.end for span in spans) + 0.1), ylim=(len(LANES), 0))
    labels = "kernels", "outer ring:\nsend, receive", "inner group:\nall-gather"
    axes.set_yticks([y + 0.5 for y in range(len(LANES))], labels)
    axes.set(xticks=[])
    axes.set_xlabel("time (schematic)")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


PICTURES: dict[str, Callable[[], pyplot.Figure]] = {
    "layouts.png": striping,
    "work-lists.png": work_lists,
    "overlap.png": overlap,
}


def main(folder: str | None = None) -> None:
    """Write all pictures."""
    target = DOCS / "images" if folder is None else Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(target / name, dpi=200, metadata={"Software": None})
            pyplot.close(figure)
            print(target / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
