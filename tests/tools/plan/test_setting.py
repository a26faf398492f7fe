# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Settings of ``mtraining plan``: it refuses what a run refuses, and plans what a run does."""

from __future__ import annotations

import argparse
from functools import cache

import pytest

from megatron_mtraining.config import ConfigError, option
from megatron_mtraining.megatron.arguments import refuse
from megatron_mtraining.megatron.backend import add_member
from megatron_mtraining.megatron.checks import is_from
from megatron_mtraining.megatron.layer_pattern import HYBRID
from megatron_mtraining.megatron.loss_options import DEFAULT_CHUNK, NEED_LOGITS
from megatron_mtraining.megatron.options import add_arguments
from megatron_mtraining.tools.plan import activations
from megatron_mtraining.tools.plan.activations import Layer, loss_bytes
from megatron_mtraining.tools.plan.options import NOT_MODELLED, read
from megatron_mtraining.tools.plan.setting import setting_of
from tests.support.plan_cases import EXAMPLE, OURS, SMALL, made

ROPE = "--position-embedding-type rope "
COST = "--mtraining-batching cost "
PACKED = "--reset-attention-mask --reset-position-ids "
INTER = "--dataloader-inter-document-masking "
ACCEPTED = [
    "",
    COST + PACKED + "--micro-batch-size 2 --calculate-per-token-loss",
    COST + INTER + "--micro-batch-size 2 --calculate-per-token-loss",
    COST + PACKED + "--dataloader-type single",
    "--softmax-type vanilla",
    "--softmax-type=learnable",
    "--window-size 128,0 --window-attn-skip-freq 2",
    "--cuda-graph-impl none",
    "--mtp-num-layers 0",
    "--rampup-batch-size 8 8 100",
    "--mock-data --dataloader-type cyclic",
    "--save-activations-interval 10",
    "--context-parallel-size 4 --logits-save-dir /x",
    ROPE + "--rotary-base 1000000 --use-rope-scaling --rope-scaling-factor 4",
]
REFUSED = {
    COST + PACKED + "--micro-batch-size 2": "use --calculate-per-token-loss",
    COST + PACKED + "--rampup-batch-size 8 8 100": "--rampup-batch-size 8 8 100",
    COST + PACKED + "--decrease-batch-size-if-needed": "--decrease-batch-size-if-needed",
    COST + PACKED + "--object-storage-cache-path /x": "--object-storage-cache-path /x",
    COST + PACKED + "--dataloader-type cyclic": "--dataloader-type cyclic",
    COST + "--mock-data": "nothing to balance with --mock-data",
    "--cuda-graph-impl local": "--cuda-graph-impl is local",
    "--window-size 128,128": "--window-size is 128 128",
    "--save-activations-interval 10 --mtraining-loss-chunk 64": "--save-activations-interval is 10",
    ROPE + "--rope-scaling-factor 4": "--rope-scaling-factor 4.* without --use-rope-scaling",
    "--position-embedding-type none --rotary-base 5000": "--rotary-base 5000 is given",
    "--mtraining-backward-threshold 3 --seq-length 2097152 --max-position-embeddings 2097152": (
        "--mtraining-backward-threshold needs lists of up to 536903680 blocks"
    ),
}


@cache
def parser_of_a_run() -> argparse.ArgumentParser:
    training = pytest.importorskip("megatron.training.arguments")
    add_member()
    parser = training.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    # Another test may have registered the plug-in in this process: they are there, then.
    return parser if option("policy") in parser._option_string_actions else add_arguments(parser)


def arguments_of_a_run(flags: str) -> argparse.Namespace:
    """As Megatron's parser makes them."""
    words = (SMALL + flags).split()
    known = parser_of_a_run()._option_string_actions
    missing = [word for word in words if word[:2] == "--" and word.split("=")[0] not in known]
    if missing:
        pytest.skip(f"this Megatron-LM has no {' '.join(missing)}")
    return parser_of_a_run().parse_args(words)


@pytest.mark.parametrize("flags", ACCEPTED)
def test_what_a_run_accepts_is_planned(flags):
    assert made(SMALL + flags).mtraining


@pytest.mark.parametrize("flags, message", REFUSED.items())
def test_what_a_run_refuses_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        made(SMALL + flags)


@pytest.mark.parametrize("flags", ACCEPTED)
def test_a_run_accepts_what_is_planned(flags):
    refuse(arguments_of_a_run(flags))


@pytest.mark.parametrize("flags, message", REFUSED.items())
def test_a_run_refuses_it_too(flags, message):
    with pytest.raises(ConfigError, match=message):
        refuse(arguments_of_a_run(flags))


CHANGES_MEMORY = ["--mtp-num-layers 1", "--cuda-graph-impl local --cuda-graph-modules moe_router"]
if is_from(HYBRID):
    CHANGES_MEMORY.append("--hybrid-layer-pattern *-*-")


@pytest.mark.parametrize("flags", CHANGES_MEMORY)
def test_what_trains_but_is_not_modelled_is_refused(flags):
    with pytest.raises(ConfigError, match="does not model --.*, which changes memory"):
        made(SMALL + flags)


def test_other_backends_need_the_value_too():
    fused = SMALL + "--attention-backend fused --no-create-attention-mask-in-dataloader "
    assert made(f"{fused} --cuda-graph-impl none").mtraining is None
    with pytest.raises(ConfigError, match="does not model --cuda-graph-impl, which changes memory"):
        made(f"{fused} --cuda-graph-impl other")


@pytest.mark.parametrize("refusal", NEED_LOGITS, ids=lambda refusal: refusal.name)
def test_what_needs_all_logits_is_planned_without_chunks(refusal):
    flag = refusal.given(command_line=True)
    flags = f"{SMALL} {flag} 8"
    if flag in NOT_MODELLED:
        with pytest.raises(ConfigError, match=f"does not model {flag}"):
            made(flags)
        return
    args, ignored = read(flags.split())
    setting, without = setting_of(args), made(SMALL + "--mtraining-loss-chunk 0")
    assert (setting.loss_chunk, made(SMALL).loss_chunk, ignored) == (0, DEFAULT_CHUNK, [])
    assert loss_bytes(Layer(setting)) == loss_bytes(Layer(without))
    with pytest.raises(ConfigError, match=f"--mtraining-loss-chunk is 64, but {flag} is 8"):
        made(flags + " --mtraining-loss-chunk 64")


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pruned_backward_that_is_too_long_is_refused(batch):
    length = 2097152 if batch == 1 else 1483264
    flags = EXAMPLE + OURS + "--mtraining-backward-threshold 3 --global-batch-size 2 "
    flags += f"--micro-batch-size {batch} --max-position-embeddings {length} --seq-length {length} "
    for check in (refuse, setting_of):
        args, _ = read(flags.split())
        with pytest.raises(ConfigError, match="--mtraining-backward-threshold needs lists of up"):
            check(args)
        args, _ = read((flags + "--tensor-model-parallel-size 2").split())
        check(args)
    made(flags + "--mtraining-backward-threshold 0")


def test_packed_documents_are_the_same_by_either_flag():
    flags = SMALL + ROPE + "--mtraining-backward-threshold 3 "
    found = [activations.pruning_bytes(Layer(made(flags + more))) for more in (PACKED, INTER, "")]
    assert found[0] == found[1] > found[2]
