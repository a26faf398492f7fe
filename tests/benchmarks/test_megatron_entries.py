# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The commands of benchmarks that run Megatron-LM, at a tiny size on the CPU, and the rows they leave."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from benchmarks.hosts import one_host
from benchmarks.lib import jobs, record
from benchmarks.model import conversations, long, sft
from tests.support.convert_cases import save
from tests.support.data_cases import save_tokenizer

SEQ = 512
RECIPE = """#!/usr/bin/env bash
set -euo pipefail
source "$MODEL/megatron_args.sh"
megatron=$1; shift
exec torchrun --standalone --nproc-per-node "$GPUS" -m megatron_mtraining.launch --cpu \\
  "$megatron/pretrain_gpt.py" "${MEGATRON_ARGS[@]}" --transformer-impl local --context-parallel-size "$CP" \\
  --micro-batch-size 1 --global-batch-size 1 --train-iters "$ITERATIONS" --lr 1e-3 \\
  --lr-decay-style constant --log-interval 1 --eval-iters 0 --eval-interval 1000 \\
  --no-create-attention-mask-in-dataloader \\
  --save "$CHECKPOINT" --save-interval "$SAVE_INTERVAL" --attention-backend mtraining \\
  --mtraining-block-size 64 ${RECALL:+--mtraining-target-recall "$RECALL"} "$@"
"""


@pytest.fixture
def megatron(tree, monkeypatch):
    """The folder of Megatron-LM, for processes that a benchmark starts; they import this checkout, too."""
    root = tree.roots["launcher"]
    folders = str(root), str(record.ROOT), os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    monkeypatch.setenv("MTRAINING_COMMIT", "a commit")
    return root


@pytest.mark.slow
def test_a_model_is_converted_trained_at_length_converted_back_and_judged(megatron, tmp_path):
    """A recipe in the place of those of examples/, which need a GPU."""
    recipe = tmp_path / "tiny" / "run.sh"
    recipe.parent.mkdir()
    recipe.write_text(RECIPE.replace("torchrun", f"{sys.executable} -m torch.distributed.run"))
    recipe.chmod(0o755)
    model = save("qwen2 tied", tmp_path / "hf")
    save_tokenizer(model, eos_token="<eod>")
    tokens = np.random.default_rng(0).zipf(1.5, 12000).clip(1, 300).astype(np.int32)
    np.savez(tmp_path / "tokens.npz", code=tokens)
    common = f"--folder {tmp_path}/run --seq 256 --cache {tmp_path}/tokens.npz --kinds code --device cpu "
    common += (
        f"--held-out 2 --needles 1 --megatron {megatron} --script {recipe} --steps 3 --name tiny"
    )
    long.main(["prepare", "--model", str(model), *common.split()])
    for setting, ranks in (("start", None), ("dense", 1), ("target@0.8", 2)):
        words = [*common.split(), "--setting", setting]
        if ranks:
            long.main(["train", *words, "--gpus", str(ranks)])
        long.main(["judge", *words])
    long.main(["table", *common.split(), "--output", str(tmp_path / "rows.jsonl")])
    dense, sparse = jobs.read(tmp_path / "rows.jsonl")
    # Nothing of the model is lost on the way, and the first loss is before any step.
    assert dense["losses"][0] == pytest.approx(sparse["losses"][0], abs=0.01)
    assert dense["loss"]["all"] < dense["before"]["loss"]["all"] - 0.1
    assert dense["own_loss_over_dense"] == dense["dense_loss_over_dense"] == 0
    assert 0.5 < sparse["own_density"] < sparse["density"] < 1 and sparse["gpus"] == 2
    assert 0 != sparse["own_loss_over_dense"] != sparse["dense_loss_over_dense"]
    assert abs(sparse["dense_loss_over_dense"]) < 0.02


@pytest.mark.slow
def test_documents_of_packed_conversations(megatron, checkout, tmp_path):
    """Of both layouts, and with everything kept and a pattern: weights are the same, and documents."""
    if "core_v0.16" in str(checkout):
        pytest.skip("Megatron-LM 0.16 has no such format of conversations")
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    folder, output = tmp_path / "chat", tmp_path / "rows.jsonl"
    conversations.main(f"{folder} --seq {SEQ} --packs 4 --vocabulary 300".split())
    common = f"{megatron} --folder {folder} --output {output} --device cpu --steps 3".split()
    for words in (
        "--label start --price 0 --cp 1 --save", "--label one --price 0 --cp 1",
        "--label kept --price 0 --like one",
        "--label sparse --like one --mtraining-slash 0 --mtraining-vertical 16 --mtraining-window 0",
    ):  # fmt: skip
        sft.main([*common, *words.split()])
    start, one, kept, sparse = jobs.read(output)
    assert start["losses"][-1] < start["losses"][0] and one["losses"][0] < start["losses"][0]
    assert sum(one["document_lengths"]) == SEQ and len(one["document_losses"]) > 1
    assert np.average(one["document_losses"], weights=one["document_lengths"]) == pytest.approx(
        one["losses"][0], abs=0.02
    ), "but for the last token, which has no next one"
    assert kept["density"] == 1 > sparse["density"] and kept["cp"] == 2 > one["cp"]
    assert kept["worst"] < 1e-5 > kept["worst_document"] and sparse["worst_document"] > 1e-5
    with pytest.raises(SystemExit):
        sft.main([*common, "--label", "another", "--folder", str(tmp_path)])


@pytest.mark.slow
def test_all_stages_of_one_host(megatron, checkout, tmp_path, capsys):
    """``layer.rings``, ``model.pretrain``, ``sparsebalance.ranks``, ``model.layouts``; a second call finds
    nothing missing."""
    if "core_v0.16" in str(checkout):
        pytest.skip("one checkout is enough, and the recipes' options need Megatron-LM 0.19")
    out = tmp_path / "out"
    words = ["--output-folder", str(out), "--scratch", str(tmp_path / "scratch"), "--gpus", "2"]
    words += ["--device", "cpu", "--tiny", "--megatron", str(megatron)]
    one_host.main(words)
    said = capsys.readouterr().out
    log = (out / one_host.LOG).read_text()
    assert "0 of 10 jobs are missing" in said and "failed" not in said, said + log[-6000:]
    pruned = [row for row in jobs.read(out / "rings.jsonl") if row["backward_threshold"]]
    # A mean over ranks, which have not quite the same number of pairs.
    assert all(0 < row["backward_density"] <= 1.05 * row["density"] for row in pruned)
    fixed, priced = jobs.read(out / "pretrain.jsonl")
    assert fixed["vertical"] == 64 and "backward_density" not in fixed
    assert priced["price"] == 0.25 and 0 < priced["density"] < 1
    off, both = jobs.read(out / "sparsebalance.jsonl")
    assert off["losses"] == pytest.approx(both["losses"], abs=1e-4), "the same samples in each step"
    assert off["attention_ms"] > 0 and off["multipliers"] == [1, 1]
    losses = {row["layout"]: row for row in jobs.read(out / "layouts.jsonl")}
    assert losses["CP 1, again"]["equal"] and losses["CP 2"]["within"]
    before = {path: path.read_bytes() for path in out.iterdir()}
    one_host.main(words)
    assert before == {path: path.read_bytes() for path in out.iterdir()}
