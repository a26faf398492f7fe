# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron-LM's own pretrain_gpt.py on CPU, through the launcher and with the patch.

    MEGATRON_LM_PATH=/path/to/Megatron-LM[:/another] pytest tests/megatron/test_pretrain.py

A copy of what is needed of each checkout is worked on, never the checkout. It needs what that
checkout needs (pybind11, a C++ compiler, make and others) for the Python that runs the tests.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining.tools.cli import main
from tests.support import recipes
from tests.support.eval_cases import QUIET, samples
from tests.support.pretrain_tree import (
    FULL,
    INTER_DOCUMENT,
    MOCK,
    MODEL,
    PACKING,
    SEQUENCE,
    SHIM,
    STEPS,
    TRAINING,
    check_same,
    losses,
    norms,
)
from tests.support.running import torchrun

OURS = ["--attention-backend", "mtraining", "--mtraining-block-size", "64"]
EVERYTHING = [*OURS, "--mtraining-slash", "all"]
CP, TP, PP = (
    f"--{kind}-parallel-size 2 " for kind in ("context", "tensor-model", "pipeline-model")
)
DOCUMENTS = "--reset-attention-mask --reset-position-ids " + PACKING
YARN = f"""
    --position-embedding-type yarn --rotary-base 1000000 --rotary-scaling-factor 16
    --yarn-original-max-position-embeddings {SEQUENCE // 16}
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
"""
# In two depths, of which each sees fewer tokens than the one before.
PREDICTION = "--mtp-num-layers 2 --calculate-per-token-loss "
CASES = {
    # how, processes, and what else; of the run of dense attention: processes, and what else
    "CP 1": ("launcher", 1, "", 1, ""),
    "CP 2": ("launcher", 2, CP, 1, ""),
    "CP 2 x TP 2": ("launcher", 4, CP + TP + "--mtraining-loss-chunk 100", 1, ""),
    "CP 4 in nodes of 2": (
        "launcher", 4, "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2", 1, "",
    ),
    "CP 2, a ring of single ranks": ("launcher", 2, CP + "--mtraining-gathered-ranks 1", 1, ""),
    "CP 1, patched": ("patch", 1, "", 1, ""),
    "CP 2, patched, distributed optimizer, full recompute": (
        "patch", 2, CP + FULL + "--use-distributed-optimizer", 1, "",
    ),
    "PP 2": ("launcher", 2, PP, 2, PP),  # with weights of their own
    "experts of two ranks": ("launcher", 2, EXPERTS, 2, EXPERTS),
    "YaRN, CP 2": ("launcher", 2, CP + YARN, 1, YARN),
    "multi-token prediction, CP 2 x PP 2": (
        "launcher", 4, CP + PP + PREDICTION, 2, PP + PREDICTION,
    ),
    "multi-token prediction of documents, CP 2 x PP 2": (
        "launcher", 4, CP + PP + PREDICTION + "--reset-attention-mask " + PACKING,
        2, PP + PREDICTION + DOCUMENTS,
    ),
    "documents, CP 2, full recompute": (
        "launcher", 2, CP + FULL + "--reset-attention-mask " + PACKING, 1, DOCUMENTS,
    ),
    "documents by their lengths, CP 2": (
        "launcher", 2, f"{CP} {INTER_DOCUMENT} {PACKING}", 1, DOCUMENTS,
    ),
}  # fmt: skip


def densities(run) -> list[float]:
    found = re.findall(r"\[mtraining\] iteration \d+ \| density (\S+) ", run.stdout)
    return [float(density) for density in found]


@pytest.mark.parametrize("name", CASES)
def test_with_everything_kept_steps_are_those_of_dense_attention(name, tree):
    way, processes, words, dense_processes, dense_words = CASES[name]
    tree.skip_without(words)
    dense = tree.plain(dense_processes, *dense_words.split())
    run = tree.run(way, processes, *words.split(), *EVERYTHING)
    check_same(run, dense, within=1e-4 if PACKING in words or PREDICTION in words else 1e-5)
    assert densities(run) == [1.0] * STEPS
    makes_a_mask = "inter-document" not in words  # else Megatron itself sees to it
    assert run.stdout.count("the data loader makes no") == makes_a_mask
    if dense_words:
        assert losses(dense) != pytest.approx(losses(tree.plain()), abs=1e-4), "it has an effect"


def test_launcher_on_a_cpu_adds_what_that_needs(tree):
    """Without the tests' own shim, and without arguments for the CPU."""
    script = tree.roots["launcher"] / "pretrain_gpt.py"
    model = [word for word in MODEL.split() if word not in ("--transformer-impl", "local")]
    training = "--micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 2 --log-interval 1 --bf16"
    never = "--eval-iters 0 --eval-interval 1000 --context-parallel-size 2"
    words = [*model, *training.split(), *never.split(), *MOCK.split(), *OURS]
    run = torchrun(2, "-m", "megatron_mtraining.launch", "--cpu", script, *words, timeout=300)
    assert len(losses(run, 2)) == 2
    assert "--cpu: on CPU tensors, with --transformer-impl local" in run.stdout


