# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Each benchmark's command at a tiny size on the CPU, and the rows that it leaves.

``kernels.selection`` has no way without CUDA: it is imported. The cases of ``kernels.peers`` run in
``test_peers.py``, and what needs a Megatron-LM checkout in ``test_megatron_entries.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.kernels import attention, backward_paths
from benchmarks.lib import jobs, record
from benchmarks.tools import ruler_agreement
from tests.support import eval_cases
from tests.support.frontier_cases import zero_row
from tests.support.inspect_cases import save_model
from tests.support.operands import write_operands
from tests.support.running import torchrun_command

Rows = list[dict]
SEQ = 512
TINY = attention.Case("tiny", 1024, 2, 1, 64, 0.3, 0)
HEADS = dict(heads=2, kv_heads=1, dim=64)


class Entry(NamedTuple):
    """Command lines of one benchmark, in their order; ``{name}`` is a file of the fixture ``files``."""

    module: str
    lines: list[str]
    check: Callable[[Rows], object]
    patches: dict[str, object] | None = None


def positive(rows: Rows, *names: str) -> None:
    assert rows and all(row[name] > 0 for row in rows for name in names)


def of_attention(rows: Rows) -> None:
    positive(rows, "ms", "density", "share_of_cudnn")
    assert [(row["op"], row["impl"]) for row in rows] == [
        (op, impl) for op in ("forward", "backward") for impl in ("mtraining", "cudnn")
    ]


def of_backward_paths(rows: Rows) -> None:
    positive(rows, "ms")
    assert [row["path"] for row in rows] == ["two_kernels", "one_pass_64"]
    assert rows[0]["difference"] == 0 and rows[1]["difference"] < 1e-2


def of_numerics(rows: Rows) -> None:
    assert {row["impl"] for row in rows} == {"mtraining", "math"}
    assert all(1e-5 < row["error"] < 1e-2 for row in rows)


def of_short_layers(rows: Rows) -> None:
    assert [row["search"] for row in rows] == ["kernels", "graph", "dense"]
    for what in ("host_us", "back_to_back_us"):
        positive(rows, *(f"{part}_{what}" for part in ("forward", "backward")))
        positive(rows[:2], f"search_{what}")


def of_balance(rows: Rows) -> None:
    """Three drawn patterns, and a layer's own as found and stretched; 8 ranks as 2 nodes of 4."""
    assert len({row["pattern"] for row in rows}) == 5
    assert {(row["world"], row["inner"], row["nodes"]) for row in rows} == {(8, 4, 2)}
    positive(rows, "density", "exposed", "worker_imbalance")


def of_patterns(rows: Rows) -> None:
    assert {row["policy"] for row in rows} == {"price", "coverage", "xattention", "moba"}
    for row in rows:
        assert 0 < row["density"] <= 1 and 0 < row["recall"] < 1 + 1e-6
        assert (row["model"], row["text"]) == ("model", "ids.npy"), "names, and no folders"


def of_real_operands(rows: Rows) -> None:
    sparse, dense, blocks, kernels = rows
    assert blocks["block_threshold"] == 0.9 and blocks["density"] <= 1
    assert sparse["price"] == 0.31 and sparse["backward_density"] == sparse["density"] <= 1
    assert dense["density"] == 1 > dense["backward_density"] > 0
    assert dense["dense_forward_ms"] == sparse["dense_forward_ms"] > 0, "one measurement beside all"
    assert kernels["kernels"] == "own" and kernels["density"] == 1 and "price" not in kernels


def of_gradients(rows: Rows) -> None:
    found = {(row["what"], row["threshold"]): row for row in rows}
    assert len(rows) == len(found) == 3, "what is there is not made again"
    kept, pruned = found["pruned", 1e-6], found["pruned", 4.0]
    assert kept["backward_density"] == 1 > pruned["backward_density"]
    assert kept["err_grad"] < 1e-4 and pruned["loss"] == pytest.approx(kept["loss"], rel=1e-6)
    assert kept["err_grad"] < pruned["err_grad"] < found["another window", 0.0]["err_grad"]


