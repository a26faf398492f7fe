# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""How evenly a ring's work falls on ranks and rounds: pairs counted on its schedule; no GPU, no process.

The ring has W = O x I ranks, rank x * I + y is number y of node x. In round o all ranks of node x attend at
once to the keys of node (x - o) % O: one rank's keys a round where nodes are single ranks (the plain ring).
For every pattern, number of ranks and size of the nodes, layouts beside each other:

- ``striped``: this project's. Consecutive blocks go to consecutive nodes, so all ranks of a node have the
  same distances in each round; a node's blocks are dealt to its ranks there and back. Columns travel
  gathered, and all ranks' are attended, those of each head in one of the rounds.
- ``one direction``: the same, but a node's blocks are dealt to its ranks 0 to I - 1 each time. Left out where
  nodes are single ranks, as it is ``striped`` there.
- ``zigzag``: 2W chunks, rank r has chunks r and 2W - 1 - r (Megatron's); columns with their owner's keys.
- ``contiguous``: W chunks; likewise.

With w[r, o] the pairs of rank r in round o, and as 1 what a rank has to do in the mean over ranks:

- ``worker_imbalance``: the slowest rank's pairs over all rounds.
- ``step_imbalance``: the sum over rounds of each round's slowest rank: the time if all ranks waited for each
  other after each round.
- ``exposed``: the time if ranks wait for keys alone (:func:`makespan`), transfers taking no time.
- ``step_over_mean``: the heaviest w[r, o] over the mean: how much longer than its share a round can be.

All counts are exact integers, and of the forward. The backward's gradient of queries has the same rounds and
pairs; its gradient of keys, which goes one rank's keys at a time, is not counted.

In rows ``inner`` is as it was asked for: 0 is the package's default for so many ranks, 1 the plain ring;
``nodes`` is O, so that I is ``world / nodes``.

``--data FOLDER`` names a folder with safetensors files of a model's own queries and keys (``query``, ``key``,
``[heads, s, d]``), one file a layer: their patterns are chosen at 1000 columns and 100 diagonals, and
counted at their own length and, stretched (:func:`stretch`), at 512K tokens. Prints and appends
rows to ``results/balance.jsonl``.

    python -m benchmarks.layer.balance [--data FOLDER] [--world N ...] [--inner I ...] [--output FILE]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.layout import block_at, inner_size
from megatron_mtraining.pattern import search_pattern

from ..lib import record, workloads
from ..lib.workloads import BLOCK

WORLDS = (4, 8, 32, 64, 256)
INNER = (0, 1, 4)
SEQ = 524288
HEADS = 16
LAYOUTS = ("striped", "one direction", "zigzag", "contiguous")


class Pattern(NamedTuple):
    """One layer's pattern: what is kept, by head, and how many columns lie in each block."""

    name: str
    seq: int
    distances: np.ndarray  # bool [heads, blocks]
    columns: np.ndarray  # int64 [heads, blocks]

    @property
    def blocks(self) -> int:
        return self.distances.shape[1]

    def density(self) -> float:
        """Share of the causal pairs that is kept."""
        causal = len(self.distances) * self.seq * (self.seq + 1) // 2
        return int(chunk_pairs(self, 1).sum()) / causal


