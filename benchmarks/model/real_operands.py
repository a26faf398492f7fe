# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Times of attention on the queries, keys and values of a trained model's layers, beside dense attention.

    python -m benchmarks.model.real_operands --model coder.gguf --cache tokens.npz --text-kind code

Random operands tell a kernel's rate, but not what a setting saves: that depends on how concentrated a model's
attention is. The model reads the end of a text once, with dense attention, and the operands of some layers
are kept (YaRN where the text is longer than the model's positions). For each setting: pattern search, forward
and backward, beside cuDNN's dense attention and, where it is installed, FlashAttention-4's on the same
operands. A row a layer and setting. Setting ``dense`` is dense attention through this package, by the kernels
that ``MTRAINING_DENSE`` names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megatron_mtraining import ConfigError
from megatron_mtraining.models.open import open_model
from megatron_mtraining.models.types import LayerInput, ModelOptions
from megatron_mtraining.switches import switch

from ..lib import record
from ..lib.policies_at_density import Setting
from . import texts
from .layer_times import Layer, Shape

LAYERS = (1, 5, 10, 14, 18, 22)
DENSE: Setting = dict(policy="price", price=0.0)


def setting_of(text: str) -> Setting:
    """``PRICE`` or ``PRICE:THRESHOLD``, the threshold of the backward; ``xattention@SHARE``; or ``dense``."""
    if text == "dense":
        return DENSE
    price, _, threshold = text.partition(":")
    try:
        if price.startswith("xattention@"):
            return dict(policy="xattention", block_threshold=float(price.partition("@")[2]))
        return dict(policy="price", price=float(price), backward_threshold=float(threshold or 0))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not PRICE, PRICE:THRESHOLD, xattention@SHARE or dense"
        ) from None


SETTINGS = tuple(map(setting_of, ("0.31", "0.31:3", "0.62", "0.62:3", "0:3")))


def operands_of(options) -> dict[int, tuple[torch.Tensor, ...]]:
    """By layer: query, key, value and a random gradient of out, ``[s, 1, h, d]``.

    Raises:
        ConfigError: the text is too short, or the model is not supported.
    """
    if options.operands is not None:
        kept = torch.load(options.operands, map_location=options.device)
        return {int(name.rpartition(" ")[2]): each for name, each in kept.items()}
    tokens = texts.read(options).get(options.text_kind)
    if tokens is None or len(tokens) < options.seq:
        count = 0 if tokens is None else len(tokens)
        raise ConfigError(
            f"--text-kind {options.text_kind} has {count} tokens: give {options.seq} or more, or a "
            "shorter --seq"
        )
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    asked = ModelOptions(options.model, device, dtype, name="--model")
    source = open_model(asked)
    factor = options.seq / source.shape.positions
    if factor > 1:
        source = open_model(ModelOptions(options.model, device, dtype, None, factor, "--model"))
    found: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(given: LayerInput) -> None:
        if given.layer in options.layers:
            query, key, value = (
                each.contiguous().clone() for each in (given.query, given.key, given.value)
            )
            found[given.layer] = query, key, value, torch.randn_like(query)

    with source.loaded() as run_model:
        run_model(torch.from_numpy(tokens[-options.seq :].astype("int64")), keep)
    return found


def options_from(words: list[str] | None = None) -> argparse.Namespace:
    """The run that arguments ask for."""
    parser = record.parser(__doc__, "real_operands.jsonl")
    texts.add_options(parser)
    add = parser.add_argument
    add("--text-kind", default="code", help="of the file of tokens (%(default)s)")
    add("--seq", type=int, default=131072)
    add("--layers", type=int, nargs="+", default=list(LAYERS), help="counted from 0")
    add(
        "--keep",
        type=Path,
        metavar="FILE",
        help="write the operands for kernels.peers, and no rows",
    )
    add(
        "--operands",
        type=Path,
        metavar="FILE",
        help="read what --keep has written from the same options",
    )
    add(
        "--settings", type=setting_of, nargs="+", default=list(SETTINGS), metavar="SETTING",
        help="PRICE (0: a dense forward), PRICE:THRESHOLD, xattention@SHARE, dense "
             "(0.31 0.31:3 0.62 0.62:3 0:3)",
    )  # fmt: skip
    add("--block-size", type=int, default=128)
    options = parser.parse_args(words)
    options.kinds = [options.text_kind]
    return options


def main(words: list[str] | None = None) -> None:
    options = options_from(words)
    try:
        found = operands_of(options)
    except ConfigError as error:
        sys.exit(f"real_operands.py: {error}")
    if options.keep is not None:
        named = f"{options.model.stem} {options.text_kind} layer"
        torch.save({f"{named} {number}": each for number, each in found.items()}, options.keep)
        return
    common = dict(
        model=options.model.name, text=options.text_kind, data=texts.fingerprint(options), seq=options.seq,
        versions=dict(cudnn=torch.backends.cudnn.version(), fa4=record.installed("flash-attn-4")),
    )  # fmt: skip
    for number, operands in found.items():
        query, key = operands[:2]
        shape = Shape(query.shape[2], key.shape[2], query.shape[3])
        device = torch.device(options.device)
        layer = Layer(options.seq, shape, device, options.block_size, operands)
        dense = layer.dense_times()
        fa4, rows = layer.fa4_times(), []
        for setting in options.settings:
            kernels = dict(policy="dense", kernels=switch("MTRAINING_DENSE") or "own")
            named = kernels if setting is DENSE else setting
            row = dict(common, layer=number, shape=list(shape), **named)
            rows.append(row | layer.times(setting) | dense | fa4)
            ours = sum(rows[-1][f"{part}_ms"] for part in ("search", "forward", "backward"))
            share = ours / (dense["dense_forward_ms"] + dense["dense_backward_ms"])
            print(f"layer {number}, {named}: {share:.3f} of cuDNN dense", flush=True)
        record.append(options.output, rows)


if __name__ == "__main__":
    main()