SPARSE = ["--mtraining-slash", "0", "--mtraining-vertical", "16", "--mtraining-window", "0"]


def test_a_sparse_run_trains(tree):
    run = tree.run("launcher", 2, "--context-parallel-size", "2", *OURS, *SPARSE)
    found, dense = losses(run), losses(tree.plain())
    assert found[-1] < found[0] - 0.05
    assert found != pytest.approx(dense, abs=1e-5), "it is sparse"
    assert found == pytest.approx(dense, rel=0.2)
    assert all(0.1 < density < 0.5 for density in densities(run)), densities(run)


def test_a_benchmark_s_run(tree, tmp_path, monkeypatch):
    """A stand-in for the checkout: dense attention with our loss and without our options, and a breakdown."""
    from benchmarks.model.instrument import stand_in

    traces = tmp_path / "traces"
    settings = dict(traces=str(traces), steps=2, loss_chunk=100, drop=["--mtraining-"])
    root = stand_in(tree.roots["launcher"], tmp_path / "checkout", **settings)
    words = [*MODEL.split(), *TRAINING.split(), *MOCK.split(), "--mtraining-price", "0.2"]
    launched = [SHIM, "-m", "megatron_mtraining.launch", root / "pretrain_gpt.py", *words]
    run = torchrun(1, *launched, timeout=300, PYTHONPATH=str(root))
    check_same(run, tree.plain())
    assert json.loads((traces / "rank-0.json").read_text())["profiled_steps"] == 2
    ranges = re.findall(r'"mtraining: (\w+)"', (traces / "trace-0.json").read_text())
    assert {"loss", "attention", "optimizer", "step"} == set(ranges)
    # Two samples a step, two layers.
    assert (ranges.count("loss"), ranges.count("attention")) == (2 * 2 * 2, 2 * 2 * 2 * 2)


# What the converted checkpoint's own flags do not say.
CONVERTED = f"""
    --transformer-impl local {" ".join(TRAINING.split())} --seq-length 256 --train-iters 3 --lr 1e-3
    --eval-iters 1 --eval-interval 3 --split 50,50,0 --save-interval 3
"""


def hugging_face_loss(folder: Path, tokens) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens[None, :-1]).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, tokens[1:]))


LAYOUTS = {
    "CP 2": (2, "qwen2 tied", CP),
    "TP 2 x PP 2": (4, "qwen3", TP + PP),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_converted_checkpoint_trains_and_goes_back(layout, tree, tmp_path):
    """With the flags that conversion has written: the loss of transformers at the start, and at the end. What
    training has saved is evaluated as it is, and after the way back."""
    pytest.importorskip("transformers")
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from tests.support.convert_cases import save
    from tests.support.data_cases import EOD, save_tokenizer

    ranks, kind, words_of_layout = LAYOUTS[layout]
    root = tree.roots["launcher"]
    hf = save(kind, tmp_path / "hf")
    save_tokenizer(hf, eos_token="<eod>")
    assert main(["convert", "hf-to-megatron", str(hf), str(tmp_path / "meg")]) == 0
    # A stream of one short document, again and again: all samples are the same, whatever their order.
    document = np.append(np.random.default_rng(3).integers(256, size=63), EOD)
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), np.uint16)
    for _ in range(400):
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "data.idx"))
    tokens = torch.from_numpy(np.tile(document, 5)[:257])
    script = 'source "$1" && printf "%s\\n" "${MEGATRON_ARGS[@]}"'
    flags = ["bash", "-c", script, "bash", tmp_path / "meg" / "megatron_args.sh"]
    flags = subprocess.run(flags, capture_output=True, text=True, check=True).stdout.splitlines()
    words = [*flags, *CONVERTED.split(), *EVERYTHING, "--save", tmp_path / "run"]
    words += ["--data-path", tmp_path / "data", "--data-cache-path", tmp_path / "cache"]
    words += words_of_layout.split()
    command = [SHIM, "-m", "megatron_mtraining.launch", root / "pretrain_gpt.py", *words]
    run = torchrun(ranks, *command, timeout=300, PYTHONPATH=str(root))
    found = losses(run, 3)
    assert found[0] == pytest.approx(hugging_face_loss(hf, tokens), abs=2e-4)
    assert found[2] < found[0] - 0.01
    back = ["convert", "megatron-to-hf", str(tmp_path / "run"), str(tmp_path / "back")]
    assert main([*back, "--like", str(tmp_path / "meg" / "hf")]) == 0
    (after,) = re.findall(
        r"loss at iteration 3 on validation set \| lm loss value: (\S+)", run.stdout
    )
    assert float(after) < found[2]
    assert hugging_face_loss(tmp_path / "back", tokens) == pytest.approx(float(after), abs=2e-4)
    (tmp_path / "text.txt").write_text(Path(json.__file__).read_text())
    losses_of = {}
    for name in ("run", "back"):
        words = ["--text", tmp_path / "text.txt", "--lengths", 256, "--samples", 2, *QUIET]
        words += ["--attention", "dense", "--output", tmp_path / f"eval {name}"]
        words += ["--like", tmp_path / "meg" / "hf"] if name == "run" else []
        assert main(["eval", "perplexity", str(tmp_path / name), *map(str, words)]) == 0
        rows = samples(tmp_path / f"eval {name}")["perplexity-256-dense"]
        losses_of[name] = [row["loss"] for row in rows]
    assert losses_of["run"] == losses_of["back"] and len(losses_of["run"]) == 2


