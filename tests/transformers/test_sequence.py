# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Sequence parallel training of transformers' models: ranks with parts of the tokens find what one process
with all of them finds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.ranks import run_ranks
from tests.support.sequence_cases import (
    evaluate,
    evaluate_ranks,
    model_of,
    refusals,
    refusals_of_a_ring,
    run_page,
    train,
    train_groups,
    train_ranks,
)


def assert_as_alone(world, cases):
    """Losses, gradients, means and prices; means and prices have the same bits on all ranks."""
    results = run_ranks(world, train_ranks, cases)
    for (*case, more), *found in zip(cases, *results, strict=True):
        expected = train(*case, **more)
        # Prices of later steps are rounded otherwise.
        atol = 3e-6 if more.get("steps", 1) == 1 else 3e-5
        for each in found:

            def message(text, name=f"{case}, {more}"):
                return f"{name}: {text}"

            torch.testing.assert_close(
                each["loss"], expected["loss"], rtol=1e-6, atol=1e-6, msg=message
            )
            torch.testing.assert_close(
                each["gradients"], expected["gradients"], rtol=1e-4, atol=atol, msg=message
            )
            torch.testing.assert_close(
                each["means"], expected["means"], rtol=1e-5, atol=1e-5, equal_nan=True, msg=message
            )
            torch.testing.assert_close(
                each["means"], found[0]["means"], rtol=0, atol=0, equal_nan=True, msg=message
            )
            assert each["prices"] == found[0]["prices"]
            if expected["prices"] is not None:
                prices = [torch.tensor(one["prices"]) for one in (each, expected)]
                torch.testing.assert_close(*prices, rtol=1e-4, atol=1e-4, msg=message)
            if expected["history"] is not None:  # a step weighs as much on any number of ranks
                weights = [one["history"]["most_seen"] for one in (each, expected)]
                assert weights[0] == pytest.approx(weights[1], rel=1e-5)


def test_two_ranks():
    assert_as_alone(
        2,
        [
            ("llama", "dense", "packed", dict(wrap="ddp")),
            ("llama", "price", "plain", dict(wrap="fsdp", layers=2)),
            ("llama", "fixed", "padded", dict(reentrant=False)),
            ("llama", "price", "odd", dict(lora=8)),
            ("six heads, three KV heads", "price", "one", dict()),
            ("gpt-oss", "fixed", "packed", dict(layers=2)),
        ],
    )


def test_four_ranks():
    assert_as_alone(
        4,
        [
            ("llama", "fixed", "packed", {}),
            ("one KV head", "price", "padded", dict()),
        ],
    )


def test_ranks_that_cannot_share_the_heads_are_a_ring():
    kind = "six heads, three KV heads"
    assert_as_alone(
        4,
        [
            (kind, "price", "packed", dict(reentrant=False)),
            (kind, "fixed", "padded after", {}),
            (kind, "targets of heads", "plain", dict(steps=2)),
            (kind, "fixed", "odd", {}),
            (kind, "dense", "numbered", dict(wrap="fsdp")),
            ("gpt-oss, six heads", "price", "one", dict(layers=2)),
        ],
    )
    for tail, padding in run_ranks(4, refusals_of_a_ring):
        assert "dense_tail is 40, and the ranks of sequence_parallel, which cannot share" in tail
        assert "batch entry 0 has 70 tokens of padding before its own" in padding


def test_data_parallel_groups():
    case = "llama", "target", "plain", 2  # steps
    expected = train(*case)
    for found in run_ranks(4, train_groups, case):
        for name in ("loss", "gradients"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=3e-6)
        assert found["prices"] == pytest.approx(expected["prices"], abs=1e-4)


def test_prices_move_alike_on_all_ranks():
    """Of each head, of which a rank has some, and one for all."""
    cases = [("llama", name, "one", dict(steps=2)) for name in ("target", "targets of heads")]
    assert_as_alone(2, cases)


def test_heads_of_a_settings_file_and_a_pruned_backward(tmp_path):
    path = tmp_path / "settings.json"
    heads = {"1": {"dense": True}, "2": {"price": 2.0}}
    path.write_text(json.dumps({"layers": {"0": {"heads": heads}}}))
    config = dict(price=0.5, window=64, block_size=64, sample_strata=8, settings=str(path))
    assert_as_alone(2, [("llama", config, "one", {}), ("llama", "pruned", "one", {})])


@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("kind", ("llama", "one KV head", "gpt-oss", "Gemma 3"))
def test_all_together(kind, world):
    cases = [
        (kind, settings, what, dict(layers=2))
        for settings in ("dense", "fixed", "price")
        for what in ("plain", "packed", "padded", "odd", "numbered", "seq_idx")
    ]
    cases += [(kind, "price", "packed", dict(layers=2, reentrant=each)) for each in (True, False)]
    cases += [(kind, "targets of heads", "one", dict(layers=2, steps=3))]
    assert_as_alone(world, cases)


def test_evaluation_is_of_parts_or_of_whole_sequences():
    """What is cut says so; answers are generated on each rank alone, of prompts of any length."""
    results, expected = run_ranks(2, evaluate_ranks), evaluate()
    for found in results:
        for name in ("loss", "logits", "density"):
            torch.testing.assert_close(
                found[name], expected[name], rtol=1e-4, atol=1e-4, equal_nan=True
            )
    assert results[0]["answer"].equal(expected["answer"]) and results[1]["length"] == 320


def test_the_lines_of_the_page(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "sequence_parallel=group" in block]
    model = model_of("llama", 1)
    model.save_pretrained(tmp_path)
    before = [weight.detach() for weight in model.parameters()]
    (weights, prices), other = run_ranks(2, run_page, code, str(tmp_path))
    torch.testing.assert_close((weights, prices), other, rtol=0, atol=0)
    assert not any(a.equal(b) for a, b in zip(before, weights))


def test_what_is_refused_is_refused_on_every_rank():
    told = run_ranks(2, refusals)
    assert told[0] == told[1]
    for name, words in {
        "group": "sequence_parallel: the process group is a int: give one of torch.distributed",
        "linear attention": "layer 0 of .* has linear attention, which needs whole sequences",
        "rope": "rope_type 'dynamic', which goes by the length",
        "tokens counted": "attn_temperature_tuning, which counts the tokens that a rank has",
        "settings": "the ranks of sequence_parallel must be started alike, but --mtraining-p.* rank 1",
        "lengths": r"the shape of input_ids is \(1, 192\) on rank 0, \(1, 182\) on rank 1",
        "no positions": r"position_ids are missing: .*cut_batch\(batch, group\)",
        "no positions on one rank": "the shape of position_ids is .* on rank 0, nothing on rank 1",
        "positions that skip": "give an attention_mask of ones",
        "ends": "cu_seq_lens_q is given with sequence_parallel",
        "cache": "a KV cache is continued with sequence_parallel",
        "another batch": r"input_ids is .*CRC-32 \w+\)' on rank 0, .*CRC-32 \w+\)' on rank 1",
        "another length": r"input_ids is .*\[2, 300\].* on rank 0, .*\[2, 301\].* on rank 1",
        "not of tokens": "the batch has cu_seq_lens_q, which cut_batch cannot cut",
        "no tokens": "the batch has labels: give input_ids",
        "too few": "and the batch of 384 tokens",
    }.items():
        assert re.search(words, told[0][name]), (
            name, told[0][name],
        )  # fmt: skip