def of_backward(rows: Rows) -> None:
    plain, pruned, *times = rows
    assert plain["before_dense"] == pytest.approx(pruned["before_dense"], rel=1e-5)
    assert plain["backward_density"] == 1 > pruned["backward_density"]
    assert [row["backward_density"] < 1 for row in times] == [False, True]
    positive(times, "backward_ms", "dense_backward_ms")


def of_zero(rows: Rows) -> None:
    assert [row["policy"] for row in rows] == ["dense", "published", "price", "moba"]
    assert rows[0]["zero_over_dense"] == 0 and rows[0]["density"] == 1
    for row in rows[2:]:
        assert row["reached"] and row["density"] == pytest.approx(0.6, rel=0.2)
        over = row["loss"] / row["dense_loss"] - 1
        assert row["zero_over_dense"] == pytest.approx(over, abs=1e-5) != 0


def of_time(rows: Rows) -> None:
    assert [row["policy"] for row in rows] == ["price", "window"]
    positive(rows, "forward_ms", "backward_ms", "search_ms", "dense_forward_ms")


def of_train(rows: Rows) -> None:
    """Training and its ablations: a base's row of ``zero``, four runs, then the joined table."""
    runs = {row["policy"]: row for row in rows if row.get("stage") == "train"}
    assert list(runs) == ["dense", "price", "target", "schedule"]
    dense, price = runs["dense"], runs["price"]
    assert dense["own"] == dense["dense"] and dense["density"] == dense["recall"] == 1
    assert price["before_dense"] == dense["before_dense"], "the same weights and data"
    assert price["own"] != price["dense"] and 0 < price["recall"] < 1
    assert all(row["own"] < row["before_own"] and len(row["losses"]) == 3 for row in runs.values())
    assert runs["schedule"]["own"] == runs["schedule"]["dense"], "it ends with dense attention"
    changed = {row["variant"]: row for row in rows if row.get("variant")}
    assert list(changed) == ["cool-10", "once", "first-layers"]
    # The first two steps are the base's; the last one is dense.
    assert changed["cool-10"]["losses"][:2] == price["losses"][:2]
    assert changed["cool-10"]["dense_share"] == pytest.approx(1 / 3, abs=1e-3)
    assert changed["once"]["losses"] != price["losses"] and changed["once"]["recall"] is None
    assert changed["first-layers"]["density"] == 1, "the tiny model has two layers"


def of_recomputation(rows: Rows) -> None:
    assert [row["setting"] for row in rows] == ["result kept", "pattern kept", "nothing kept"]
    assert rows[0]["over_base"] == 1


def of_later_tokens(rows: Rows) -> None:
    """A causal policy does not see what comes later; block_lookahead does."""
    dense, ahead, previous = ([each["difference"] for each in row["measured"]] for row in rows)
    assert [row["policy"] for row in rows] == ["dense", "moba", "moba_previous"]
    assert dense == pytest.approx([0, 0, 0], abs=1e-5) == previous
    assert max(map(abs, ahead)) > 1e-5


def of_loss(rows: Rows) -> None:
    assert [(row["tokens"], row["impl"], row["main_grad"]) for row in rows] == [
        (96, "chunked", False), (96, "chunked", True), (96, "megatron", None),
    ]  # fmt: skip
    positive(rows, "fwd_ms", "bwd_ms")


def of_rings(rows: Rows) -> None:
    positive(rows, "fwd_ms", "kernel_fwd_ms", "hop_gb_s", "density")
    chosen, everything = rows
    assert (chosen["vertical"], chosen["slash"], everything["density"]) == (64, 30, 1)


def of_convert(rows: Rows) -> None:
    [row] = rows
    assert row["identical"] and row["shards"] > 2 and row["layers"] == 3


def of_ruler_agreement(rows: Rows) -> None:
    [row] = rows
    assert row["samples"] == row["same_prompts"] == row["same_answers"] == row["same_scores"] == 2
    assert row["score"] == row["score_lm_eval"] and ruler_agreement.agrees(row)
    assert not ruler_agreement.agrees({**row, "same_answers": 1})
    assert not ruler_agreement.agrees({**row, "score_lm_eval": row["score"] + 1e-5})