RECOMPUTED = {
    "CP 2, full": CP + FULL,
    "CP 2, selective": CP + "--recompute-granularity selective",
    "TP 2, activations distributed": TP + FULL + "--distribute-saved-activations",
    "PP 2, full": PP + FULL + "--global-batch-size 4",
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputing_attention_changes_no_loss_and_no_density(name, tree):
    words = [*RECOMPUTED[name].split(), *OURS, *SPARSE]
    carried = tree.run("launcher", 2, *words)
    again = tree.run("launcher", 2, *words, "--mtraining-recompute-attention")
    assert losses(carried) == losses(again) and norms(carried) == norms(again)
    assert densities(carried) == densities(again) and len(densities(again)) == STEPS


def test_a_pruned_backward(tree):
    """The forward is dense: the first loss equals dense attention's. Recomputation prunes the same blocks."""
    words = ["--context-parallel-size", "2", *EVERYTHING, "--mtraining-backward-threshold", "3"]
    run = tree.run("launcher", 2, *words)
    found, dense = losses(run), losses(tree.plain())
    assert found[0] == pytest.approx(dense[0], abs=1e-5, rel=0)
    assert found != pytest.approx(dense, abs=1e-6, rel=0), "gradients differ"
    assert densities(run) == [1.0] * STEPS
    said = re.findall(r"\| backward density (\S+) without (\S+) of attention", run.stdout)
    assert len(said) == STEPS
    assert all(0 < float(kept) < 1 and 0 < float(left_out) < 1 for kept, left_out in said)
    again = tree.run("launcher", 2, *words, *FULL.split(), "--mtraining-recompute-attention")
    assert losses(again) == pytest.approx(found, abs=1e-6, rel=0)
    assert re.findall(r"\| backward density (\S+) without (\S+) of attention", again.stdout) == said


def test_a_pruned_backward_is_observed_in_logged_steps(tree):
    """What the log says of the backward is of the logged step, the first one included."""
    said = {}
    for interval in (1, 6):
        words = [
            *EVERYTHING,
            *f"--mtraining-backward-threshold 3 --log-interval {interval}".split(),
        ]
        lines = re.findall(
            r"iteration (\d+) \| density.*backward density (\S+ without \S+)",
            tree.run("launcher", 1, *words).stdout,
        )
        said[interval] = {int(step): backward for step, backward in lines}
    assert list(said[6]) == [1, 6, 12, 18]
    assert said[6] == {step: said[1][step] for step in said[6]}


@pytest.mark.parametrize("way", ["launcher", "patch"])
def test_other_runs_are_unchanged_by_an_installed_plug_in(way, tree):
    run, dense = tree.run(way, 1), tree.plain()
    assert losses(run) == losses(dense) and norms(run) == norms(dense)


BAD = {
    "dropout": (["--attention-dropout", "0.1", *OURS], "--attention-dropout 0"),
    "length": (["--seq-length", "200", *OURS], "--seq-length is 200"),
    "no backend": (["--mtraining-slash", "8"], "--mtraining-slash 8 is given"),
    "budget": ([*OURS, "--mtraining-vertical", "-5"], "--mtraining-vertical is -5"),
    "window": ([*OURS, "--window-size", "8,8"], "--window-size is 8 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_option_stops_all_ranks_with_one_message(name, tree):
    words, message = BAD[name]
    way = "patch" if name in ("length", "no backend") else "launcher"
    run = tree.run(way, 2, "--context-parallel-size", "2", *words, timeout=120)
    assert run.returncode != 0
    said = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and message in said[0], run.stderr[-4000:]
    assert "iteration " not in run.stdout


# Small, and without what needs a GPU, Transformer Engine or 16 bits; the rest is the recipe's.
RECIPE = f"""
    --transformer-impl local --num-layers 2 --hidden-size 128 --ffn-hidden-size 256
    --num-attention-heads 4 --kv-channels 64 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --yarn-original-max-position-embeddings 64
    --padded-vocab-size 512 --vocab-size 500 --lr 1e-4 --mtraining-block-size 64
    --mtraining-loss-chunk 100 --distributed-backend gloo --use-cpu-initialization
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion
"""
TORCHRUN = """#!{python}
import os, sys
words = sys.argv[1:]
at = words.index("-m")
command = [sys.executable, "-m", "torch.distributed.run", *words[:at], {shim!r}, *words[at:]]
os.execv(sys.executable, command)
"""


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_recipe_trains(recipe, tree, tmp_path):
    root = tree.roots["launcher"]
    tree.skip_without(RECIPE)
    text = TORCHRUN.format(python=sys.executable, shim=str(SHIM))
    recipes.command(tmp_path, "torchrun", text)
    run = recipes.start(
        recipes.EXAMPLES / recipe / "run.sh",
        root,
        *RECIPE.split(),
        commands=tmp_path,
        timeout=300,
        GPUS="2",
        ITERATIONS=str(STEPS),
        PYTHONPATH=str(root),
        OMP_NUM_THREADS="1",
    )
    found = losses(run)
    assert found[-1] < found[0] - 0.05
    assert len(densities(run)) == STEPS


SCRIPT = """
import json
import math
import sys
from megatron.core.tensor_parallel.random import checkpoint as before
from megatron.training import get_args
from megatron.core.tensor_parallel.random import checkpoint as after
from megatron.training import training
from megatron.training.arguments import parse_args, validate_args
from megatron.training.training import training_log

functions = [before, after, parse_args, validate_args, training_log, training.training_log]
print(json.dumps([getattr(function, "_mtraining_wrapper", False) for function in functions]))
if sys.argv[1:]:
    validate_args(parse_args())
"""


def test_any_script_of_a_patched_tree_has_the_plug_in(tree, tmp_path):
    """Not only pretrain_gpt.py: a backend that is chosen but not registered would run dense."""
    script = tmp_path / "another.py"
    script.write_text(SCRIPT)

    def run(*words):
        env = {**os.environ, "PYTHONPATH": str(tree.roots["patch"])}
        command = [sys.executable, str(script), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    registered = run()
    assert registered.returncode == 0, registered.stderr[-3000:]
    assert json.loads(registered.stdout.splitlines()[-1]) == [True] * 6
    # What pretrain_mamba.py is given.
    hybrid = run(*MODEL.split(), *TRAINING.split(), *OURS, "--hybrid-override-pattern", "M*")
    said = [line for line in hybrid.stderr.splitlines() if line.startswith("error: ")]
    assert hybrid.returncode == 1 and len(said) == 1, hybrid.stderr[-3000:]
    assert "use --hybrid-layer-pattern" in said[0]


def test_a_patched_tree_without_the_package(tree):
    """Other backends run; ours says what is missing, in every script."""
    root = tree.roots["patch"]
    code = (
        "import sys; sys.modules['megatron_mtraining'] = None; import runpy; "
        f"sys.path.insert(0, {str(root)!r}); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='not_main')"
    )

    def run(*words):
        command = [sys.executable, "-c", code, str(root / "pretrain_gpt.py"), *words]
        return subprocess.run(command, capture_output=True, text=True)

    chosen = run("--attention-backend", "mtraining")
    assert chosen.returncode == 1 and "needs the package megatron-mtraining" in chosen.stderr
    other = run("--attention-backend", "flash")
    assert other.returncode == 0, other.stderr[-3000:]


def test_prices_of_heads_go_on_from_a_checkpoint_in_another_layout(tree, tmp_path):
    """As without a stop, from a step in which they fall fast."""
    target = [*OURS, "--mtraining-target-recall", "0.9", "--mtraining-price", "20"]
    target += ["--save", tmp_path, "--load", tmp_path, "--ckpt-format", "torch_dist"]
    target += ["--train-iters", "5", "--save-interval", "2"]
    layout = ["--context-parallel-size", "2", "--tensor-model-parallel-size", "2"]

    def prices(run):
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        return [float(price) for price in re.findall(r"\[mtraining\].* \| price (\S+)", run.stdout)]

    whole = prices(tree.run("launcher", 4, *layout, *target))
    on = ["--ckpt-step", "2", "--tensor-model-parallel-size", "1"]
    on += ["--pipeline-model-parallel-size", "2"]
    resumed = prices(tree.run("launcher", 2, *target, *on))
    assert len(whole) == 5 and whole[4] < whole[2] / 2, whole
    assert resumed == pytest.approx(whole[2:], rel=0.01)
