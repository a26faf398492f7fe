# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Layouts of a model over GPUs, ranked by the seconds of a step (``mtraining plan layouts``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...config import ConfigError
from ..convert.families import Model
from ..convert.megatron_args import flags, namespace
from .assumptions import GIB
from .memory import needed, plan
from .options import changed, read
from .rates import Gpu
from .setting import Setting, setting_of
from .step_time import Hosts, StepTime, step_time

BLOCK = 128
MOST_TENSOR, MOST_PIPELINE = 8, 16
STEP_TOKENS = 4 * 2**20
"""Tokens of a step, if the batch is not given: as many sequences as make at least so many."""
OURS = ("--attention-backend", "mtraining")
DENSE = ("--attention-backend", "fused"), (*OURS, "--mtraining-price", "0")
"""Dense attention: Transformer Engine's with Megatron's own loss; this package's, with the loss in chunks."""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
RECOMPUTATION = {
    "layers, attention kept": FULL,
    "layers and attention": [*FULL, "--mtraining-recompute-attention"],
    "none": [],
}
OF_OTHERS = {"layers and attention": FULL, "none": []}
COMMON = (
    "--bf16 --use-distributed-optimizer --no-gradient-accumulation-fusion "
    "--no-create-attention-mask-in-dataloader --micro-batch-size 1"
).split()


class Asked(NamedTuple):
    """What layouts are for.

    Attributes:
        batch: sequences of a step.
        density: of the selected pattern.
    """

    model: Model
    seq: int
    gpus: int
    gpu: Gpu
    hosts: Hosts
    batch: int
    density: float


class Layout(NamedTuple):
    """A way to train, with the flags that it needs.

    Attributes:
        need: GiB of a GPU.
    """

    setting: Setting
    recompute: str
    words: list[str]
    time: StepTime
    need: float


def words_of(model: Model, seq: int) -> list[str]:
    """Megatron's flags for a model with positions for a length."""
    positions = dict(
        position_embedding_type="rope", rotary_base=1_000_000, max_position_embeddings=seq,
        use_rope_scaling=False,
    )  # fmt: skip
    return [word for line in flags(namespace(model, positions)) for word in line]


def parallel_sizes(asked: Asked) -> Iterator[tuple[int, int, int]]:
    """Tensor, pipeline and context parallelism that divide the GPUs, heads and layers."""

    def powers(most: int) -> list[int]:
        return [2**i for i in range(most.bit_length())]

    model, gpus = asked.model, asked.gpus
    for tp in powers(min(MOST_TENSOR, asked.hosts.gpus, gpus)):
        if model.heads % tp or (model.groups % tp and tp % model.groups):
            continue
        for pp in powers(min(MOST_PIPELINE, gpus // tp)):
            if model.layers % pp:
                continue
            for cp in powers(gpus // tp // pp):
                if gpus % (tp * pp * cp) or asked.seq % (2 * BLOCK * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                if asked.batch % dp == 0:
                    yield tp, pp, cp


def layouts(asked: Asked, backend: tuple[str, ...] = OURS) -> list[Layout]:
    """All of them, also those that do not fit; fastest first."""
    found = [each for each in _tried(asked, backend) if isinstance(each, Layout)]
    return sorted(found, key=lambda each: each.time.total)


def why_refused(asked: Asked) -> ConfigError | None:
    """What the first layout fails by, of those that divide GPUs and model."""
    tried = _tried(asked, OURS)
    return next((each for each in tried if isinstance(each, ConfigError)), None)


def _tried(asked: Asked, backend: tuple[str, ...]) -> Iterator[Layout | ConfigError]:
    model = [*words_of(asked.model, asked.seq), "--seq-length", str(asked.seq), *COMMON, *backend]
    ways = RECOMPUTATION if "mtraining" in backend else OF_OTHERS
    for recompute, words in ways.items():
        # Importing Megatron would take longer than all else, and changes no flag that is here.
        args, _ = read([*model, *words, "--vocab-size", str(asked.model.vocab)], installed=False)
        for tp, pp, cp in parallel_sizes(asked):
            try:
                yield _layout(asked, args, recompute, [*backend, *words], tp, pp, cp)
            except ConfigError as error:  # of sizes that Megatron does not take together
                yield error


def _layout(
    asked: Asked, args, recompute: str, words: list[str], tp: int, pp: int, cp: int
) -> Layout:
    own = asked.hosts.gpus // tp  # context-parallel ranks of a host
    ours = args.attention_backend == "mtraining"
    sizes = [own, cp // own] if 1 < own < cp and ours else None
    if sizes and cp % own:
        raise ConfigError("groups would cross hosts")
    alone = ours and own == 1 < cp
    setting = setting_of(
        changed(
            args, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
            context_parallel_size=cp, sequence_parallel=tp > 1, global_batch_size=asked.batch,
            hierarchical_context_parallel_sizes=sizes,
            **({"mtraining_gathered_ranks": 1} if alone else {}),
        ),
        asked.gpus,
    )  # fmt: skip
    time = step_time(setting, asked.gpu, asked.hosts, asked.density)
    need = needed(plan(setting)) / GIB
    chosen = {
        "tensor-model-parallel-size": tp, "pipeline-model-parallel-size": pp, "context-parallel-size": cp,
    }  # fmt: skip
    given = [f"--{name} {value}" for name, value in chosen.items() if value > 1]
    if tp > 1:
        given.append("--sequence-parallel")
    if sizes:
        given.append(f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]}")
    if alone:
        given.append("--mtraining-gathered-ranks 1")
    given += [f"--global-batch-size {asked.batch}", *COMMON, *words]
    return Layout(setting, recompute, given, time, need)


def fitting(asked: Asked, backend: tuple[str, ...] = OURS) -> list[Layout]:
    return [each for each in layouts(asked, backend) if each.need <= asked.gpu.memory_gib]


def fewest_gpus(asked: Asked) -> int | None:
    """GPUs at which a layout fits, of twice, four times, ... as many; None if none was found."""
    for factor in (2, 4, 8, 16, 32, 64):
        more = asked._replace(gpus=asked.gpus * factor, batch=asked.batch * factor)
        if fitting(more):
            return more.gpus
    return None


def default_batch(seq: int) -> int:
    """A power of two, so that many layouts divide it."""
    return 2 ** (-(-STEP_TOKENS // seq) - 1).bit_length()
