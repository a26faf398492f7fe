# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What trains with which Megatron-LM: short runs on the CPU, beside Megatron's own attention.

    python -m benchmarks.matrix MEGATRON_LM [MEGATRON_LM ...] [--only REGEX]

Each case is run with Megatron's attention in the layout whose weights it has, then with ours and everything
kept, whose losses and gradient norms must be equal, and then with a pattern. Appends rows to
``results/compatibility.jsonl``, of which docs/compatibility.md has the last of each case and version.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.support.pretrain_tree import FULL, GPT, INTER_DOCUMENT, PACKING, Tree
from tests.support.ranks import FORKS, ON_CPU, run_script

from .lib import record
from .model.pretrain import megatron_version

STEPS = 4
OURS = "--attention-backend mtraining --mtraining-block-size 64 "
KEPT = OURS + "--mtraining-price 0 "
PATTERN = OURS + "--mtraining-slash 0 --mtraining-vertical 16 --mtraining-window 0 "
CP, TP, PP, EP = (
    f"--{kind}-parallel-size 2 "
    for kind in ("context", "tensor-model", "pipeline-model", "expert-model")
)
NODES = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 "
PER_TOKEN = "--calculate-per-token-loss "
DOCUMENTS = f"--reset-attention-mask --reset-position-ids {PACKING} "
EXPERTS = "--num-experts 4 --moe-router-topk 2 "
EXPERTS += "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
FSDP += "--no-gradient-reduce-div-fusion "
FSDP += "--ckpt-format fsdp_dtensor "
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
YARN = "--position-embedding-type yarn --rotary-base 1000000 --rotary-scaling-factor 16 "
YARN += "--yarn-original-max-position-embeddings 32 "
HYBRID = (
    "tests.support.hybrid_models hybrid_stack_spec"  # Megatron-LM's own needs Transformer Engine
)
GATED = "--deterministic-mode --linear-key-head-dim 16 --linear-value-head-dim 32 "
GATED += "--linear-num-key-heads 4 --linear-num-value-heads 8 "
MAMBA = "--mamba-state-dim 8 --mamba-num-groups 2 "
MTP = "--mtp-num-layers 1 " + PER_TOKEN


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        processes, words: of the run, beside the backend's options.
        alone, dense: processes and words of the run of Megatron's own attention.
        script: of Megatron-LM.
    """

    processes: int
    words: str
    alone: int = 1
    dense: str = ""
    script: str = GPT


def of_model(words: str) -> Case:
    """A kind of model, over two context-parallel ranks."""
    return Case(2, CP + words, 1, words)


def hybrid(pattern: str, more: str = "") -> Case:
    words = f"--hybrid-layer-pattern {pattern} --spec {HYBRID} {more}"
    return Case(2, CP + words, 1, words, "pretrain_hybrid.py")


CASES = {
    "layouts": {
        "one process": Case(1, ""),
        "CP 2": of_model(""),
        "CP 4, inner groups of 2": Case(4, NODES),
        "TP 2 x CP 2": Case(4, TP + CP),
        "PP 2 x CP 2": Case(4, PP + CP, 2, PP),
        "PP 2, interleaved": Case(
            2, PP + "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 ", 2,
            PP + "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 ",
        ),
        "DP 2 x CP 2, distributed optimizer, overlapped": Case(4, CP + OVERLAPPED),
        "Megatron-FSDP, CP 2": Case(2, CP + FSDP, 2, FSDP),
        "EP 2 x CP 2": Case(2, CP + EP + EXPERTS, 2, EP + EXPERTS),
    },
    "models": {
        "experts": of_model(EXPERTS),
        "QK norm": of_model("--qk-layernorm "),
        "attention output gate": of_model("--attention-output-gate "),
        "partial rotary embedding": of_model("--rotary-percent 0.25 "),
        "layers without positions": of_model("--no-rope-freq 2 "),
        "YaRN": of_model(YARN),
        "head dimension 256": of_model("--kv-channels 256 "),
        "sliding windows": of_model("--window-size 100,0 --window-attn-skip-freq 2 "),
        "softmax off by one": of_model("--softmax-type off-by-one "),
        "learnable sinks": of_model("--softmax-type learnable "),
        "multi-token prediction": of_model(MTP),
        "HybridModel of attention and MLP": hybrid("*-*-"),
        "HybridModel with experts": hybrid("*E*E", EXPERTS),
        "HybridModel with gated delta net": hybrid("G-*-", GATED),
        "HybridModel with Mamba": hybrid("M-*-", MAMBA),
    },
    "batches": {
        "micro-batch of 2": of_model("--micro-batch-size 2 "),
        "documents (--reset-attention-mask)": Case(2, CP + DOCUMENTS, 1, DOCUMENTS),
        "documents (--reset-attention-mask), PP 2": Case(2, PP + DOCUMENTS, 2, PP + DOCUMENTS),
        f"documents ({INTER_DOCUMENT})": Case(
            2, f"{CP}{INTER_DOCUMENT} {PACKING} ", 1, DOCUMENTS
        ),
    },
    "more": {
        "recompute, full": of_model(FULL),
        "recompute, selective": of_model("--recompute-granularity selective "),
        "loss in chunks": Case(2, CP + "--mtraining-loss-chunk 100 "),
    },
}  # fmt: skip


class Runs:
    """Runs with one checkout; those of Megatron's own attention once each."""

    def __init__(self, checkout: Path, folder: Path):
        self.tree = Tree(checkout, folder)
        sys.path.insert(
            0, str(self.tree.roots["launcher"])
        )  # of the process that ranks are forked from
        os.environ["PYTHONPATH"] = os.pathsep.join((sys.path[0], os.environ.get("PYTHONPATH", "")))
        # Functions that are compiled are made in that process, before it answers for a GPU.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["NCCL_ALGO"] = "Ring"  # Megatron asks for it with --deterministic-mode
        FORKS.set_forkserver_preload(
            ["megatron.training.training", "megatron.core.datasets.gpt_dataset"]
        )
        self._dense: dict = {}

    def run(self, case: Case, way: str, processes: int, words: str):
        root = self.tree.roots["launcher"]
        if not (root / case.script).exists():
            return None
        given = f"{words} --train-iters {STEPS} --num-workers 0".split()
        command, _ = self.tree.command(way, *given, script=case.script)
        # Megatron-FSDP refuses 1, which other layouts ask for.
        with mock.patch.dict(ON_CPU, CUDA_DEVICE_MAX_CONNECTIONS="8" if "fsdp" in words else "1"):
            return run_script(processes, *command)

    def dense(self, case: Case):
        at = case.script, case.alone, case.dense
        if at not in self._dense:
            self._dense[at] = self.run(case, "plain", case.alone, case.dense)
        return self._dense[at]


