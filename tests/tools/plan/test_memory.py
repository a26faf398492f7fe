# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining plan memory`` beside real models, real tensors and measured peaks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_mtraining.config import ConfigError
from megatron_mtraining.tools.cli import main
from megatron_mtraining.tools.plan import command, memory
from megatron_mtraining.tools.plan import options as plan_options
from megatron_mtraining.tools.plan.activations import Layer, loss_bytes, ring_bytes
from megatron_mtraining.tools.plan.options import parser_of_megatron, read
from megatron_mtraining.tools.plan.setting import gradient_bytes, optimizer_bytes, setting_of
from megatron_mtraining.tools.plan.weights import stage_parameters
from tests.support.live_bytes import Peak

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "tests" / "support" / "plan_worker.py"

SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --kv-channels 64 --seq-length 512 "
    "--max-position-embeddings 600 --micro-batch-size 1 --vocab-size 1000 --attention-dropout 0 "
    "--hidden-dropout 0 --attention-backend mtraining "
)
QWEN = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias "
    "--attention-dropout 0 --hidden-dropout 0 --group-query-attention --num-query-groups 2 "
    "--micro-batch-size 1 --vocab-size 151936 --no-create-attention-mask-in-dataloader "
)
QWEN_3B = QWEN + (
    "--num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 --kv-channels 128 "
    "--seq-length 131072 --max-position-embeddings 131072 "
)
QWEN_HALF_B = QWEN + (
    "--num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --kv-channels 64 "
    "--seq-length 131072 --max-position-embeddings 131072 "
)
OURS = "--attention-backend mtraining "
EXAMPLE = QWEN_3B + (
    "--bf16 --use-distributed-optimizer --context-parallel-size 4 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --global-batch-size 1 "
    "--no-gradient-accumulation-fusion --cross-entropy-loss-fusion "
)
"""examples/pretrain_qwen2.5_3b.sh."""

COUNTED = {
    "defaults": SMALL,
    "learned, untied": SMALL + "--untie-embeddings-and-output-weights",
    "gated": SMALL + "--swiglu --position-embedding-type rope --normalization RMSNorm",
    "query norms": SMALL + "--qk-layernorm --disable-bias-linear --position-embedding-type none",
    "groups, tensor parallel": SMALL
    + "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2 --swiglu",
    "tied, tensor and pipeline parallel": SMALL
    + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "untied, pipeline parallel": SMALL
    + "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --qk-layernorm",
    "0.5B": QWEN_HALF_B + OURS,
    "3B": QWEN_3B + OURS,
    "3B, untied, tensor parallel": QWEN_3B
    + OURS
    + "--tensor-model-parallel-size 2 --untie-embeddings-and-output-weights",
    "3B, pipeline parallel": QWEN_3B + OURS + "--pipeline-model-parallel-size 2",
}
SAVED = {
    "defaults": SMALL + "--no-rope-fusion",
    "bf16, rotated, groups": SMALL
    + "--bf16 --no-rope-fusion --position-embedding-type rope --group-query-attention "
    + "--num-query-groups 2 --swiglu --no-bias-swiglu-fusion --disable-bias-linear",
    "gated in one, query norms, two sequences": SMALL
    + "--no-rope-fusion --position-embedding-type rope --swiglu --qk-layernorm --micro-batch-size 2 "
    + "--ffn-hidden-size 192 --mtraining-vertical 70 --mtraining-slash 60 --seq-length 640 "
    + "--max-position-embeddings 640",
}
BROAD = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --kv-channels 64 --ffn-hidden-size 4096 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --vocab-size 256 "
    "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --attention-backend mtraining "
    "--no-gradient-accumulation-fusion --mtraining-loss-chunk 32 "
)
FULL = "--recompute-granularity full --recompute-method "
PEAKS = {
    "nothing recomputed": BROAD,
    "each layer": BROAD + FULL + "uniform --recompute-num-layers 1",
    "two layers at once": BROAD + FULL + "uniform --recompute-num-layers 2",
    "three of four": BROAD + FULL + "block --recompute-num-layers 3",
    "attention too": BROAD
    + FULL
    + "uniform --recompute-num-layers 1 --mtraining-recompute-attention",
}
"""Wide MLPs without a gate: at their peak CPU and GPU hold the same tensors."""