def pattern_of(name: str, seq: int, distances: torch.Tensor, picked: torch.Tensor) -> Pattern:
    """From distances ``[1, h, NB]`` and column positions ``[1, h, C]``, each once; N or more is none."""
    if seq % BLOCK:
        raise ValueError(f"{seq} tokens are not a whole number of blocks of {BLOCK}")
    blocks = seq // BLOCK
    member = distances[0].cpu().numpy().copy()
    member[:, 0] = True
    columns = [np.bincount(row[row < seq] // BLOCK, minlength=blocks) for row in picked[0].numpy()]
    return Pattern(name, seq, member, np.array(columns, dtype=np.int64).reshape(-1, blocks))


# Striped layouts: pairs by (round, query block), int64 [O, blocks], and whose blocks these are.


def slash_pairs(pattern: Pattern, outer: int) -> np.ndarray:
    """Pairs of slashes: in round o, those at distances d with ``d % O == o``."""
    heads, blocks = pattern.distances.shape
    kept = pattern.distances.sum(0).reshape(-1, outer)
    # upto[e, o]: how many of the distances o, O + o, ... come before e * O + o, over all heads.
    upto = np.zeros((len(kept) + 1, outer), dtype=np.int64)
    np.cumsum(kept, axis=0, out=upto[1:])
    number, block = np.mgrid[:outer, :blocks]
    pairs = upto[(block - number) // outer + 1, number] * BLOCK * BLOCK
    pairs[0] -= heads * (BLOCK * (BLOCK - 1) // 2)  # distance 0 is a triangle
    return pairs


def columns_seen(columns: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """How many columns each query block sees, those of block j by block i if ``outside[i - j]``.

    A product of two polynomials. Its error is far below a half, so rounding makes it exact.
    """
    blocks = columns.shape[-1]
    product = np.fft.rfft(columns, 2 * blocks) * np.fft.rfft(outside, 2 * blocks)
    return np.rint(np.fft.irfft(product, 2 * blocks)[..., :blocks]).astype(np.int64)


def dealt_columns(pattern: Pattern, outer: int) -> np.ndarray:
    """Pairs of columns, all of head h of H in round ``h * O // H``."""
    pairs = np.zeros((outer, pattern.blocks), dtype=np.int64)
    seen = columns_seen(pattern.columns, ~pattern.distances) * BLOCK
    for head, of_head in enumerate(seen):
        pairs[head * outer // len(seen)] += of_head
    return pairs


def by_rank(pairs: np.ndarray, world: int, inner: int, turned: bool = True) -> np.ndarray:
    """w[r, o], int64 ``[W, O]``, of pairs by (round, query block): those of each rank's blocks, summed.

    Args:
        turned: whether a node's blocks are dealt to its ranks there and back, or in one direction.
    """
    outer, blocks = pairs.shape
    rank, local = np.mgrid[:world, : blocks // world]
    if turned:
        own = block_at(local, rank, world, inner)
    else:
        own = (local * inner + rank % inner) * outer + rank // inner
    return pairs[:, own].sum(-1).T


# Layouts of chunks: pairs by (query rank, key rank), int64 [W, W].


def chunk_pairs(pattern: Pattern, chunks: int) -> np.ndarray:
    """Pairs between every two of ``chunks`` stretches of the sequence, as (query chunk, key chunk)."""
    blocks, heads = pattern.blocks, len(pattern.distances)
    if blocks % chunks:
        raise ValueError(f"{blocks} blocks cannot be cut into {chunks} chunks")
    length = blocks // chunks
    edges = np.arange(chunks + 1) * length
    # How many distances, from 0 on, lead from a key block to query blocks before an edge.
    reach = np.clip(edges[:, None] - np.arange(blocks), 0, None)
    kept = np.zeros((heads, blocks + 1), dtype=np.int64)
    np.cumsum(pattern.distances, axis=1, out=kept[:, 1:])
    left_out = np.arange(blocks + 1) - kept
    # Differences at the edges: one entry a query chunk and key block.
    pairs = np.diff(kept.sum(0)[reach], axis=0) * BLOCK * BLOCK
    for counts, outside in zip(pattern.columns, left_out):
        pairs += np.diff(outside[reach], axis=0) * counts * BLOCK
    pairs = pairs.reshape(chunks, chunks, length).sum(-1)
    pairs[np.diag_indices(chunks)] -= heads * length * (BLOCK * (BLOCK - 1) // 2)
    return pairs


def contiguous(pattern: Pattern, world: int) -> np.ndarray:
    return chunk_pairs(pattern, world)


def zigzag(pattern: Pattern, world: int) -> np.ndarray:
    pairs = chunk_pairs(pattern, 2 * world)
    pairs = pairs[:world] + pairs[world:][::-1]  # chunk 2W - 1 - r lies with chunk r
    return pairs[:, :world] + pairs[:, world:][:, ::-1]


def sources(world: int, inner: int) -> np.ndarray:
    """Whose keys each rank has in each round: ``[W, O, I]`` (rank, round, number in the node)."""
    outer = world // inner
    rank, number, y = np.mgrid[:world, :outer, :inner]
    return (rank // inner - number) % outer * inner + y


def on_schedule(pairs: np.ndarray, inner: int) -> np.ndarray:
    """w[r, o], int64 ``[W, O]``, of pairs by (query rank, key rank)."""
    world = len(pairs)
    return pairs[np.arange(world)[:, None, None], sources(world, inner)].sum(-1)


def makespan(work: np.ndarray) -> int:
    """When the last rank is done, of w[r, o], if all begin at 0 and transfers take no time.

    At the start of its round o a rank posts, as one operation, to send its own slot of the keys at hand to
    its number in the next node and to receive that of round o + 1 from the node before. It waits for both
    before its round o + 1, and for the gather that the node's other ranks post behind theirs. So

        start(r, o + 1) = max(done(r, o), start(q, o) of all q in r's node, the one before and the one after)

    The one before has the keys then. The one after has room for them: there are buffers for two rounds, so
    it must be done with its round o - 1, and posts at the start of its round o, which is no earlier.
    """
    world, outer = work.shape
    start = np.zeros(world, dtype=np.int64)
    for o in range(outer - 1):
        begun = start.reshape(outer, -1).max(1)  # by all ranks of a node
        over = np.maximum.reduce((begun, np.roll(begun, 1), np.roll(begun, -1)))
        start = np.maximum(start + work[:, o], over.repeat(world // outer))
    return int((start + work[:, -1]).max())


def figures(work: np.ndarray) -> dict[str, float]:
    """The four figures of the module's text."""
    mean = work.sum() / len(work)
    found = dict(
        worker_imbalance=work.sum(1).max() / mean,
        step_imbalance=work.max(0).sum() / mean,
        step_over_mean=work.max() / work.mean(),
        exposed=makespan(work) / mean,
    )
    return {name: round(float(value), 4) for name, value in found.items()}


# Patterns.


def synthetic(seq: int, heads: int) -> list[Pattern]:
    """Drawn patterns: see the functions of ``workloads.py``."""
    drawn = {
        "3%, heads unequal, 1000 columns": lambda: workloads.draw_unequal(seq, heads, 0.03, 1000),
        "1000 columns, 100 local diagonals": lambda: workloads.draw_local(seq, heads, 100, 1000),
        "all distances": lambda: workloads.draw_pattern(seq, heads, 1.0, 0),
    }
    patterns = []
    for name, draw in drawn.items():
        torch.manual_seed(0)  # the same pattern, whichever are counted
        patterns.append(pattern_of(name, seq, *draw()))
    return patterns


def stretch(distances: torch.Tensor, columns: torch.Tensor, seq: int, long: int):
    """A pattern found at ``seq`` tokens, drawn out to ``long``: the local window stays as it is; every other
    distance, a share of the sequence, comes to lie anywhere (evenly) in the stretch of the same share,
    and so does every column but those in the first block. As many distances and columns as were found:
    the density falls. Two that fall on one place are one."""
    factor = long // seq
    near = 2  # blocks that the default window takes
    found = torch.zeros(*distances.shape[:2], long // BLOCK, dtype=torch.bool)
    found[..., :near] = distances[..., :near]
    for head, distance in distances[0, :, near:].nonzero():
        place = (distance + near) * factor + torch.randint(factor, ())
        found[0, head, place] = True
    far = columns * factor + torch.randint(factor, columns.shape)
    return found, torch.where(columns < BLOCK, columns, torch.where(columns < seq, far, long))


def columns_of(index) -> torch.Tensor:
    """Column positions of an index on one rank: ``[1, h, C]``, N where there is none."""
    count = index.column_ptr[..., -1:]
    place = torch.arange(index.columns.shape[-1])
    return torch.where(place < count, index.columns.long(), index.seq_length)


def real(folder: Path) -> list[Pattern]:
    """The patterns of each file's queries and keys, as found and stretched to 512K tokens."""
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"--data {folder}: no *.safetensors in it")
    patterns = []
    for file in files:
        query, key = workloads.read_operands(file)
        seq = query.shape[0]
        config = MTrainingConfig.from_options(
            vertical=1000, slash=100, sample_strata=64, sample_rows=1
        )
        index = search_pattern(query, key, config, CPGroup(None), query.shape[-1] ** -0.5)
        found = index.distances(), columns_of(index)
        patterns.append(pattern_of(f"real {file.stem}", seq, *found))
        torch.manual_seed(0)
        patterns.append(pattern_of(f"real {file.stem}, stretched", SEQ, *stretch(*found, seq, SEQ)))
    return patterns


def striped_work(pattern: Pattern, world: int, inner: int) -> dict[str, np.ndarray]:
    """w[r, o] of the layouts that stripe."""
    outer = world // inner
    slash = slash_pairs(pattern, outer)
    dealt = slash + dealt_columns(pattern, outer)
    work = {"striped": by_rank(dealt, world, inner)}
    if inner > 1:
        work["one direction"] = by_rank(dealt, world, inner, turned=False)
    return work


def count(pattern: Pattern, world: int, inners: Iterable[int]) -> list[dict]:
    """A row a size of nodes and layout. None if the sequence is too short for 2 x ``world`` chunks, or for
    nodes that ``world`` ranks do not fill or that have been counted."""
    if pattern.blocks % (2 * world):
        return []
    density = round(pattern.density(), 5)
    chunked = {"zigzag": zigzag(pattern, world), "contiguous": contiguous(pattern, world)}
    rows, seen = [], set()
    for asked in inners:
        inner = asked or inner_size(world)
        if world % inner or inner in seen:
            continue
        seen.add(inner)
        work = striped_work(pattern, world, inner)
        work |= {name: on_schedule(pairs, inner) for name, pairs in chunked.items()}
        for name, of_rank in work.items():
            rows.append(
                dict(
                    world=world, inner=asked, nodes=world // inner, layout=name,
                    pattern=pattern.name, seq=pattern.seq, density=density,
                    **figures(of_rank),
                )
            )  # fmt: skip
    return rows


def main():
    parser = record.parser(__doc__, "balance.jsonl")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="a model's queries and keys")
    parser.add_argument("--world", type=int, nargs="+", default=WORLDS, metavar="N")
    parser.add_argument(
        "--inner", type=int, nargs="+", default=INNER, metavar="I",
        help="ranks of a node, where they divide N: 0 the default for N, 1 a plain ring",
    )  # fmt: skip
    options = parser.parse_args()
    if options.data and not options.data.is_dir():
        parser.error(f"--data {options.data}: no such folder")
    bad = [n for n in options.world if n < 1 or SEQ // BLOCK % (2 * n)]
    if bad:
        parser.error(f"--world {bad[0]}: 2 x {bad[0]} must divide {SEQ // BLOCK} blocks")
    for inner in options.inner:
        if inner < 0 or (inner and all(world % inner for world in options.world)):
            parser.error(f"--inner {inner}: 0, or a divisor of one of {list(options.world)} ranks")
    rows = []
    for pattern in (real(options.data) if options.data else []) + synthetic(SEQ, HEADS):
        found = [row for world in options.world for row in count(pattern, world, options.inner)]
        print(f"{pattern.name}: {pattern.seq} tokens, density {pattern.density():.4f}")
        for row in found:
            ring = f"{row['nodes']}x{row['world'] // row['nodes']} {row['layout']}"
            shown = {n: row[n] for n in ("worker_imbalance", "step_imbalance", "exposed")}
            print(f"  {ring}: {shown}", flush=True)
        rows += found
    record.append(options.output, rows)


if __name__ == "__main__":
    main()