def figures(run, what: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{what}: (\S+)", run.stdout)]


def why(run) -> str:
    """The error that a run has ended with."""
    lines = run.stdout.splitlines() or [f"exit code {run.returncode}"]
    said = [line for line in lines if re.match(r"error: |\S*Error\b|.*\.py: error: ", line)]
    return (said or lines[-1:])[0][:300]


def verdict(runs: Runs, case: Case) -> dict:
    """``outcome``: equal, differs, refused, fails, or missing (Megatron's own run fails, or it has no such
    option); and why."""
    dense = runs.dense(case)
    if dense is None:
        return dict(outcome="missing", why=f"no {case.script}")
    ours = runs.run(case, "launcher", case.processes, KEPT + case.words)
    if dense.returncode:
        return dict(outcome="missing", why=why(dense))
    if ours.returncode:
        said = why(ours)
        outcome = "refused" if said.startswith("error: ") else "fails"
        return dict(outcome="missing" if "unrecognized arguments" in said else outcome, why=said)
    found, wanted = (figures(run, "lm loss") for run in (ours, dense))
    norms = [figures(run, "grad norm") for run in (ours, dense)]
    if not len(found) == len(wanted) == STEPS:
        return dict(outcome="fails", why=f"{len(found)} and {len(wanted)} of {STEPS} losses")
    loss = max(abs(a - b) for a, b in zip(found, wanted))
    norm = max(abs(a / b - 1) for a, b in zip(*norms))
    result = dict(loss_difference=loss, norm_difference=norm)
    if loss > (1e-4 if PACKING in case.words else 1e-5) or norm > 2e-3:
        return dict(outcome="differs", **result)
    sparse = runs.run(case, "launcher", case.processes, PATTERN + case.words)
    losses = figures(sparse, "lm loss")
    trains = sparse.returncode == 0 and len(losses) == STEPS and losses[-1] < losses[0]
    if not trains:
        return dict(outcome="fails", why=f"with a pattern: {why(sparse)}", **result)
    density = re.findall(r"\| density ([0-9.]+) ", sparse.stdout)
    return dict(
        outcome="equal", pattern_loss=losses[-1], pattern_density=float(density[-1]), **result
    )


def main() -> None:
    parser = record.parser(__doc__, "compatibility.jsonl")
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="MEGATRON_LM")
    parser.add_argument("--only", default="", help="cases whose name has this regular expression")
    args = parser.parse_args()
    for checkout in args.checkouts:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(checkout, Path(folder))
            for group, cases in CASES.items():
                for name, case in cases.items():
                    if not re.search(args.only, name):
                        continue
                    row = dict(
                        megatron=megatron_version(checkout), group=group, case=name, steps=STEPS
                    )
                    try:
                        found = verdict(runs, case)
                    except AssertionError as error:  # a run that does not end
                        found = dict(outcome="fails", why=f"{error}"[:200])
                    row |= dict(words=case.words.strip(), **found)
                    print(row["megatron"], name, row["outcome"], row.get("why", ""), flush=True)
                    record.append(args.output, [row])


if __name__ == "__main__":
    sys.exit(main())
