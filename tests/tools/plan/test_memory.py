# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Planned memory against real models, real tensors and measured peaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_mtraining.tools.plan import activations, memory
from megatron_mtraining.tools.plan.activations import Layer, loss_bytes, ring_bytes
from megatron_mtraining.tools.plan.setting import gradient_bytes, optimizer_bytes
from megatron_mtraining.tools.plan.weights import stage_parameters
from tests.support.live_bytes import Peak
from tests.support.plan_cases import EXAMPLE, OURS, QWEN_3B, QWEN_HALF_B, SMALL, made

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
WORKER = ROOT / "tests" / "support" / "plan_worker.py"

COUNTED = {
    "defaults": SMALL,
    "learned, untied": SMALL + "--untie-embeddings-and-output-weights",
    "gated": SMALL + "--swiglu --position-embedding-type rope --normalization RMSNorm",
    "query norms": SMALL + "--qk-layernorm --disable-bias-linear --position-embedding-type none",
    "groups, tensor parallel": SMALL
    + "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2 --swiglu",
    "groups that ranks share": SMALL
    + "--num-attention-heads 8 --group-query-attention --num-query-groups 2 --add-qkv-bias "
    + "--tensor-model-parallel-size 4 --qk-layernorm",
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
    "groups on one rank each": SMALL
    + "--no-rope-fusion --position-embedding-type rope --num-attention-heads 8 --group-query-attention "
    + "--num-query-groups 2 --tensor-model-parallel-size 2",
    "groups that ranks share": SMALL
    + "--no-rope-fusion --position-embedding-type rope --num-attention-heads 8 --group-query-attention "
    + "--num-query-groups 2 --tensor-model-parallel-size 4",
    "groups that ranks share, query norms": SMALL
    + "--qk-layernorm --position-embedding-type none --num-attention-heads 8 --group-query-attention "
    + "--num-query-groups 2 --tensor-model-parallel-size 8",
    "pruned backward": SMALL + "--no-rope-fusion --mtraining-backward-threshold 3",
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
    "groups that ranks share": BROAD
    + "--num-attention-heads 64 --group-query-attention --num-query-groups 1 --ffn-hidden-size 512 "
    + "--tensor-model-parallel-size 64 --mtraining-loss-chunk 8",
}
"""Wide MLPs without a gate, or queries of many ranks: at their peak CPU and GPU hold the same tensors."""


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
        flags += f"--mtraining-vertical {row['vertical']} --mtraining-slash {row['slash']} "
    if row.get("backward_threshold"):
        flags += f"--mtraining-backward-threshold {row['backward_threshold']} "
    return flags


def planned(row: dict) -> bool:
    """A plan has no chunked loss without the backend, and this file's flags are the example's."""
    ours = row["attention"] == "mtraining" or not row.get("loss_chunk")
    return ours and row["model"] == "qwen2.5-3b" and row.get("weights", "random") == "random"


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
    if row["vertical"] is None:
        pattern = f"--mtraining-price {row['price']}"
    elif row.get("one_pass"):
        pattern = "--mtraining-slash all"
    else:
        pattern = f"--mtraining-vertical {row['vertical']} --mtraining-slash 30"
    if row.get("backward_threshold"):
        pattern += f" --mtraining-backward-threshold {row['backward_threshold']}"
    setting = made(
        QWEN_3B
        + f"--bf16 --seq-length {row['seq']} --max-position-embeddings {row['seq']} "
        + f"--context-parallel-size {row['world']} --attention-backend mtraining "
        + f"--mtraining-gathered-ranks {row['inner']} {pattern}"
    )
    layer = Layer(setting)
    results = ("attention output", "log-sum-exp", "blocks of the pruned backward")
    held = ring_bytes(layer) + layer.index + sum(layer.saved[name] for name in results)
    if row["commit"] == "4072a84" and row["backward_threshold"]:
        held += heads_and_blocks(layer)  # that commit held the marks of blocks, a byte each
    return held


def heads_and_blocks(layer: Layer) -> int:
    args, config = layer.setting.args, layer.setting.mtraining
    blocks = args.seq_length // config.block_size
    return layer.heads * blocks * blocks // layer.setting.cp