def of_layer_prices(rows: Rows) -> None:
    measured, dense, same, layers = rows
    assert [row.get("run") for row in rows] == [None, "dense", "same", "layers"]
    assert len(set(measured["prices"])) > 1 and layers["prices"] == measured["prices"]
    assert dense["density"] == 1 >= same["density"] > 0
    assert np.mean(measured["own_density"]) == pytest.approx(np.mean(measured["density"]), rel=0.1)


FROM_A_MODEL = (
    "--model {model} --device cpu --cache {tokens} --tokens 100000 --no-code --text code={code} --seq 512 "
    "--block-size 64"
)
TRAINING = f"{FROM_A_MODEL} --kinds code --held-out 2 --needles 1 --jobs 1 --lr 1e-3 --warm-up 1"
BASE = f"--base price@0.6 --steps 3 --frontier {{output}} {TRAINING}"
ON_THE_CPU = {
    "kernels.attention.TURN": 1e-3,
    "kernels.attention.DENSE": dict(cudnn=torch.nn.attention.SDPBackend.MATH),
    "kernels.attention.CASES": [TINY],
    "kernels.attention.run_case": partial(attention.run_case, device="cpu"),
}
FEWER = {
    "model.patterns.PRICES": (0.3, 1.0), "model.patterns.COVERAGES": (0.7, 0.9),
    "model.patterns.THRESHOLDS": (0.7, 0.9),
}  # fmt: skip
FAST = [
    Entry("kernels.attention", ["--impl mtraining cudnn"], of_attention, ON_THE_CPU),
    Entry("kernels.backward_paths", [""], of_backward_paths, {
        "kernels.attention.TURN": 1e-3, "kernels.backward_paths.CASES": [TINY],
        "kernels.backward_paths.run_case": partial(backward_paths.run_case, device="cpu", cudnn=False)}),
    Entry("kernels.numerics", ["--device cpu --seq 640 --dim 64 --dtype bfloat16"], of_numerics,
          {"kernels.numerics.SHAPES": {64: (4, 2)}}),
    Entry("layer.balance", ["--data {operands} --world 8 --inner 4"], of_balance,
          {"layer.balance.SEQ": 4096, "layer.balance.HEADS": 2}),
    Entry("model.patterns", [
        "--model {model} --text {ids} --seq 384 --rows 51 --oracle-rows 64 --device cpu",
    ], of_patterns, FEWER),
    Entry("model.real_operands",
          [f"{FROM_A_MODEL} --text-kind code --layers 1 --settings 0.31 0:3 xattention@0.9 dense"],
          of_real_operands),
    Entry("model.backward",
          2 * [f"gradient {TRAINING} --forward dense --thresholds 0.000001 4"], of_gradients),
]  # fmt: skip
SLOW = [
    Entry("layer.short_layers", ["--seq 1024"], of_short_layers, {
        "layer.short_layers.ROUNDS": 1, "layer.short_layers.RUNS": 1, "layer.short_layers.WARM_UP": 1,
        "layer.short_layers.SHAPE": HEADS}),
    Entry("model.frontier", [f"zero {TRAINING} --densities 0.6 --policies price moba"], of_zero),
    Entry("model.frontier", [
        f"time {TRAINING} --densities 0.6 --policies price window --lengths 1024 --shape 2 1 64"], of_time),
    Entry("model.layer_prices", [f"measure {TRAINING} --price 0.6",
                                 f"train {TRAINING} --steps 2 --curve"], of_layer_prices),
    Entry("model.ablations", [
        f"time {TRAINING} --base moba@0.6 --lengths 1024 --shape 2 1 64"], of_recomputation),
    Entry("model.backward", [
        f"train {TRAINING} --forward dense --thresholds 4 --steps 2 --seeds 1",
        f"time {TRAINING} --forward dense --thresholds 4 --lengths 512 --shape 2 1 64",
    ], of_backward),
    Entry("model.later_tokens", [
        f"{TRAINING} --seq 1024 --steps 1 --curve --frontier {{output}} "
        "--run dense moba@0.5 moba_previous@0.5",
    ], of_later_tokens, {"model.later_tokens.CUTS": 2, "model.later_tokens.COPIES": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A model, texts, and queries and keys."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("files")
    (folder / "code.txt").write_text(Path(np.__file__).read_text()[:40000])
    np.save(folder / "ids.npy", torch.randint(64, (640,)).numpy())
    (folder / "operands").mkdir()
    write_operands(folder / "operands" / "layer.safetensors", 4096)
    return dict(
        model=save_model(folder / "model"), code=folder / "code.txt", ids=folder / "ids.npy",
        tokens=folder / "tokens.npz", operands=folder / "operands",
    )  # fmt: skip


def run(entry: Entry, files, monkeypatch) -> None:
    """As ``python -m`` runs the lines, but in this process."""
    module = importlib.import_module(f"benchmarks.{entry.module}")
    for name, value in (entry.patches or {}).items():
        monkeypatch.setattr(f"benchmarks.{name}", value)
    monkeypatch.setenv("MTRAINING_COMMIT", "a commit")
    for line in entry.lines:
        words = [word.format(**files) for word in shlex.split(line)]
        words = [module.__file__, *words, "--output", str(files["output"])]
        monkeypatch.setattr(sys, "argv", words)
        assert not module.main()


def check_rows(entry: Entry, files, tmp_path, monkeypatch) -> None:
    """The rows say how they were made, and are what the entry's check says."""
    files = {**files, "output": tmp_path / "rows.jsonl"}
    run(entry, files, monkeypatch)
    rows = jobs.read(files["output"])
    for row in rows:
        assert (row["commit"], row["gpu"], row["torch"]) == ("a commit", "none", torch.__version__)
        assert f"python -m benchmarks.{entry.module}" in row["command"]
        assert str(tmp_path) not in row["command"] and str(files["model"]) not in row["command"]
    entry.check(rows)


ENTRIES = [*FAST, *(pytest.param(entry, marks=pytest.mark.slow) for entry in SLOW)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: f"{each.module} {each.check.__name__}")
def test_rows(entry, files, tmp_path, monkeypatch):
    check_rows(entry, files, tmp_path, monkeypatch)


def test_what_needs_a_gpu_is_imported():
    assert importlib.import_module("benchmarks.kernels.selection").main


def test_a_conversion_there_and_back(tmp_path, monkeypatch):
    """In this process; then one byte is not what it was."""
    from benchmarks.tools import convert
    from tests.support.convert_cases import convert as run_convert

    def converted(way, source, folder, *words):
        assert run_convert(way, source, folder, *words) == 0
        if spoilt and way == "megatron-to-hf":
            file = sorted(folder.glob("*.safetensors"))[0]
            file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        return 1.0, 10**9

    monkeypatch.setattr(convert, "apart", lambda function, *words: function(*words))
    monkeypatch.setattr(convert, "converted", converted)
    words = f"time --shape tiny --layers 3 --shard-bytes 100KB --folder {tmp_path}".split()
    monkeypatch.setattr(sys, "argv", ["convert", *words, "--output", str(tmp_path / "rows.jsonl")])
    spoilt = False
    assert convert.main() == 0
    of_convert(jobs.read(tmp_path / "rows.jsonl"))
    spoilt = True
    assert convert.main() == 1


@pytest.mark.slow
def test_recorded_heads(files, tmp_path, monkeypatch):
    from benchmarks.model import recorded_heads

    monkeypatch.setattr(recorded_heads, "OUTPUT", tmp_path / "heads.json")
    words = ["heads", str(files["model"]), "--text", str(files["code"]), "--tokens", "512"]
    monkeypatch.setattr(sys, "argv", words)
    recorded_heads.main()
    found = json.loads((tmp_path / "heads.json").read_text())
    assert found["heads"] and all(0 < each["density"] <= 1 for each in found["heads"])


@pytest.mark.slow
def test_training_and_its_ablations(files, tmp_path, monkeypatch):
    output = tmp_path / "runs.jsonl"
    # Of the model as it is, which says the setting: it is not looked for.
    row = zero_row("price", 0.6, 0.02) | dict(model="model", seq=SEQ, block_size=64, reached=True)
    output.write_text(json.dumps(row | dict(setting=dict(policy="price", price=0.7))) + "\n")
    runs = "--run dense price@0.6 target@0.9 schedule@0:0.7,0.5:0 --seeds 1 --steps 3"
    lines = [f"train {TRAINING} {runs}", f"table {TRAINING}"]
    run(Entry("model.frontier", lines, of_train), {**files, "output": output}, monkeypatch)
    lines = [f"train {BASE.replace('{output}', str(output))} --variants cool-10 once first-layers"]
    other = {**files, "output": tmp_path / "ablations.jsonl"}
    run(Entry("model.ablations", lines, of_train), other, monkeypatch)
    of_train([*jobs.read(output), *jobs.read(other["output"])])
    joined = jobs.read(tmp_path / "frontier.jsonl")
    assert any(row["policy"] == "price" and row["trained_own_over_dense"] for row in joined)


def of_sequences(rows: Rows) -> None:
    pattern, dense = rows
    assert pattern["losses"] == pytest.approx(dense["losses"], rel=0.05)
    assert 0 < pattern["densities"][-1] < 1 and not dense["densities"]
    assert all(row["step_s"] > 0 and row["gpus"] == 2 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernels.loss", "layer.rings", "model.sequences"])
def test_rows_of_other_processes(name, tmp_path):
    """Of process groups, which this process has none of."""
    output = tmp_path / "rows.jsonl"
    if name == "kernels.loss":
        words = "--tokens 96 --hidden 64 --vocab 500 --chunk 7 --rounds 2 --impl chunked megatron"
        command, environment = [sys.executable], dict(os.environ)
    else:
        words = "--seq 1024 --shape 2 1 64 --budget 0 --case"
        if name == "model.sequences":
            words = "--shape tiny --lengths 1K --steps 2 --settings price=1.0 dense"
        command, environment = torchrun_command(2)
    words = [*words.split(), *(["3500 columns", "all distances"] if "rings" in name else [])]
    done = subprocess.run(
        [*command, "-m", f"benchmarks.{name}", *words, "--device", "cpu", "--output", str(output)],
        env={**environment, "MTRAINING_COMMIT": "a commit"}, cwd=record.ROOT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check = {"kernels.loss": of_loss, "layer.rings": of_rings, "model.sequences": of_sequences}
    check[name](jobs.read(output))


@pytest.mark.slow
def test_both_commands_on_ruler(files, tmp_path, monkeypatch):
    for name in ("lm_eval", "punkt"):
        if find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")
    line = f"--model {{model}} --data {eval_cases.ruler_data(tmp_path / 'data')} --tasks qa_squad"
    line += f" --length 1024 --samples 2 --folder {tmp_path}/runs"
    entry = Entry("tools.ruler_agreement", [line], of_ruler_agreement)
    longer = {**files, "model": eval_cases.save_model(tmp_path / "model")}
    check_rows(entry, longer, tmp_path, monkeypatch)


@pytest.mark.slow
def test_prompts_of_ruler_have_their_answers(files, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from benchmarks.model import ruler_samples
    from megatron_mtraining.models.tokenizer import transformers_tokenizer

    line = "--model {model} --length 2048 --samples 2 --tasks niah_single_1"
    output = tmp_path / "ruler.npz"
    run(Entry("model.ruler_samples", [line], len), {**files, "output": output}, monkeypatch)
    decode = transformers_tokenizer(files["model"]).decode
    found = ruler_samples.read(output, "cpu")["niah_single_1"]
    assert len(found) == 2
    for tokens, answer in found:
        assert 1024 < len(tokens) <= 2048
        assert f"is: {decode(tokens[-answer:]).strip()}." in decode(tokens[:-answer])
