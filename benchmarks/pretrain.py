# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A real pretraining run of Qwen2.5-3B's shape, dense or sparse, and a row on it.

    python benchmarks/pretrain.py data FOLDER                  # Python's sources, tokenised
    python benchmarks/pretrain.py run MEGATRON_LM --attention fused --data FOLDER/text
    python benchmarks/pretrain.py run MEGATRON_LM --attention mtraining --data FOLDER/text

Runs ``examples/pretrain_qwen2.5_3b.sh``, reads Megatron's log, and appends a row to
``results/pretrain.jsonl``. Figures are of iterations from the fifth on: earlier ones compile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import record

ROOT = Path(__file__).parent.parent
WARM_UP = 4
ITERATION = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([-+\d.Ena]+)"
)
DENSITY = re.compile(r"\[mtraining\] iteration (\d+) \| density ([\d.]+)")
RECALL = re.compile(r"\[mtraining\] iteration \d+ \|.* recall ([\d.]+)")
MEMORY = re.compile(r"max allocated: ([\d.]+)")


def make_data(folder: Path, tokens: int) -> None:
    """Write an indexed dataset of at least ``tokens`` tokens of Python sources: one document a file."""
    import numpy
    import sentencepiece
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron_mtraining.quickstart import text

    folder.mkdir(parents=True, exist_ok=True)
    files = text.source_files()
    model = text.train_tokenizer(files, 8000, folder / "tokenizer")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=numpy.uint16)
    total = 0
    for path in files:
        ids = processor.encode(text.read(path))
        if not ids:
            continue
        builder.add_document(torch.tensor(ids), [len(ids)])
        total += len(ids)
        if total >= tokens:
            break
    builder.finalize(str(folder / "text.idx"))
    print(f"{total} tokens in {folder / 'text.bin'}")
    if total < tokens:
        sys.exit(f"only {total} tokens of Python sources here, but {tokens} were asked for")


def read_log(log: str) -> dict:
    """What a Megatron log says: times (ms) and losses by iteration, density, peak memory (MB)."""
    return dict(
        ms={int(i): float(ms) for i, ms, _ in ITERATION.findall(log)},
        loss={int(i): float(loss) for i, _, loss in ITERATION.findall(log)},
        density=[float(d) for _, d in DENSITY.findall(log)],
        recall=[float(r) for r in RECALL.findall(log)],
        memory=[float(m) for m in MEMORY.findall(log)],
    )


def run(options) -> None:
    environment = dict(
        os.environ,
        ATTENTION=options.attention,
        GPUS=str(options.gpus),
        SEQ_LENGTH=str(options.seq_length),
        ITERATIONS=str(options.iterations),
        PRICE=str(options.price),
    )
    for name in ("vertical", "slash"):  # fixed budgets in place of a price
        if getattr(options, name) is not None:
            environment[name.upper()] = str(getattr(options, name))
    if options.data:
        # Megatron writes indices beside the data: not where it may be read-only.
        environment["DATA_PATH"] = str(options.data.resolve())
    script = [str(ROOT / "examples" / "pretrain_qwen2.5_3b.sh"), str(options.megatron)]
    extra = ["--log-memory-interval", "1"] if options.memory_interval else []
    with tempfile.TemporaryDirectory() as cache:
        if options.data:
            extra += ["--data-cache-path", cache]
        process = subprocess.Popen(
            [*script, *extra, *options.more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        with (
            open(options.log, "w", encoding="utf-8")
            if options.log
            else open(os.devnull, "w") as log
        ):
            for line in process.stdout:
                lines.append(line)
                log.write(line)
                log.flush()
                if "iteration" in line or "rror" in line:
                    print(line.rstrip()[:220], flush=True)
        code = process.wait()
    found = read_log("".join(lines))
    if code or not found["ms"]:
        sys.exit("".join(lines[-60:]) + f"\nthe run ended with code {code}")
    steady = [ms for i, ms in found["ms"].items() if i > WARM_UP] or list(found["ms"].values())
    ms = statistics.median(steady)
    last = max(found["loss"])
    ours = options.attention == "mtraining"
    fixed = options.vertical is not None or options.slash is not None
    row = dict(
        model=options.model,
        seq=options.seq_length,
        world=options.gpus,
        attention=options.attention,
        iter_ms=round(ms, 1),
        tokens_per_s=round(options.seq_length / ms * 1000),
        max_alloc_gb=round(max(found["memory"], default=float("nan")) / 1024, 2),
        loss=found["loss"][last],
        losses=list(found["loss"].values()),
        density=round(statistics.mean(found["density"]), 4) if found["density"] else 1.0,
        recall=round(statistics.mean(found["recall"]), 4) if found["recall"] else None,
        price=options.price if ours and not fixed else None,
        vertical=options.vertical if ours else None,
        slash=options.slash if ours else None,
        iterations=last,
        versions={
            "megatron": megatron_version(options.megatron),
            "transformer_engine": record.installed("transformer-engine"),
        },
    )
    record.append(options.output, [row])
    print(json.dumps(row))


def megatron_version(checkout: Path) -> str:
    text = (checkout / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("folder", type=Path)
    data.add_argument("--tokens", type=int, default=4_200_000)
    runs = commands.add_parser("run")
    runs.add_argument("megatron", type=Path)
    runs.add_argument("--attention", choices=["fused", "mtraining"], required=True)
    runs.add_argument("--data", type=Path, help="path prefix of an indexed dataset")
    runs.add_argument("--model", default="qwen2.5-3b")
    runs.add_argument("--gpus", type=int, default=4)
    runs.add_argument("--seq-length", type=int, default=131072)
    runs.add_argument("--iterations", type=int, default=30)
    runs.add_argument("--price", type=float, default=0.25)
    runs.add_argument("--vertical", type=int, help="fixed columns, in place of a price")
    runs.add_argument("--slash", type=int, help="fixed diagonals, in place of a price")
    runs.add_argument("--memory-interval", action="store_true", help="log memory each iteration")
    runs.add_argument("--log", type=Path, help="keep Megatron's log here")
    runs.add_argument("--output", type=Path, default=record.RESULTS / "pretrain.jsonl")
    # What this does not know goes to Megatron.
    options, options.more = parser.parse_known_args()
    if options.command == "data":
        make_data(options.folder, options.tokens)
    else:
        run(options)


if __name__ == "__main__":
    main()
