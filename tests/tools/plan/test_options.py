# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Flags as ``mtraining plan`` reads them: Megatron's defaults, what is missing, wrong or not modelled."""

from __future__ import annotations

import argparse

import pytest

from megatron_mtraining.config import ConfigError
from megatron_mtraining.tools.plan import options as plan_options
from megatron_mtraining.tools.plan.options import parser_of_megatron, read
from megatron_mtraining.tools.plan.setting import setting_of
from tests.support.plan_cases import SMALL, made


def test_names_and_defaults_are_megatrons(monkeypatch):
    training = pytest.importorskip("megatron.training.arguments")
    theirs = training.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = {flag: action for action in theirs._actions for flag in action.option_strings}
    monkeypatch.setattr(plan_options, "flags_of_megatron", dict)  # the tables alone
    for action in parser_of_megatron()._actions:
        flag = action.option_strings[0]
        if flag.startswith("--mtraining-"):
            continue
        assert actions[flag].dest == action.dest, flag
        default = actions[flag].default
        assert getattr(default, "name", default) == action.default, flag


def test_defaults_and_choices_are_those_of_the_megatron_that_is_there(monkeypatch):
    theirs = argparse.ArgumentParser()
    theirs.add_argument("--seq-length", type=int, default=77)
    theirs.add_argument("--recompute-method", choices=["uniform", "spiral"])
    flags = {f: action for action in theirs._actions for f in action.option_strings}
    monkeypatch.setattr(plan_options, "flags_of_megatron", lambda: flags)
    args, ignored = read(["--recompute-method", "spiral", "--misspelt"])
    assert (args.seq_length, args.recompute_method, ignored) == (77, "spiral", ["--misspelt"])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-experts 8", "does not model --num-experts"),
        ("--moe-router-topk 2", "only dense GPT models"),
        ("--fp8-format hybrid", "does not model --fp8-format"),
        ("--multi-latent-attention", "--multi-latent-attention is True, which does not work .*: its keys"),
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage"),
        ("--tensor-model-parallel-size 3", "--num-attention-heads is 4, which is not a multiple"),
        ("--pipeline-model-parallel-size 3", "--num-layers is 4, which is not a multiple"),
        ("--context-parallel-size 3", "--seq-length is 512, which is not a multiple of 384"),
        ("--seq-length 500", "--seq-length is 500, which is not a multiple of 128"),
        ("--group-query-attention --num-query-groups 3", "which is not a multiple of --num-query-groups"),
        ("--group-query-attention --num-attention-heads 12 --num-query-groups 4 "
         "--tensor-model-parallel-size 6",
         "--num-query-groups is 4, which is neither a multiple nor a divisor"),
        ("--group-query-attention --num-attention-heads 6 --num-query-groups 2 "
         "--tensor-model-parallel-size 6",
         "does not divide the 640 columns"),
        ("--global-batch-size 3 --micro-batch-size 2", "--global-batch-size is 3"),
        ("--kv-channels 80", "head dimension"),
        ("--attention-dropout 0.1", "--attention-dropout is 0.1"),
        ("--num-layers 0", "--num-layers is 0"),
        ("--seq-length 1024", "--max-position-embeddings is 600, less than"),
        ("--num-distributed-optimizer-instances 2", "does not divide the 1 data- and"),
        ("--hidden-size many", "invalid int value"),
        ("--hidden-size $HIDDEN", "variable of a shell"),
        ("--bf16 --fp16", "--fp16 and --bf16"),
        ("--optimizer sgd", "models only Adam; got --optimizer sgd"),
        ("--use-precision-aware-optimizer", "needs --use-distributed-optimizer"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--recompute-granularity selective --recompute-method block", "refuses with selective"),
        ("--recompute-activations --recompute-method block", "refuses with selective"),
        ("--swiglu --squared-relu", "--swiglu and --squared-relu are both given"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --distribute-saved-activations "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "--distribute-saved-activations and --sequence-parallel are both given",
        ),
        ("--recompute-granularity selective --recompute-modules mlp", "got --recompute-modules mlp"),
        ("--mtraining-policy moba", "--mtraining-policy is moba"),
        ("--mtraining-price -1", "--mtraining-price"),
        ("--attention-backend fused", "--no-create-attention-mask-in-dataloader"),
        ("--attention-backend unfused --no-create-attention-mask-in-dataloader", "materializes all scores"),
        ("--attention-backend fused --mtraining-price 0.5", "0.5 is given, but .* backend is fused"),
        ("--reset-attention-mask --reset-position-ids --pipeline-model-parallel-size 2",
         "--pipeline-model-parallel-size 2"),
        ("--reset-attention-mask", "needs --reset-position-ids"),
        ("--reset-attention-mask --position-embedding-type rope --context-parallel-size 32 "
         "--seq-length 33554432 --max-position-embeddings 33554432", "33554432: use at most 16777216"),
        ("--dataloader-inter-document-masking --overlap-moe-expert-parallel-comm", "--overlap-moe-expert"),
        ("--position-embedding-type rope --rotary-scaling-factor 4", "use --position-embedding-type yarn"),
        ("--position-embedding-type rope --no-yarn-correction-range-round-to-int", "--no-yarn-corr"),
        ("--position-embedding-type yarn --use-rope-scaling", "--use-rope-scaling is given"),
        ("--position-embedding-type yarn --rotary-percent 0.5", "--rotary-percent 0.5 is given"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_modelled_is_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        made(SMALL + flags)


@pytest.mark.parametrize(
    "left_out", ["--num-layers 4", "--seq-length 512", "--vocab-size 1000", "--micro-batch-size 1"]
)
def test_what_is_missing_is_named(left_out):
    with pytest.raises(ConfigError, match=left_out.split()[0] + " is not given"):
        made(SMALL.replace(left_out, ""))


def test_a_file_of_settings_is_refused_before_what_it_may_hold():
    with pytest.raises(ConfigError, match="--yaml-cfg is settings.yaml, which does not work"):
        made("--attention-backend mtraining --yaml-cfg settings.yaml")


def test_the_world_size_is_the_launchers():
    words = ("torchrun --nproc-per-node 4 --nnodes 2 pretrain_gpt.py " + SMALL).split()
    args, ignored = read([*words, "--lr", "1e-5", "--mock-data"])
    assert setting_of(args).dp == 8
    assert ignored == ["--lr", "--mock-data"]
    with pytest.raises(ConfigError, match="world size is 8, which is not a multiple of 3"):
        setting_of(read([*words, "--context-parallel-size", "3", "--seq-length", "384"])[0])