def made(flags: str, world_size: int | None = None):
    return setting_of(read(flags.split())[0], world_size)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("plan") / "cases.json"
    cases = {"counted": COUNTED, "saved": SAVED, "peaks": PEAKS}
    file.write_text(json.dumps({k: {n: f.split() for n, f in v.items()} for k, v in cases.items()}))
    ended = subprocess.run(
        [sys.executable, str(WORKER), str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_model(name, measured):
    setting = made(COUNTED[name])
    assert [stage_parameters(setting, stage) for stage in range(setting.pp)] == (
        measured["counted"][name]
    )


@pytest.mark.parametrize("name", SAVED)
def test_a_layer_keeps_what_autograd_saves(name, measured):
    setting = made(SAVED[name])
    saved, index = measured["saved"][name]
    layer = Layer(setting)
    assert layer.total == saved, layer.saved
    assert layer.index == index


@pytest.mark.parametrize("name", PEAKS)
def test_a_step_on_cpu_holds_what_is_planned(name, measured):
    (stage,) = memory.plan(made(PEAKS[name]))
    held = stage.allocated - sum(stage.parts[n] for n in ("parameters", "gradients", "optimizer"))
    assert measured["peaks"][name] == pytest.approx(held, rel=0.1)


def rows(name: str) -> list[dict]:
    text = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def flags_of(row: dict) -> str:
    """A row of pretrain.jsonl of the example's script, as flags. Rows that say nothing of ``loss_chunk`` are
    from before there was one, and before attention was kept for the replay."""
    flags = EXAMPLE + f"--seq-length {row['seq']} --max-position-embeddings {row['seq']} "
    flags += f"--context-parallel-size {row['world']} --attention-backend {row['attention']} "
    if row["attention"] != "mtraining":
        return flags
    if "loss_chunk" not in row or "--mtraining-recompute-attention" in row["command"]:
        flags += "--mtraining-recompute-attention "
    flags += f"--mtraining-loss-chunk {row.get('loss_chunk', 0)} "
    if row["vertical"] is not None:
        flags += f"--mtraining-vertical {row['vertical']} --mtraining-slash {row['slash']}"
    return flags


def planned(row: dict) -> bool:
    """A plan has no chunked loss without the backend, and this file's flags are the example's."""
    ours = row["attention"] == "mtraining" or not row.get("loss_chunk")
    return ours and row["model"] == "qwen2.5-3b"


@pytest.mark.parametrize(
    "row",
    [row for row in rows("pretrain") if planned(row)],
    ids=lambda row: f"{row['seq']}-{row['world']}gpu-{row['attention']}",
)
def test_measured_peaks_of_training_are_met(row):
    (stage,) = memory.plan(made(flags_of(row), row["world"]))
    measured_peak = row["max_alloc_gb"]  # of 2**30 bytes: Megatron's log, in MiB, over 1024
    assert stage.allocated / memory.GIB == pytest.approx(measured_peak, rel=0.03)


def ring_of_row(row: dict) -> int:
    columns = row["vertical"]
    setting = made(
        QWEN_3B
        + f"--bf16 --seq-length {row['seq']} --max-position-embeddings {row['seq']} "
        + f"--context-parallel-size {row['world']} --attention-backend mtraining "
        + f"--mtraining-gathered-ranks {row['inner']} --mtraining-vertical {columns} --mtraining-slash 30"
    )
    layer = Layer(setting)
    kept = layer.saved["attention output"] + layer.saved["log-sum-exp"] + layer.index
    return ring_bytes(layer) + kept


@pytest.mark.parametrize(
    "row",
    [row for row in rows("rings") if row["impl"].startswith("mtraining") and row["peak_gib"]],
    ids=lambda row: f"{row['case']}, {row['inner']} of {row['world']}",
)
def test_measured_peaks_of_rings_are_met(row):
    assert ring_of_row(row) / memory.GIB == pytest.approx(row["peak_gib"], rel=0.02)


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
    monkeypatch.setattr(command, "flags_of_megatron", lambda: flags)
    args, ignored = read(["--recompute-method", "spiral", "--misspelt"])
    assert (args.seq_length, args.recompute_method, ignored) == (77, "spiral", ["--misspelt"])


def test_flags_that_megatron_does_not_have_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(command, "flags_of_megatron", lambda: {"--lr": None})
    found = plan_json(capsys, *SMALL.split(), "--lr", "1", "--lrr", "2")
    assert (found["passed_over"], found["unknown"]) == (["--lr"], ["--lrr"])


def test_the_loss_in_chunks_holds_what_is_planned():
    from megatron_mtraining.loss import linear_cross_entropy

    flags = BROAD + "--vocab-size 4096 --seq-length 2048 "
    setting = made(flags + "--max-position-embeddings 2048 --hidden-size 128")
    hidden = torch.randn(setting.tokens, 128, requires_grad=True)
    weight = torch.randn(setting.vocab, 128, requires_grad=True)
    labels = torch.randint(setting.vocab, (setting.tokens,))
    with Peak() as watched:
        linear_cross_entropy(hidden, weight, labels, setting.loss_chunk).sum().backward()
    # Not made by the loss: input and output of the final norm. In float32 gradients are not rounded.
    planned = loss_bytes(Layer(setting)) - 2 * hidden.nbytes - weight.nbytes
    assert watched.most == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize(
    "flags, gradient, optimizer",
    [
        ("", 4, 8),
        ("--bf16", 4, 12),
        ("--bf16 --grad-reduce-in-bf16", 2, 12),
        ("--fp16", 2, 12),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 4, 12),
        ("--bf16 --use-distributed-optimizer --use-precision-aware-optimizer", 4, 10),
        (
            "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8 "
            "--exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
            2,
            5,
        ),
    ],
)
def test_bytes_of_a_parameter(flags, gradient, optimizer):
    args = made(SMALL + flags).args
    assert (gradient_bytes(args), optimizer_bytes(args)) == (gradient, optimizer)


def test_the_distributed_optimizer_is_split_over_data_and_context_parallel_ranks():
    def optimizer(flags, world):
        (stage,) = memory.plan(made(QWEN_HALF_B + OURS + "--bf16 " + flags, world))
        return stage.parts["optimizer"], stage.parameters

    whole, parameters = optimizer("--context-parallel-size 4", 8)
    assert whole == 12 * parameters
    split, _ = optimizer("--context-parallel-size 4 --use-distributed-optimizer", 8)
    assert split == 12 * parameters // 8


def test_pipeline_stages_keep_as_many_microbatches_as_are_in_flight():
    flags = EXAMPLE + OURS + "--pipeline-model-parallel-size 4 --global-batch-size "
    kept = [stage.parts["kept activations"] for stage in memory.plan(made(flags + "8"))]
    assert [each // kept[-1] for each in kept] == [4, 3, 2, 1]
    kept = [stage.parts["kept activations"] for stage in memory.plan(made(flags + "2"))]
    assert [each // kept[-1] for each in kept] == [2, 2, 2, 1]
    stages = memory.plan(made(flags + "8"))
    assert [stage.loss > 0 for stage in stages] == [False, False, False, True]


def test_sequence_parallelism_splits_what_tensor_parallelism_does_not():
    flags = QWEN_3B + OURS + "--bf16 --tensor-model-parallel-size 2 "
    plain, split = Layer(made(flags)), Layer(made(flags + "--sequence-parallel"))
    for name, bytes_ in plain.saved.items():
        cut = name in ("layer input", "attention norm", "MLP input", "MLP norm", "norm statistics")
        assert split.saved[name] == bytes_ // (2 if cut else 1), name


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-experts 8", "does not model --num-experts"),
        ("--moe-router-topk 2", "only dense GPT models"),
        ("--fp8-format hybrid", "does not model --fp8-format"),
        ("--multi-latent-attention", "--multi-latent-attention does not work .*: only causal softmax"),
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage"),
        ("--tensor-model-parallel-size 3", "--num-attention-heads is 4, which is not a multiple"),
        ("--pipeline-model-parallel-size 3", "--num-layers is 4, which is not a multiple"),
        ("--context-parallel-size 3", "--seq-length is 512, which is not a multiple of 384"),
        ("--seq-length 500", "--seq-length is 500, which is not a multiple of 128"),
        ("--group-query-attention --num-query-groups 3", "which is not a multiple of --num-query-groups"),
        ("--global-batch-size 3 --micro-batch-size 2", "--global-batch-size is 3"),
        ("--kv-channels 96", "head dimension"),
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


def test_packed_documents_are_planned_as_others_are():
    packed = made(SMALL + "--reset-attention-mask --position-embedding-type rope")
    yarn = "--position-embedding-type yarn --rotary-scaling-factor 4 --mscale 2 "
    other = made(SMALL + yarn + "--yarn-original-max-position-embeddings 128")
    alone = made(SMALL + "--position-embedding-type rope")
    assert memory.plan(packed) == memory.plan(alone) == memory.plan(other)


@pytest.mark.parametrize(
    "left_out", ["--num-layers 4", "--seq-length 512", "--vocab-size 1000", "--micro-batch-size 1"]
)
def test_what_is_missing_is_named(left_out):
    with pytest.raises(ConfigError, match=left_out.split()[0] + " is not given"):
        made(SMALL.replace(left_out, ""))


def test_the_world_size_is_the_launchers():
    words = ("torchrun --nproc-per-node 4 --nnodes 2 pretrain_gpt.py " + SMALL).split()
    args, ignored = read([*words, "--lr", "1e-5", "--mock-data"])
    assert setting_of(args).dp == 8
    assert ignored == ["--lr", "--mock-data"]
    with pytest.raises(ConfigError, match="world size is 8, which is not a multiple of 3"):
        setting_of(read([*words, "--context-parallel-size", "3", "--seq-length", "384"])[0])


def plan_json(capsys, *words: str) -> dict:
    assert main(["plan", "memory", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_longest_sequence_that_fits(capsys):
    flags = (EXAMPLE + OURS).split()
    found = plan_json(capsys, "--gpu-memory-gib", "100", "--find", "seq-length", "--", *flags)
    length = found["seq_length"]
    assert found["fits"] and length % 512 == 0 and length > 131072
    longer = str(length + 512)
    status = main(
        [
            "plan",
            "memory",
            "--gpu-memory-gib",
            "100",
            *flags,
            "--seq-length",
            longer,
            "--max-position-embeddings",
            longer,
        ]
    )
    assert status == 1 and "does not fit" in capsys.readouterr().out


def test_the_fewest_gpus(capsys):
    flags = (EXAMPLE + OURS + "--seq-length 524288 --max-position-embeddings 524288").split()
    search = ("--gpu-memory-gib", "79", "--find", "context-parallel-size")
    found = plan_json(capsys, *search, *flags)
    assert found["world_size"] == 8 and found["fits"]
    half = plan_json(capsys, *flags)
    assert half["world_size"] == 4 and half["fits"] is None
    assert half["needed"] > 79 * memory.GIB >= found["needed"]


def test_a_table_and_errors_of_the_command(capsys, tmp_path):
    file = tmp_path / "flags"
    file.write_text("# a model\n" + SMALL.replace(" --seq", " \\\n  --seq"))
    assert main(["plan", "memory", "--flags-file", str(file), "--bf16", "--lr", "1"]) == 0
    text = capsys.readouterr().out
    assert "attention saved for recomputation" in text and "to change memory: --lr" in text
    for words, message in (
        (["--find", "seq-length"], "--find needs --gpu-memory-gib"),
        (["--gpu-memory-gib", "-1"], "must be positive"),
        (["--flags-file", str(tmp_path / "none")], "cannot be read"),
        (["--gpu-memory-gib", "1", "--find", "seq-length", *EXAMPLE.split(), *OURS.split()], "no seq-length"),
    ):  # fmt: skip
        assert main(["plan", "memory", *words]) == 2
        assert message in capsys.readouterr().err


DOCUMENTED = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_documented_table_is_the_tools(capsys):
    flags = EXAMPLE + OURS + "--seq-length 524288 --max-position-embeddings 524288"
    assert main(["plan", "memory", "--gpu-memory-gib", "139", *flags.split()]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed).strip() in DOCUMENTED


@pytest.mark.parametrize("tokens", [131072, 262144, 524288, 1048576])
def test_the_documented_peaks_are_the_tools(tokens):
    peaks = []
    for more in ("", "--mtraining-recompute-attention", "--mtraining-loss-chunk 0"):
        length = f"--seq-length {tokens} --max-position-embeddings {tokens} "
        (stage,) = memory.plan(made(EXAMPLE + OURS + length + more))
        peaks.append(f"{stage.allocated / memory.GIB:.1f}")
    assert f"| {tokens} | {' | '.join(peaks)} |" in DOCUMENTED
