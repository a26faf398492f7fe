# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A plan as plain values, and as a table."""

from __future__ import annotations

from ...config import ConfigError
from ...megatron.document_options import asked_option
from ..report.table import table
from .assumptions import GIB
from .gpu_options import gpus_of_a_host
from .memory import Stage, needed, plan
from .options import flags_of_megatron, option
from .rates import gpu_of
from .setting import Setting
from .step_time import PARTS, Hosts, plain_times, step_time

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "kept activations": "activations saved for the backward",
    "carried attention": "attention saved for recomputation, patterns",
    "batch, rotary": "batch, rotary table",
    "pipeline buffers": "between pipeline stages",
}


def report_of(setting: Setting, options, passed_over: list[str]) -> dict:
    """The plan as plain values; bytes are whole numbers."""
    known, ignored = flags_of_megatron(), set(passed_over)
    unknown = {flag for flag in ignored if known and flag not in known}
    stages = plan(setting)
    memory = needed(stages, options.overhead_gib, options.slack)
    limit = options.gpu_memory_gib
    return dict(
        seq_length=setting.args.seq_length,
        world_size=setting.world,
        tensor_parallel=setting.tp,
        pipeline_parallel=setting.pp,
        context_parallel=setting.cp,
        data_parallel=setting.dp,
        attention_backend=setting.args.attention_backend,
        found_with=_found_with(setting.args) if options.find == "context-parallel-size" else None,
        stages=[_stage(stage) for stage in stages],
        allocated=max(stage.allocated for stage in stages),
        overhead_gib=options.overhead_gib,
        slack=options.slack,
        needed=memory,
        gpu_memory_gib=limit,
        fits=None if limit is None else memory <= limit * GIB,
        step=_step(setting, options, ignored) if options.gpu else None,
        passed_over=sorted(ignored - unknown),
        unknown=sorted(unknown),
    )


def _step(setting: Setting, options, passed_over: set[str]) -> dict:
    """Seconds of a step and of its parts, predicted.

    Raises:
        ConfigError: queries see fewer keys than are counted.
    """
    args = setting.args
    fewer = [*(passed_over & {"--window-size"}), *filter(None, [asked_option(args)])]
    if fewer:
        raise ConfigError(
            f"--gpu predicts no step with {fewer[0]}: give --gpu-memory-gib in its place"
        )
    gpu = gpu_of(options.gpu)
    nodes = options.nodes
    if nodes is None and args.host_gpus:  # of as many GPUs as are planned, whatever torchrun starts
        nodes = -(-setting.world // args.host_gpus)
    hosts = Hosts(gpus_of_a_host(setting.world, nodes), options.link)
    density = options.density
    if setting.mtraining and setting.mtraining.keeps_all(args.seq_length):
        density = 1.0
    return dict(
        gpu=options.gpu, measured_gpu=gpu.measured, density=density if setting.mtraining else None,
        **plain_times(setting, step_time(setting, gpu, hosts, density)),
    )  # fmt: skip


def _found_with(args) -> str:
    """The flags that a search for a context-parallel size has set."""
    groups, gathered = "--hierarchical-context-parallel-sizes", "mtraining_gathered_ranks"
    sizes = args.hierarchical_context_parallel_sizes
    words = [f"--context-parallel-size {args.context_parallel_size}"]
    words.append(f"{groups} {' '.join(map(str, sizes))}" if sizes else f"no {groups}")
    if getattr(args, gathered, None):
        words.append(f"{option(gathered)} {getattr(args, gathered)}")
    return ", ".join(words)


def _stage(stage: Stage) -> dict:
    return dict(
        stage=stage.stage,
        parameters=stage.parameters,
        held=stage.parts,
        backward_of_a_layer=stage.layer,
        output_layer_and_loss=stage.loss,
        allocated=stage.allocated,
    )


def as_text(report: dict) -> str:
    """The table, and the assumptions behind it."""
    stages = report["stages"]
    header = ["GiB a GPU", *(f"stage {stage['stage']}" for stage in stages)]
    if len(stages) == 1:
        header[1] = ""

    def line(name: str, values) -> list[str]:
        return [name, *(f"{value / GIB:.2f}" for value in values)]

    rows = [
        line(NAMES[name], (stage["held"][name] for stage in stages)) for name in stages[0]["held"]
    ]
    rows.append(line("backward of a layer (a)", (stage["backward_of_a_layer"] for stage in stages)))
    rows.append(
        line("output layer and loss (b)", (stage["output_layer_and_loss"] for stage in stages))
    )
    rows.append(line("peak, with the larger of a and b", (stage["allocated"] for stage in stages)))
    gpus = "1 GPU" if report["world_size"] == 1 else f"{report['world_size']} GPUs"
    sizes = (
        f"{report['seq_length']} tokens on {gpus}: tensor {report['tensor_parallel']} x pipeline "
        f"{report['pipeline_parallel']} x context {report['context_parallel']} x data "
        f"{report['data_parallel']}, --attention-backend {report['attention_backend']}"
    )
    lines = [sizes]
    if report["found_with"]:
        lines.append(f"Found with {report['found_with']}")
    lines += [
        "",
        table(header, rows),
        "",
        f"A GPU needs {report['needed'] / GIB:.1f} GiB, including {report['slack']:.0%} allocator reserve "
        f"and {report['overhead_gib']:g} GiB for CUDA and NCCL (assumed)",
    ]
    if report["fits"] is not None:
        words = "fits" if report["fits"] else "does not fit"
        lines.append(f"It {words} a GPU of {report['gpu_memory_gib']:g} GiB")
    if report["step"]:
        lines.append(_step_text(report["step"]))
    if report["passed_over"]:
        lines.append(f"Assumed not to change memory: {' '.join(report['passed_over'])}")
    if report["unknown"]:
        lines.append(f"Not flags of this Megatron-LM: {' '.join(report['unknown'])}")
    return "\n".join(lines)


def _step_text(step: dict) -> str:
    parts = ", ".join(f"{part} {step[f'{part}_s']:.2f}" for part in PARTS)
    pairs = f" with {100 * step['density']:.3g}% of the pairs" if step["density"] else ""
    scaled = "" if step["measured_gpu"] else "; no step was measured on this GPU, rates are scaled"
    return (
        f"A step{pairs} takes about {step['step_s']:.2f} s on {step['gpu']} ({parts}), "
        f"{step['tokens_per_s_gpu']:.0f} tokens/s/GPU{scaled}"
    )
