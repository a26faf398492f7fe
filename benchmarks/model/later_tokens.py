# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
r"""By how much the loss of tokens moves when what follows them is replaced, for each policy.

The pattern of a step is selected by queries, and what a query attends to may be decided by later ones
(docs/how-it-works.md, "What later tokens can change"). Then a loss with the pattern is lower than the loss of
a model that writes, which has no later tokens. For each run, trained with its own attention:

- held-out windows, cut at several places, with other text of the same kind behind the cut: losses of the 32
  tokens before the cut, and of all tokens before it;
- copies: a block of a window is a copy of one of the eight blocks before it, but not of the last, which is
  always seen. Other text comes behind the first 9 tokens of the copy. Losses of the 8 tokens that the first 8
  predict, also with dense attention.

``difference`` is the loss with another future minus the loss with the own one, in nats a token: what later
tokens give. Errors are standard errors over cuts or copies. Dense attention has no difference, by
construction. A row a run:

    python -m benchmarks.model.later_tokens --model smol.gguf --cache tokens.npz --jobs 3 \
        --run price@0.15 target@0.95 fixed@0.15 xattention@0.15 xattention_previous@0.15 moba@0.15
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..lib import jobs, record
from ..lib.policies_at_density import config_of
from . import continuing
from .continuing import attend_by, token_losses
from .frontier_rows import decay_of
from .frontier_settings import about, on_frontier, setting_of, split
from .material import material

NEAR = 32
"""Tokens before a cut."""
CUTS = 8
"""Cuts of a window."""
COPIES, COPIED = 48, 8
"""Copies in all, and the tokens of each whose loss counts."""
FARTHEST = 8
"""Blocks from a copy to what it is a copy of, at most."""
KEPT = "steps lr decay density recall own dense own_by_text dense_by_text seconds".split()
"""What a row has of training."""

Pair = tuple[Tensor, Tensor, slice]
"""A sequence ``[s + 1]``, the same with another future, and the tokens of ``[s]`` whose losses count."""


def cuts(windows: Tensor, others: Tensor, block_size: int) -> Iterator[Pair]:
    """Every window, cut at places that differ in where in a block they are."""
    length = windows.shape[1] - 1
    for number, (own, other) in enumerate(zip(windows, others)):
        for each in range(CUTS):
            golden = (number * CUTS + each + 1) * 40503 % 65536 * block_size // 65536
            cut = (each + 1) * length // (CUTS + 1) // block_size * block_size + golden
            # The loss at place t is of token t + 1.
            yield own, torch.cat((own[:cut], other[cut:])), slice(0, cut - 1)


def copies(windows: Tensor, others: Tensor, block_size: int, count: int) -> Iterator[Pair]:
    """Windows in which one block is a copy."""
    blocks = (windows.shape[1] - 1) // block_size
    for number in range(count):
        own, other = windows[number % len(windows)].clone(), others[number % len(windows)]
        block = FARTHEST + 1 + number * 40503 % 65536 * (blocks - FARTHEST - 2) // 65536
        first, apart = block * block_size, 2 + number % (FARTHEST - 1)
        source = first - apart * block_size
        own[first : first + block_size] = own[source : source + block_size]
        cut = first + COPIED + 1
        yield own, torch.cat((own[:cut], other[cut:])), slice(first, first + COPIED)


def compared(
    pairs: Iterator[Pair], loss_of: Callable[[Tensor], Tensor], last: int | None = None
) -> dict:
    """Losses with the own and with another future, and their difference.

    Args:
        last: of the tokens that count, how many of the last; None for all.
    """
    owns, others, own, found = [], [], None, None
    for sequence, other, tokens in pairs:
        if sequence is not own:
            own, found = sequence, loss_of(sequence)
        for losses, means in ((found, owns), (loss_of(other), others)):
            means.append(losses[tokens].double())
    rows = {}
    for name, count in (("all", None), ("last", last)) if last else (("all", None),):
        pair = torch.stack(
            [
                torch.stack([each[-count if count else 0 :].mean() for each in some])
                for some in (owns, others)
            ]
        )
        difference = pair[1] - pair[0]
        rows[name] = dict(
            own=round(pair[0].mean().item(), 5), replaced=round(pair[1].mean().item(), 5),
            difference=round(difference.mean().item(), 5),
            stderr=round(difference.std().item() / math.sqrt(len(difference)), 5),
            above_zero=int((difference > 0).sum()), n=len(difference),
        )  # fmt: skip
    return rows


@torch.no_grad()
def measured(model, held_out: dict[str, Tensor], options, attention: str | None) -> list[dict]:
    """What a row says of each kind of text.

    Args:
        attention: name of the run's attention; None for dense.
    """
    model.eval()
    found = []
    for kind, windows in held_out.items():
        others = windows.roll(1, 0) if len(windows) > 1 else windows.roll(options.seq // 2, 1)
        attend_by(model, attention)
        rows = compared(
            cuts(windows, others, options.block_size),
            lambda tokens: token_losses(model, tokens),
            NEAR,
        )
        found += [
            dict(text=kind, tokens=f"{NEAR} before the cut", **rows["last"]),
            dict(text=kind, tokens="all before the cut", **rows["all"]),
        ]
        count = COPIES // len(held_out)
        row = compared(
            copies(windows, others, options.block_size, count),
            lambda tokens: token_losses(model, tokens),
        )["all"]
        attend_by(model, None)
        dense = [
            token_losses(model, own)[tokens].mean().item()
            for own, _, tokens in copies(windows, others, options.block_size, count)
        ]
        found.append(
            dict(text=kind, tokens="copies", dense=round(sum(dense) / len(dense), 5), **row)
        )
    return found


def work(job: tuple[str, int, argparse.Namespace]) -> dict:
    """A run, trained and measured; in a process of its own."""
    name, seed, options = job
    policy, wanted = split(name)
    given = material(options)
    setting = setting_of(policy, wanted, on_frontier(options), given)
    config = None if setting is None else config_of(setting, options.block_size)
    run = continuing.Run(name.replace("/", "_"), seed, options.steps, config)
    row, model = continuing.train(run, given, options)
    return dict(
        zip(("policy", "wanted"), split(name)), setting=setting, seed=seed,
        **{each: row[each] for each in KEPT},
        measured=measured(model, given.held_out, options, None if config is None else run.attention),
        **about(options),
    )  # fmt: skip


def stage(options) -> int:
    """Rows of the runs that have none."""
    there = {
        (row["policy"], row["wanted"], row["seed"])
        for row in jobs.read(options.output)
        if (row["model"], row["seq"], row["steps"], decay_of(row))
        == (options.model.name, options.seq, options.steps, options.decay)
    }
    runs = [
        (n, s, options) for s in options.seeds for n in options.run if (*split(n), s) not in there
    ]
    print(f"later tokens: {len(runs)} runs are to be made", flush=True)
    deadline = jobs.Deadline(options.minutes, options.expect or 120.0)
    return jobs.run_jobs(runs, work, options.output, options.jobs, deadline)


def main(words: list[str] | None = None) -> None:
    parser = record.parser(__doc__, "later_tokens.jsonl")
    continuing.add_options(parser)
    add = parser.add_argument
    add(
        "--run",
        nargs="+",
        required=True,
        metavar="NAME",
        help="dense, target@RECALL, POLICY@DENSITY",
    )
    continuing.add_training_options(parser, seeds=[1])
    options = parser.parse_args(words)
    continuing.check_options(parser, options)
    jobs.run_stage("later_tokens.py", stage, options)


if __name__ == "__main__":
    main()