@pytest.mark.parametrize(
    "row",
    [row for row in rows("rings") if row["impl"].startswith("mtraining") and row["peak_gib"]],
    ids=lambda row: f"{row['case']}, {row['inner']} of {row['world']}",
)
def test_measured_peaks_of_rings_are_met(row):
    assert ring_of_row(row) / memory.GIB == pytest.approx(row["peak_gib"], rel=0.02)


@pytest.mark.parametrize(
    "flags, aside",
    [
        ("--bf16 --seq-length 2432", 8 * 2432 * 128),
        ("--bf16 --seq-length 2304", 0),  # 7 heads a group: 126 blocks
        ("--bf16 --seq-length 1216 --mtraining-block-size 64", 8 * 1216 * 128),
        ("--seq-length 2432", 0),  # the gradients are float32 themselves
        ("--bf16 --seq-length 4864 --context-parallel-size 2", 0),  # accumulators are
    ],
)
def test_sums_that_one_rank_puts_aside(monkeypatch, flags, aside):
    layer = Layer(made(QWEN_HALF_B + OURS + "--max-position-embeddings 4864 " + flags))
    found = ring_bytes(layer)
    monkeypatch.setattr(activations, "SUMMED_BLOCKS", 10**9)
    assert found - ring_bytes(layer) == aside


@pytest.mark.parametrize(
    "flags, more",
    [
        # Beside the sums, 2 q, the gradients of keys and values, or what is left of them at the end.
        ("--bf16", lambda q, kv: 2 * q + max(3 * kv, q + kv) - (q + 3 * kv)),
        (
            "--bf16 --context-parallel-size 2",
            lambda q, kv: 2 * q + max(4 * kv, q + kv) - (q + 4 * kv),
        ),
        # Two kernels have sums of rounds, too, and the gradient beside them all the time.
        (
            "--bf16 --context-parallel-size 2 --mtraining-gathered-ranks 1",
            lambda q, kv: max(5 * kv, q + kv) - (q + 4 * kv),
        ),
        ("--bf16 --context-parallel-size 4", None),  # 8K tokens on a rank
        ("--bf16 --mtraining-backward-threshold 3", None),
        ("--bf16 --mtraining-slash 30", None),
        ("", None),
    ],
)
def test_what_one_pass_needs_more(monkeypatch, flags, more):
    """Of q, the queries' gradient, and kv, keys and values, in bytes of 16-bit numbers."""
    length = "--seq-length 32768 --max-position-embeddings 32768 "
    layer = Layer(made(QWEN_HALF_B + OURS + length + "--mtraining-slash all " + flags))
    found = ring_bytes(layer)
    assert activations.takes_one_pass(layer) == (more is not None)
    monkeypatch.setattr(activations, "takes_one_pass", lambda layer: False)
    width = 2 * layer.tokens
    expected = 0 if more is None else more(width * layer.q, width * 2 * layer.kv)
    assert found - ring_bytes(layer) == expected


@pytest.mark.parametrize("points", ["0:0.6,0.9:0.1", "0:0.6,0.9:0"])
def test_a_schedule_is_planned_by_its_densest_steps(points):
    length = "--seq-length 32768 --max-position-embeddings 32768 --bf16 --train-iters 10 "

    def held(more):
        return ring_bytes(Layer(made(QWEN_HALF_B + OURS + length + more)))

    sparse, dense = held("--mtraining-price 0.6"), held("--mtraining-price 0")
    assert dense > sparse
    assert held(f"--mtraining-schedule {points}") == (dense if points.endswith(":0") else sparse)


def test_blocks_that_are_summed_are_the_kernels_own():
    pytest.importorskip("triton")
    from megatron_mtraining.kernels.attention import launch_args

    assert activations.SUMMED_BLOCKS == launch_args.CHAIN / 2


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


def test_packed_documents_are_planned_as_others_are():
    packed = made(SMALL + "--reset-attention-mask --position-embedding-type rope")
    yarn = "--position-embedding-type yarn --rotary-scaling-factor 4 --mscale 2 "
    other = made(SMALL + yarn + "--yarn-original-max-position-embeddings 128")
    alone = made(SMALL + "--position-embedding-type rope")
    assert memory.plan(packed) == memory.plan(alone) == memory.plan(other)
