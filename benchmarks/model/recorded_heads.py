# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Record the patterns of a trained model's heads, which ``mtraining quickstart`` draws beside its own.

    python -m benchmarks.model.recorded_heads MODEL.gguf --text FILE

The small model of the quickstart is trained for a minute: its attention is nearly even, and its heads look
alike. Policy price selects the patterns of the trained model. Eight heads are recorded: the four sparse
heads with the most slashes, and four at equal steps of density among the other heads. Runs on a CPU or a
GPU; writes ``megatron_mtraining/tools/quickstart/trained_heads.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.lib.record import ROOT, provenance
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.cp_group import CPGroup
from megatron_mtraining.models.open import open_model
from megatron_mtraining.models.text import tokens_for
from megatron_mtraining.models.types import LayerInput, ModelOptions
from megatron_mtraining.pattern import search_pattern
from megatron_mtraining.tools.inspect.measure import for_search

OUTPUT = ROOT / "megatron_mtraining/tools/quickstart/trained_heads.json"
HEADS = 4
"""Of each of the two kinds."""
SPARSE = 0.5
"""Largest density of a head of the first kind."""


def chosen_of(heads: list[dict]) -> list[dict]:
    """The recorded heads, by layer and head."""
    by_slashes = sorted(heads, key=lambda each: -len(each["slashes"]))
    most = [each for each in by_slashes if each["density"] <= SPARSE][:HEADS]
    rest = sorted((each for each in heads if each not in most), key=lambda each: each["density"])
    steps = [rest[round(step * (len(rest) - 1) / (HEADS - 1))] for step in range(HEADS)]
    return sorted(most + steps, key=lambda each: (each["layer"], each["head"]))


def heads_of(given: LayerInput, config: MTrainingConfig) -> list[dict]:
    """The patterns of a layer's heads: selected slashes and columns, density, recall on held-out rows."""
    given = for_search(given)
    index = search_pattern(given.query, given.key, config, CPGroup(None), given.softmax_scale)
    density, recall, slashes = index.density()[0], index.recall[0], index.distances()[0]
    length = len(given.query)
    return [
        {
            "layer": given.layer,
            "head": head,
            "density": round(density[head].item(), 4),
            "recall": round(recall[head].item(), 4),
            "slashes": slashes[head].nonzero()[:, 0].tolist(),
            "columns": [each for each in index.columns[0, head].tolist() if each < length],
        }
        for head in range(len(density))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--price", type=float, default=0.5)
    parser.add_argument("--block-size", type=int, default=64)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = MTrainingConfig.from_options(
        price=args.price, block_size=args.block_size, window=args.block_size
    )
    source = open_model(ModelOptions(args.model, device, torch.float32))
    shape = source.shape
    tokens = tokens_for(
        args.text, args.tokens, shape.positions, args.block_size, source.tokenizer, "a longer model"
    )
    found: list[dict] = []
    with source.loaded(False) as run_model, torch.no_grad():
        run_model(tokens, lambda given: found.extend(heads_of(given, config)))
    record = {
        "model": args.model.stem,
        "text": [path.name for path in args.text],
        "tokens": args.tokens,
        "block_size": args.block_size,
        "price": args.price,
        "heads_in_all": len(found),
        "density": round(sum(each["density"] for each in found) / len(found), 4),
        "recall": round(sum(each["recall"] for each in found) / len(found), 4),
        **provenance(),
        "heads": chosen_of(found),
    }
    OUTPUT.write_text(json.dumps(record) + "\n", encoding="utf-8")
    for each in record["heads"]:
        print({**each, "slashes": len(each["slashes"]), "columns": len(each["columns"])})
    print({name: value for name, value in record.items() if name != "heads"})


if __name__ == "__main__":
    main()
