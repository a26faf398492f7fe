# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A real pretraining run of Qwen2.5-3B's shape, dense or sparse, and a row on it.

    python -m benchmarks.model.pretrain data FOLDER                  # Python's sources, tokenised
    python -m benchmarks.model.pretrain run MEGATRON_LM --attention fused --data FOLDER/text
    python -m benchmarks.model.pretrain run MEGATRON_LM --attention mtraining --data FOLDER/text

Runs ``examples/pretrain_qwen2.5_3b.sh``, or another recipe (``--script``), reads Megatron's log, and appends
a row to ``results/pretrain.jsonl``. Figures are of iterations after the first four (``--warm-up``), which
compile.
Under full recomputation the forward of Transformer Engine's attention runs twice, the plug-in's once.
``--dense-recompute kept`` makes that equal; rows say which it was. ``--attention mtraining --price 0`` is
dense attention through the plug-in.

With ``--breakdown`` the last iterations run under a profiler; the row says what their time went to
(``breakdown.py``), in milliseconds as measured: they sum to ``profiled_ms``, not to ``iter_ms``, which is of
the iterations before.
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

from megatron_mtraining.tools.run_report.sources import step_times

from ..lib import record

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_qwen2.5_3b.sh"
DEFAULT_CHUNK = 4096  # of the plug-in, without --mtraining-loss-chunk
WARM_UP = 4
DENSE_RECOMPUTE = {"twice": "twice", "kept": "output kept"}
"""What a dense step recomputes: whole layers, as full recomputation does, or all but attention's forward
(:func:`~.instrument.kept`)."""
STARTS = "starts"
"""File with the seconds at which each step begins."""
ITERATION = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([-+\d.Ena]+)"
)
DENSITY = re.compile(r"\[mtraining\] iteration (\d+) \| density ([\d.]+)")
RECALL = re.compile(r"\[mtraining\] iteration \d+ \| density [^|]*\| recall ([\d.]+)")
PRUNED = re.compile(r"\| backward density ([\d.]+) without ([\d.]+) of attention")
MEMORY = re.compile(r"max allocated: ([\d.]+)")
BATCH = re.compile(r"global batch size: +(\d+)")


def make_data(folder: Path, tokens: int) -> None:
    """Write an indexed dataset of at least ``tokens`` tokens of Python sources: one document a file."""
    import numpy
    import sentencepiece
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron_mtraining.tools.quickstart import text

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
        ms={
            i: round(ms, 1)
            for i, ms in step_times(
                {int(i): float(ms) for i, ms, _ in ITERATION.findall(log)}
            ).items()
        },
        loss={int(i): float(loss) for i, _, loss in ITERATION.findall(log)},
        density=[float(d) for _, d in DENSITY.findall(log)],
        recall=[float(r) for r in RECALL.findall(log)],
        memory=[float(m) for m in MEMORY.findall(log)],
    )


def argument(log: str, name: str) -> int | None:
    """A whole number among the arguments that Megatron prints; None if it is unset or not there."""
    found = re.search(rf"^ *{name} \.+ (\d+)$", log, re.MULTILINE)
    return int(found[1]) if found else None


def pruned_backward(log: str) -> dict:
    """What a pruned backward kept and left out, means over iterations; empty if none was pruned."""
    threshold = re.search(r"^ *mtraining_backward_threshold \.+ ([\d.]+)$", log, re.MULTILINE)
    found = [tuple(map(float, both)) for both in PRUNED.findall(log)]
    if not threshold or not found:
        return {}
    density, dropped = (round(statistics.mean(each), 4) for each in zip(*found))
    return dict(
        backward_threshold=float(threshold[1]), backward_density=density, dropped_mass=dropped
    )


