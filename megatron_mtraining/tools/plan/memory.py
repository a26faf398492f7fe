# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A GPU's memory in each pipeline stage, and the largest setting that fits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ...config import ConfigError
from ...megatron.checks import is_two_sizes
from .activations import Layer, loss_bytes
from .assumptions import GIB, OVERHEAD_GIB, SLACK
from .options import changed
from .setting import LARGEST_NUMBER, Setting, gradient_bytes, optimizer_bytes, setting_of
from .weights import stage_parameters, vocabulary_parameters

SHORTEST = 2048
"""Tokens of the shortest sequence that is tried: a shorter one may lack room for windows and samples. Where
this one does, too, a longer one."""


@dataclass(frozen=True)
class Stage:
    """Bytes of a GPU in one pipeline stage.

    Attributes:
        parts: bytes held at the peak, by name. ``kept activations`` are of all microbatches in
            flight.
        layer, loss: two moments; the larger one is the peak, above what both hold: the
            backward of one layer, and output layer with loss (0 in stages without).
    """

    stage: int
    parameters: int
    parts: dict[str, int]
    layer: int
    loss: int

    @property
    def allocated(self) -> int:
        """The peak of PyTorch's allocated memory (``max allocated`` of Megatron's log)."""
        return sum(self.parts.values()) + max(self.layer, self.loss)


def plan(setting: Setting) -> list[Stage]:
    """What each pipeline stage needs."""
    return [_stage(setting, stage) for stage in range(setting.pp)]


def _stage(setting: Setting, stage: int) -> Stage:
    args, layer = setting.args, Layer(setting)
    parameters = stage_parameters(setting, stage)
    last = stage == setting.pp - 1
    in_flight = min(setting.pp - stage, setting.microbatches)
    # The distributed optimizer splits over data- and context-parallel ranks alike.
    split = 1
    if args.use_distributed_optimizer:
        split = setting.dp * setting.cp // args.num_distributed_optimizer_instances
    kept, carried = _kept(setting, layer)
    parts = {
        "parameters": parameters * setting.element,
        "gradients": parameters * gradient_bytes(args),
        "optimizer": parameters * optimizer_bytes(args) // split,
        "kept activations": in_flight * kept,
    }
    if setting.mtraining:
        parts["carried attention"] = in_flight * carried
    parts["batch, rotary"] = _batch(setting)
    if setting.pp > 1:
        parts["pipeline buffers"] = 2 * layer.input
    return Stage(
        stage,
        parameters,
        parts,
        _one_layer(setting, layer),
        loss_bytes(layer) if last else 0,
    )


def whole_layers(setting: Setting) -> int:
    """Of a stage, that are not recomputed."""
    recomputed = {None: 0, "uniform": setting.layers, "block": setting.recompute_layers}
    return setting.layers - recomputed[setting.recompute]


