# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan layouts``: which layout, whether it fits, and how fast it is, before a run."""

from __future__ import annotations

import argparse
import json

from ...config import ConfigError
from ..common.sizes import tokens_of
from ..common.streams import Parser
from ..report.table import table
from .gpu_options import add_gpu, check_gpu, gpus_of_a_host
from .layouts import DENSE, Asked, Layout, default_batch, fewest_gpus, fitting, layouts, why_refused
from .rates import gpu_of
from .shapes import SHAPES, shape_of
from .step_time import PARTS, Hosts, plain_times

MOST_GPUS = 2**16


def options_of_layouts() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mtraining plan layouts", allow_abbrev=False,
        description="Rank the layouts of a model over GPUs by the predicted seconds of a step.",
    )  # fmt: skip
    add = parser.add_argument
    add("--hf", required=True, metavar="MODEL",
        help=f"a Hugging Face folder, or one of {', '.join(SHAPES)}")  # fmt: skip
    add("--seq", type=tokens_of, required=True, help="tokens of a sequence, such as 256K")
    add("--gpus", type=int, required=True)
    add_gpu(parser, required=True)
    add(
        "--batch",
        type=int,
        help="sequences of a step (default: a power of 2, of 4M tokens or more)",
    )
    add("--top", type=int, default=5, help="layouts to show (%(default)s)")
    add("--json", action="store_true", help="print JSON")
    return parser


def asked_of(options: argparse.Namespace) -> Asked:
    """
    Raises:
        ConfigError: an unknown model or GPU; a number that cannot be.
    """
    for name in ("gpus", "nodes", "batch", "top"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST_GPUS:
            raise ConfigError(f"--{name} is {value}: use 1 to {MOST_GPUS}")
    check_gpu(options)
    return Asked(
        shape_of(options.hf), options.seq, options.gpus, gpu_of(options.gpu),
        Hosts(gpus_of_a_host(options.gpus, options.nodes), options.link),
        options.batch or default_batch(options.seq), options.density,
    )  # fmt: skip


def plain(layout: Layout) -> dict:
    """A layout as plain values; seconds, GiB."""
    setting = layout.setting
    return dict(
        tensor=setting.tp, pipeline=setting.pp, context=setting.cp, data=setting.dp,
        groups=[setting.inner, setting.outer] if setting.mtraining else None,
        recompute=layout.recompute, **plain_times(setting, layout.time),
        need_gib=round(layout.need, 1), flags=" ".join(layout.words),
    )  # fmt: skip


def run(words: list[str]) -> int:
    options = options_of_layouts().parse_args(words)
    asked = asked_of(options)
    found = fitting(asked)
    if not found:
        raise ConfigError(_why_none(asked, options))
    dense = next(filter(None, (fitting(asked, backend) for backend in DENSE)), [])[:1]
    shown = [plain(each) for each in found[: options.top]]
    report = dict(
        model=options.hf, seq_length=asked.seq, gpus=asked.gpus, gpu=options.gpu,
        gpus_of_a_host=asked.hosts.gpus, batch=asked.batch, density=asked.density,
        measured_gpu=asked.gpu.measured, layouts=shown, dense=[plain(each) for each in dense],
    )  # fmt: skip
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _why_none(asked: Asked, options) -> str:
    every = layouts(asked)
    where = f"{options.hf} at {asked.seq} tokens on {asked.gpus} x {options.gpu}"
    if not every:
        if refused := why_refused(asked):
            return f"{where}: {refused}"
        return (
            f"{where}: no layout divides --seq {asked.seq}, the GPUs, --batch {asked.batch}, heads and "
            "layers: give another --seq, --batch or --gpus"
        )
    least = min(every, key=lambda each: each.need)
    more = fewest_gpus(asked)
    said = f"{more} GPUs would do" if more else "nor does it on 64 times as many"
    return (
        f"{where} does not fit: the smallest layout needs {least.need:.1f} GiB a GPU, "
        f"{least.need - asked.gpu.memory_gib:.1f} more than there are; {said}"
    )


def as_text(report: dict) -> str:
    """The table, dense attention beside it, and flags of the first layout."""
    header = ["TP x PP x CP x DP", "recomputed", "s / step", *PARTS, "tokens/s/GPU", "GiB"]

    def line(name: str, each: dict) -> list[str]:
        sizes = " x ".join(str(each[key]) for key in ("tensor", "pipeline", "context", "data"))
        if each["groups"] and each["groups"][1] > 1:
            sizes += f" ({each['groups'][0]} x {each['groups'][1]})"
        times = [each["step_s"], *(each[f"{part}_s"] for part in PARTS)]
        return [
            name + sizes, each["recompute"], *(f"{time:.2f}" for time in times),
            f"{each['tokens_per_s_gpu']:.0f}", f"{each['need_gib']:.1f}",
        ]  # fmt: skip

    first = report["layouts"][0]
    lines = [
        f"{report['model']}, {report['seq_length']} tokens, {report['gpus']} x {report['gpu']} "
        f"({report['gpus_of_a_host']} a host), {report['batch']} sequences a step, {report['density']:.0%} "
        "of the pairs",
        "",
        table(
            header,
            [line("", each) for each in report["layouts"]]
            + [line("dense: ", each) for each in report["dense"]],
        ),
        "",
    ]
    if report["dense"]:
        lines.append(
            f"{report['dense'][0]['step_s'] / first['step_s']:.1f} times dense attention's speed"
        )
    else:
        lines.append("Dense attention does not fit")
    if not report["measured_gpu"]:
        lines.append("No step was measured on this GPU: rates are scaled from an H200's")
    return "\n".join([*lines, f"Flags: {first['flags']}"])