def command(options, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The script with its arguments, and what it finds in its environment.

    Args:
        folder: an empty one, for as long as the run takes.
    """
    ours, recipe = options.attention == "mtraining", options.script is not None
    environment = dict(ATTENTION=options.attention, ITERATIONS=str(options.iterations), NODES="1")
    for name in ("vertical", "slash", "gpus"):  # fixed budgets in place of a price
        if getattr(options, name) is not None:
            environment[name.upper()] = str(getattr(options, name))
    words, drop, changes = [], [], {}
    if options.target_recall is not None:
        environment["RECALL"] = str(options.target_recall)
    elif options.schedule is not None:
        words += ["--mtraining-schedule", options.schedule]
    elif options.vertical is options.slash is None:
        environment["PRICE"] = str(options.price)
    if options.weights:
        environment["MODEL"] = str(options.weights.resolve())
    if options.save:
        environment["CHECKPOINT"] = str(options.save.resolve())
        environment["SAVE_INTERVAL"] = str(options.iterations)
    if options.data:
        # Megatron writes indices beside the data: not where it may be read-only.
        words += ["--data-cache-path", str(folder / "cache")]
    if recipe:
        if not ours:
            words += ["--attention-backend", options.attention]
            drop.append("--mtraining-")
        if options.seq_length:
            length = str(options.seq_length)
            words += ["--seq-length", length, "--max-position-embeddings", length]
            environment["SEQ_LENGTH"] = length  # a recipe's YaRN is for it
        if options.data:  # tokens as they are: a recipe would have a tokenizer of Hugging Face's
            drop.append("--mock-data")
            paths = [str(path.resolve()) for path in options.data]
            words += ["--data-path", *paths, "--split", "100,0,0"]
    else:
        environment["SEQ_LENGTH"] = str(options.seq_length or 131072)
        if options.data:
            environment["DATA_PATH"] = str(options.data[0].resolve())
    if options.memory_interval:
        words += ["--log-memory-interval", "1"]
    if ours and options.loss_chunk is not None:
        words += ["--mtraining-loss-chunk", str(options.loss_chunk)]
    elif options.loss_chunk:
        changes["loss_chunk"] = options.loss_chunk
    if options.dense_recompute == "kept":
        changes["keep_output"] = True
    if options.breakdown:
        changes.update(traces=str(traces_of(options, folder)), steps=options.breakdown)
    if options.logged_apart:
        changes["starts"] = str(folder.resolve() / STARTS)
    if drop:
        changes["drop"] = drop
    checkout = options.megatron
    if changes:
        from . import instrument

        checkout = instrument.stand_in(checkout, folder / "Megatron-LM", **changes)
    return [str(options.script or SCRIPT), str(checkout), *words, *options.more], environment


def breakdowns(folder: Path) -> dict:
    """What the ranks have found: rank 0's, and of each part the longest that a rank had; nothing if rank 0
    has found nothing."""
    from . import instrument

    files = folder.glob(instrument.RANK.format("*"))
    ranks = {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in files}
    if 0 not in ranks:
        return {}
    longest = {p: max(r["breakdown"][p] for r in ranks.values()) for p in ranks[0]["breakdown"]}
    return {**ranks[0], "breakdown_longest": longest}


def traces_of(options, folder: Path) -> Path:
    """Where ranks write their traces."""
    return (options.traces or folder / "traces").resolve()


def follow_run(options) -> tuple[str, dict]:
    """Megatron's log of a run, and its breakdown: empty without one."""
    with tempfile.TemporaryDirectory() as folder:
        words, environment = command(options, Path(folder))
        log = follow(words, {**os.environ, **environment}, options.log)
        parts = {}
        if options.breakdown:
            parts = breakdowns(traces_of(options, Path(folder)))
        if options.logged_apart:
            starts = [float(line) for line in (Path(folder) / STARTS).read_text().split()]
            parts |= logged_apart(starts, argument(log, "log_interval"), options.warm_up)
    return log, parts


def logged_apart(starts: list[float], interval: int, warm_up: int) -> dict:
    """The mean time of the steps that are logged, and of those that are not.

    Args:
        starts: the seconds at which each step begins, with what its log takes before the next; the last
            step, which has no next, and those of ``warm_up`` are left out.
        interval: steps of which one is logged.
    """
    steps = [1000 * (end - start) for start, end in zip(starts, starts[1:])]
    logged, others = [], []
    for number, ms in enumerate(steps[warm_up:], warm_up + 1):
        (others if number % interval else logged).append(ms)
    return dict(
        logged_ms=round(statistics.mean(logged), 3), unlogged_ms=round(statistics.mean(others), 3)
    )


def run(options) -> None:
    log, parts = follow_run(options)
    row = {**row_of(options, log), **parts}
    record.append(options.output, [row])
    print(json.dumps(row))
    if options.breakdown and not parts:
        sys.exit("the row has no breakdown, as rank 0's trace could not be read: see --log")


def follow(words: list[str], environment: dict, log: Path | None) -> str:
    """Run it and return what it printed; iterations and errors are shown, all goes to ``log``."""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    with open(log or os.devnull, "w", encoding="utf-8") as file:
        for line in process.stdout:
            lines.append(line)
            file.write(line)
            file.flush()
            if "iteration" in line or "rror" in line:
                print(line.rstrip()[:220], flush=True)
    code = process.wait()
    if code or not ITERATION.search("".join(lines)):
        sys.exit("".join(lines[-60:]) + f"\nthe run ended with code {code}")
    return "".join(lines)


def row_of(options, log: str) -> dict:
    found = read_log(log)
    last = max(found["loss"])
    # The step before those traced has the profiler already.
    plain = last - (options.breakdown + 1 if options.breakdown else 0)
    steady = [ms for i, ms in found["ms"].items() if options.warm_up < i <= plain]
    ms = statistics.median(steady or found["ms"].values())
    ours = options.attention == "mtraining"
    others = options.vertical, options.slash, options.target_recall, options.schedule
    by_price = ours and all(each is None for each in others)
    seq = argument(log, "seq_length") or options.seq_length
    batch = BATCH.search(log)
    batch = int(batch[1]) if batch else 1
    return dict(
        model=options.model or model_of(options.script),
        layers=argument(log, "num_layers"),
        seq=seq,
        batch=batch,
        world=argument(log, "world_size") or options.gpus,
        attention=options.attention,
        loss_chunk=loss_chunk(options, log),
        dense_recompute=None if ours else DENSE_RECOMPUTE[options.dense_recompute],
        iter_ms=round(ms, 1),
        step_ms=list(found["ms"].values()),
        tokens_per_s=round(seq * batch / ms * 1000),
        max_alloc_gb=round(max(found["memory"], default=float("nan")) / 1024, 2),
        loss=found["loss"][last],
        losses=list(found["loss"].values()),
        density=round(statistics.mean(found["density"]), 4) if found["density"] else 1.0,
        recall=round(statistics.mean(found["recall"]), 4) if found["recall"] else None,
        price=options.price if by_price else None,
        vertical=options.vertical if ours else None,
        slash=options.slash if ours else None,
        target_recall=options.target_recall,
        schedule=options.schedule,
        slash_cap=argument(log, "mtraining_slash_cap") if by_price else None,
        **pruned_backward(log),
        weights=options.weights.name if options.weights else "random",
        iterations=last,
        warm_up=options.warm_up,
        versions={
            "megatron": megatron_version(options.megatron),
            "transformer_engine": record.installed("transformer-engine"),
        },
    )


def loss_chunk(options, log: str) -> int:
    """Tokens in a chunk of our loss; 0 for Megatron's own."""
    if options.attention != "mtraining":
        return options.loss_chunk or 0
    if "the logits of all tokens are held at once" in log:
        return 0
    chunk = argument(log, "mtraining_loss_chunk")
    return DEFAULT_CHUNK if chunk is None else chunk


def model_of(script: Path | None) -> str:
    """A recipe's folder says model and length: ``qwen2.5-0.5b-128k``."""
    return script.resolve().parent.name.rpartition("-")[0] if script else "qwen2.5-3b"


def check(options, refuse) -> None:
    """Refuse what would fail late, or would be ignored."""
    if not (options.megatron / "pretrain_gpt.py").is_file():
        refuse(f"there is no pretrain_gpt.py in {options.megatron}")
    if options.script and not options.script.is_file():
        refuse(f"there is no script {options.script}")
    if options.weights and not options.script:
        refuse("--weights is given without --script: use it with a recipe of examples/")
    if options.weights and not (options.weights / "megatron_args.sh").is_file():
        refuse(f"there is no megatron_args.sh in {options.weights}: convert a model to that folder")
    selected = options.target_recall is not None or options.schedule is not None
    if (selected or options.save) and not options.script:
        refuse("--target-recall, --schedule and --save are of recipes: give --script")
    if selected and options.attention != "mtraining":
        refuse("--target-recall and --schedule are of --attention mtraining")
    if options.data and len(options.data) > 1 and not options.script:
        refuse("--data has several datasets: use them with --script, a recipe")
    if options.loss_chunk is not None and options.loss_chunk < 0:
        refuse(f"--loss-chunk {options.loss_chunk}: use tokens, or 0 for Megatron's own loss")
    if options.dense_recompute != "twice" and options.attention == "mtraining":
        refuse(
            "--dense-recompute is of Transformer Engine's attention: with --attention mtraining, give "
            "--mtraining-recompute-attention or leave both out"
        )
    if options.traces and options.breakdown is None:
        refuse("--traces keeps the traces of --breakdown: give that, too")
    if options.traces and options.traces.exists() and any(options.traces.iterdir()):
        refuse(f"--traces {options.traces} is not empty: ranks of another run may be in it")
    if options.logged_apart and not re.search(
        r"--log-interval[ =]([2-9]|\d\d)", " ".join(options.more)
    ):
        refuse("--logged-apart needs steps that are not logged: give --log-interval 2 or more")
    if options.breakdown is not None:
        if options.breakdown < 1:
            refuse(f"--breakdown {options.breakdown}: use 1 or more iterations")
        fewest = options.warm_up + 2 + options.breakdown
        if options.iterations < fewest:
            refuse(
                f"--iterations {options.iterations} leave none to measure without the profiler: use "
                f"{fewest} or more"
            )


def data(options) -> None:
    make_data(options.folder, options.tokens)


def megatron_version(checkout: Path) -> str:
    text = (checkout / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options that can work; else ends with what is wrong."""
    parser = record.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("data")
    texts.add_argument("folder", type=Path)
    texts.add_argument("--tokens", type=int, default=4_200_000)
    runs = commands.add_parser("run")
    runs.add_argument("megatron", type=Path)
    runs.add_argument("--attention", choices=["fused", "mtraining"], required=True)
    runs.add_argument(
        "--script", type=Path, help="a recipe, such as examples/qwen2.5-3b-512k/run.sh"
    )
    runs.add_argument(
        "--data", type=Path, nargs="+",
        help="path prefix of an indexed dataset; of several with a recipe",
    )  # fmt: skip
    runs.add_argument(
        "--weights", type=Path, metavar="FOLDER",
        help="a checkpoint of mtraining convert hf-to-megatron, for a recipe (default: random weights)",
    )  # fmt: skip
    runs.add_argument("--model", help="the row's name for it (default: the script's)")
    runs.add_argument("--gpus", type=int, help="default: the script's")
    runs.add_argument("--seq-length", type=int, help="default: the script's")
    runs.add_argument("--iterations", type=int, default=30)
    runs.add_argument(
        "--warm-up", type=int, default=WARM_UP, help="iterations to leave out (default: 4)"
    )
    runs.add_argument("--price", type=float, default=0.25)
    runs.add_argument("--vertical", type=int, help="fixed columns, in place of a price")
    runs.add_argument("--slash", type=int, help="fixed diagonals, in place of a price")
    runs.add_argument("--target-recall", type=float, help="of a recipe, in place of a price")
    runs.add_argument("--schedule", help="of prices, of a recipe, in place of a price: anneal")
    runs.add_argument(
        "--save", type=Path, metavar="FOLDER", help="a recipe's checkpoint at the end"
    )
    runs.add_argument(
        "--loss-chunk", type=int,
        help="tokens in a chunk of our loss, with fused attention too; 0 for Megatron's own",
    )  # fmt: skip
    runs.add_argument(
        "--dense-recompute", choices=DENSE_RECOMPUTE, default="twice",
        help="how full recomputation treats Transformer Engine's attention (default: %(default)s)",
    )  # fmt: skip
    runs.add_argument(
        "--breakdown", type=int, nargs="?", const=2, metavar="ITERATIONS",
        help="what the time of the last iterations (2) goes to",
    )  # fmt: skip
    runs.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="keep --breakdown's traces here"
    )
    runs.add_argument(
        "--logged-apart", action="store_true",
        help="time steps that are logged apart from others (Megatron's --log-interval 2 or more)",
    )  # fmt: skip
    runs.add_argument("--memory-interval", action="store_true", help="log memory each iteration")
    runs.add_argument("--log", type=Path, help="keep Megatron's log here")
    runs.add_argument("--output", type=Path, default=record.RESULTS / "pretrain.jsonl")
    # What this does not know goes to Megatron.
    options, options.more = parser.parse_known_args(words)
    if options.command == "run":
        check(options, runs.error)
    return options


def main(words: list[str] | None = None) -> None:
    options = parse(words)
    {"data": data, "run": run}[options.command](options)


if __name__ == "__main__":
    main()