def _kept(setting: Setting, layer: Layer) -> tuple[int, int]:
    """Of one microbatch in all layers of a stage; and what attention's results add to a recomputed layer."""
    count = setting.layers
    inputs = recomputed = count - whole_layers(setting)
    if setting.recompute == "uniform":
        inputs = -(-count // setting.recompute_layers)
    one = layer.input
    if setting.args.distribute_saved_activations and not setting.args.sequence_parallel:
        one //= setting.tp
    whole = (count - recomputed) * layer.total
    carried = layer.carried * recomputed + layer.index * count
    return inputs * one + whole, carried


def _one_layer(setting: Setting, layer: Layer) -> int:
    """What the backward of a layer holds above all that is kept."""
    replayed = 0
    if setting.recompute:
        at_once = setting.recompute_layers if setting.recompute == "uniform" else 1
        replayed = at_once * (layer.total - layer.carried) - layer.input
        if setting.args.distribute_saved_activations and not setting.args.sequence_parallel:
            replayed += layer.input  # gathered again
        # Layers behind the recomputed ones (of method block) have had their backward before a replay.
        replayed = max(0, replayed - whole_layers(setting) * layer.total)
    held = replayed + layer.working
    if setting.tied and setting.pp == 1:
        # The output layer's part, until the embedding's is there to be added.
        held += vocabulary_parameters(setting) * setting.element
    return held


def _batch(setting: Setting) -> int:
    """Tokens, labels, positions and loss mask, whole and this rank's; a rank's rotary table."""
    args = setting.args
    batch = 28 * (args.seq_length * args.micro_batch_size + setting.tokens)
    if args.position_embedding_type in ("rope", "yarn"):
        batch += args.seq_length // setting.cp * setting.head_dim * 4
    return batch


def needed(stages: list[Stage], overhead_gib: float = OVERHEAD_GIB, slack: float = SLACK) -> int:
    """Bytes that the fullest GPU must have, overhead and the allocator's slack included."""
    return int(max(stage.allocated for stage in stages) * (1 + slack) + overhead_gib * GIB)


def find_seq_length(
    args, fits: Callable[[Setting], bool], world_size: int | None = None
) -> Setting | None:
    """The setting with the longest sequence that fits; None if the shortest does not.

    ``--max-position-embeddings`` grows with it.
    """
    if args.attention_backend == "mtraining":
        multiple = (getattr(args, "mtraining_block_size", None) or 128) * args.context_parallel_size
    else:
        multiple = 2 * args.context_parallel_size
    multiple *= args.tensor_model_parallel_size if args.sequence_parallel else 1

    def attempt(count: int) -> Setting | None:
        length = count * multiple
        positions = max(length, args.max_position_embeddings or 0)
        longer = changed(args, seq_length=length, max_position_embeddings=positions)
        setting = setting_of(longer, world_size)
        return setting if fits(setting) else None

    def attempt_longer(count: int) -> Setting | None:
        try:
            return attempt(count)
        except ConfigError:  # more blocks than an index takes, or too long for packed documents
            return None

    low = _fewest(attempt, max(1, SHORTEST // multiple), multiple)
    setting = attempt(low)
    if setting is None:
        return None
    while (longer := attempt_longer(2 * low)) is not None:
        setting, low = longer, 2 * low
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        between = attempt_longer(middle)
        if between is None:
            high = middle
        else:
            setting, low = between, middle
    return setting


def _fewest(attempt: Callable[[int], Setting | None], start: int, multiple: int) -> int:
    """The smallest count, from ``start`` on, that the settings allow: the sequence must hold the windows,
    budgets and samples that are given."""

    def problem(count: int) -> ConfigError | None:
        try:
            attempt(count)
        except ConfigError as error:
            return error
        return None

    first = last = problem(start)
    low = high = start
    while last is not None:
        low, high = high, 2 * high
        if high * multiple > LARGEST_NUMBER:
            if str(first) == str(last):
                raise first
            raise ConfigError(
                f"no --seq-length of {start * multiple} or more goes with the other flags: {first}"
            )
        last = problem(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if problem(middle) is None else (middle, high)
    return high


MOST_RANKS = 4096


def find_context_parallel_size(args, fits: Callable[[Setting], bool]) -> Setting | None:
    """The setting with the fewest GPUs that fits, with tensor and pipeline parallelism as given and no
    further data parallelism; None if none does up to 4096.

    Context-parallel sizes are 1, 2, 4, ..., and these times the size of the inner groups that is given. Inner
    groups stay as large, or hold all ranks where there are fewer.
    """
    error, tried = None, False
    inner = _inner_given(args)
    powers = [1 << power for power in range(MOST_RANKS.bit_length())]
    sizes = {size for power in powers for size in (power, power * inner) if size <= MOST_RANKS}
    for size in sorted(sizes):
        if inner % size and size % inner:
            continue  # an inner group would cross hosts
        try:
            setting = setting_of(_in_groups(args, size, inner))
        except ConfigError as problem:  # a length that does not divide, or too many blocks a rank
            error = error or problem
        else:
            tried = True
            if fits(setting):
                return setting
    if not tried:
        raise error
    return None


def _inner_given(args) -> int:
    """Ranks of an inner group that the flags ask for; 1 if they leave it open."""
    sizes = args.hierarchical_context_parallel_sizes
    gathered = getattr(args, "mtraining_gathered_ranks", None) or 1
    return max(1, sizes[0] if is_two_sizes(sizes) else gathered)


def _in_groups(args, size: int, inner: int) -> argparse.Namespace:
    """``args`` with ``size`` context-parallel ranks, and as many groups as these make."""
    values = dict(context_parallel_size=size, world_size=None)
    if is_two_sizes(args.hierarchical_context_parallel_sizes):  # others are refused
        sizes = [inner, size // inner] if size > inner else None
        values["hierarchical_context_parallel_sizes"] = sizes
    gathered = getattr(args, "mtraining_gathered_ranks", None)
    if gathered is not None:
        values["mtraining_gathered_ranks"] = min(gathered, size)
    return changed(args, **values)
