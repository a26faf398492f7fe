# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/model/frontier.py and ablations.py: settings at a density, rows of a tiny model, joined rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.lib.policies_at_density import FAMILIES, at_density, config_of
from benchmarks.model import (
    ablations,
    backward,
    continuing,
    frontier,
    frontier_rows,
    frontier_settings,
    ruler_samples,
)
from benchmarks.model.material import material, training
from megatron_mtraining import ConfigError
from megatron_mtraining.config.schedule import NAMED
from megatron_mtraining.models.tokenizer import transformers_tokenizer
from tests.support.frontier_cases import train_row, zero_row
from tests.support.inspect_cases import save_model

SEQ = 512


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model, texts of two kinds, and sizes for a CPU."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder / "model")
    (folder / "book.txt").write_text(Path(json.__file__).read_text() * 4)
    (folder / "code.txt").write_text(Path(np.__file__).read_text()[:40000])
    return [
        "--model", str(model), "--device", "cpu", "--cache", str(folder / "tokens.npz"), "--tokens", "100000",
        "--text", f"book={folder / 'book.txt'}", f"code={folder / 'code.txt'}", "--kinds", "code",
        "--seq", str(SEQ), "--block-size", "64", "--held-out", "1", "--needles", "1", "--jobs", "1",
        "--lr", "1e-3", "--warm-up", "1",
    ]  # fmt: skip


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_greater_knob_is_denser_and_fits(name):
    settings = [FAMILIES[name].setting(place, 16384, 128) for place in (0.5, 3.0, 20.0, 300.0)]
    configs = [config_of(setting, 128) for setting in settings]
    for config in configs:
        config.check_sizes(16384)
        assert not config.keeps_all(16384)
    key = {"price": "price", "fixed": "vertical", "coverage": "coverage", "window": "window"}.get(
        name.removesuffix("_last"),
        {"xattention": "block_threshold", "moba": "block_top_k"}.get(
            name.removesuffix("_previous")
        ),
    )
    values = [setting[key] for setting in settings]
    assert sorted(values, reverse=key == "price") == values and len(set(values)) >= 3


def test_the_setting_at_a_density():
    asked = []

    def density_of(setting):
        asked.append(setting)
        return min(1.0, 0.03 + 0.04 / setting["price"])

    known = {}
    found = at_density("price", 0.15, 16384, 128, density_of, known)
    assert abs(found.density / 0.15 - 1) <= 0.04 and len(asked) <= 10
    assert found.is_near(0.15) and not found.is_near(0.3)
    # What was tried is not measured again, and tells where to look.
    before = len(asked)
    again = at_density("price", 0.15, 16384, 128, density_of, known)
    assert again == found and len(asked) == before
    assert at_density("price", 0.08, 16384, 128, density_of, known).is_near(0.08)
    # There is no such density.
    least = at_density("price", 0.02, 16384, 128, density_of, known)
    assert not least.is_near(0.02) and least.density == pytest.approx(0.03, rel=0.05)
    steps = at_density("moba", 0.15, 512, 64, lambda setting: 0.1 + 0.1 * setting["block_top_k"])
    assert steps.setting["block_top_k"] in (0, 1)


def test_runs_are_named():
    assert frontier_settings.split("price@0.15") == ("price", 0.15)
    assert frontier_settings.split("dense") == ("dense", None)
    for word in ("price", "dense@0.1", "price@2", "unknown@0.1", "price@x"):
        with pytest.raises(frontier.argparse.ArgumentTypeError, match="POLICY@DENSITY"):
            frontier_settings.split(word)
    for name in (*frontier.MAIN, *frontier.OTHERS, *frontier.LONG):
        frontier_settings.split(name)


def test_schedules_are_named():
    assert frontier_settings.split("schedule@0:1.2,0.9:0") == ("schedule", "0:1.2,0.9:0")
    assert frontier_settings.key_of("schedule@0:0.31/3") == ("schedule", "0:0.31/3")
    # Rows have points and not names, and one form of a threshold.
    points = NAMED["schedule"]["anneal"]
    assert frontier_settings.split("schedule@anneal/3.0") == ("schedule", f"{points}/3")
    assert frontier_settings.split("schedule@0:0.31/0") == ("schedule", "0:0.31")
    setting = frontier_settings.setting_of("schedule", f"{points}/3", None, None)
    assert setting == dict(policy="price", schedule=points, backward_threshold=3.0)
    for word in ("x", "0.5:1", "0:1,0.5:0,0.9:1", "0:0.31/x", "0:0.31/-1", "0:0.31/3/3"):
        with pytest.raises(frontier.argparse.ArgumentTypeError, match=f"schedule@{word}"):
            frontier_settings.split(f"schedule@{word}")
    # In names of files nothing is a folder, and no two runs are one.
    labels = [frontier_settings.label_of(f"schedule@{each}/3") for each in ("0:0.31", "0:0.65")]
    assert labels == ["schedule@0:0.31_3", "schedule@0:0.65_3"]
    assert frontier_settings.label_of("settings@/a/own.json") == "own.json"


def test_learning_rates_decay_to_a_tenth():
    for decay, rates in {
        "constant": {0: 1, 0.5: 1, 1: 1},
        "cosine": {0: 1, 0.5: 0.55, 1: 0.1},
        "0.8-1": {0: 1, 0.8: 1, 0.9: 0.55, 1: 0.1},
        "0-0.5": {0: 1, 0.25: 0.55, 0.5: 0.1, 1: 0.1},
    }.items():
        found = {share: continuing.decayed(decay, share) for share in rates}
        assert found == pytest.approx(rates), decay


def test_another_decay_is_refused(words, capsys):
    for decay in ("linear", "0.9", "1-0.9", "0.9-0.9", "0.5-2", "nan-1", "0-0.5-1"):
        for script in (frontier, ablations, backward):
            with pytest.raises(SystemExit):
                script.options_from(["train", *words, "--decay", decay])
            shown = f"--decay {decay}: use constant, cosine, or two shares"
            assert shown in capsys.readouterr().err


def test_rows_of_training_are_those_of_the_decay(words, tmp_path):
    output = tmp_path / "runs.jsonl"
    more = ["--decay", "cosine", "--output", str(output)]
    options = frontier.options_from(["train", *words, *more])
    row = train_row("dense", None, 1, 2.0, 2.0) | frontier_settings.about(options)
    row |= dict(lr=options.lr)
    output.write_text(json.dumps(row) + "\n")
    options.frontier = output
    assert frontier_settings.run_of_frontier(options, "dense", None, 1) is None
    assert frontier_settings.rows_like(options, "train", policy="dense") == []
    options.decay = "constant"
    assert frontier_settings.run_of_frontier(options, "dense", None, 1) == row
    options.decay = "cosine"
    output.write_text("".join(json.dumps(row | more) + "\n" for more in ({"decay": "cosine"}, {})))
    assert frontier_settings.run_of_frontier(options, "dense", None, 1)["decay"] == "cosine"


def test_a_run_that_ends_dense_is_judged_dense(words, monkeypatch):
    options = frontier.options_from(["train", *words, "--steps", "2", "--curve", "1"])
    given, config = material(options), config_of(dict(policy="price", schedule="0:0.7,0.5:0"), 64)
    asked = []
    monkeypatch.setattr(continuing, "answered", lambda *of: asked.append(of) or dict(needle=1.0))
    judged, times = continuing.judged, []
    monkeypatch.setattr(continuing, "judged", lambda *of: times.append(of) or judged(*of))
    row, _ = continuing.train(continuing.Run("anneal", 1, 2, config), given, options)
    assert row["decay"] == "constant" and row["own_by_text"] == row["dense_by_text"]
    assert row["own"] == row["dense"] and row["before_own"] != row["before_dense"]
    assert len(times) == 2 + 1 + 1, "before, and dense from the first step's end on"
    assert len(asked) == 1 and row["needle_own"] == row["needle_tail"] == row["needle_dense"] == 1


def test_order_of_runs(words):
    options = frontier.options_from(["train", *words])
    runs = frontier.wanted_runs(options)
    assert runs[:3] == [("dense", 1), ("price@0.15", 1), ("price@0.08", 1)] and options.steps == 300
    assert len(set(runs)) == len(runs) and {(name, 3) for name in frontier.MAIN} <= set(runs)
    # A run is compared with the dense one of its seed, which comes before.
    assert all(runs.index(("dense", seed)) <= runs.index((name, seed)) for name, seed in runs)
    long = frontier.options_from(["long", *words])
    assert long.steps == 1000 and frontier.wanted_runs(long)[0] == ("dense", 1)


def test_material(words):
    more = ["--kinds", "code", "book", "--held-out", "2", "--needles", "2"]
    options = frontier.options_from(["zero", *words, *more])
    given = material(options)
    shapes = {kind: tuple(each.shape) for kind, each in given.held_out.items()}
    assert shapes == {"code": (2, SEQ + 1), "book": (2, SEQ + 1)}
    text = bytes(given.needles[0].tolist())  # tokens of this model are bytes, in another order
    assert len(text) == SEQ + 1 and given.answers == [8, 8]
    answer = given.needles[0][-8:].tolist()
    inside = given.needles[0][:-8].tolist()
    assert any(inside[at : at + 8] == answer for at in range(len(inside)))
    first, again, other = (training(given.tokens, 6, seed, options) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    ends = {kind: set(each[0].tolist()) for kind, each in given.held_out.items()}
    assert ends and first.shape == (6, SEQ + 1)


def test_the_loss_is_the_model_s_own(words):
    options = frontier.options_from(["zero", *words])
    model, _ = continuing.load(options)
    tokens = material(options).held_out["code"][0]
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        expected = torch.nn.functional.cross_entropy(logits, tokens[1:])
        assert continuing.loss_of(model, tokens).item() == pytest.approx(expected.item(), rel=1e-5)
    other = tokens.flip(0)
    found = continuing.judged(model, {"code": tokens[None], "book": torch.stack([tokens, other])})
    means, windows = found.means(), found.by_window()
    assert means["code"] == pytest.approx(expected.item(), abs=1e-5)
    assert windows["book"][0] == windows["code"][0] == pytest.approx(means["code"], abs=1e-5)
    assert means["book"] == pytest.approx(sum(windows["book"]) / 2, abs=1e-5)
    assert means["all"] == pytest.approx((means["code"] + 2 * means["book"]) / 3, abs=1e-5)
    assert windows["book"][0] != windows["book"][1]


@pytest.mark.slow
def test_zero_rows(words, tmp_path, capsys):
    output = ["--output", str(tmp_path / "runs.jsonl")]
    few = ["--densities", "0.6", "--policies", "price", "moba"]
    frontier.main(["zero", *words, *few, *output])
    rows = rows_in(tmp_path / "runs.jsonl")
    by_name = {row["policy"]: row for row in rows}
    assert list(by_name) == ["dense", "published", "price", "moba"]
    assert by_name["dense"]["zero_over_dense"] == 0 and by_name["dense"]["density"] == 1
    for row in rows[2:]:
        assert row["reached"] and row["density"] == pytest.approx(0.6, rel=0.2), row
        assert 0 < row["recall"] <= 1 and row["loss"] != row["dense_loss"]
        assert row["zero_over_dense"] == pytest.approx(
            row["loss"] / row["dense_loss"] - 1, abs=1e-5
        )
        assert row["needle"] is not None and row["answer_loss"] > 0
        assert row["answer_loss_tail"] != row["answer_loss"] and row["needle_tail"] is not None
    capsys.readouterr()
    frontier.main(["zero", *words, *few, *output])
    assert len(rows_in(tmp_path / "runs.jsonl")) == 4 and "0 rows" in capsys.readouterr().out
    frontier.main(["zero", *words, *few, "--run", "xattention@0.6", "--minutes", "-1", *output])
    assert "1 rows are left" in capsys.readouterr().out


@pytest.mark.slow
def test_time_rows(words, tmp_path):
    output = tmp_path / "runs.jsonl"
    few = ["--densities", "0.6", "--policies", "price", "window", "--lengths", "1024"]
    frontier.main(["time", *words, *few, "--shape", "2", "1", "64", "--output", str(output)])
    rows = rows_in(output)
    assert [row["policy"] for row in rows] == ["price", "window"]
    for row in rows:
        assert row["why"] is None and row["density"] == pytest.approx(0.6, rel=0.2)
        assert (
            min(row[n] for n in ("forward_ms", "backward_ms", "search_ms", "dense_forward_ms")) > 0
        )


@pytest.mark.slow
def test_recomputation_rows(words, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    few = ["--base", "moba@0.6", "--lengths", "1024", "--shape", "2", "1", "64"]
    for _ in range(2):  # the second time there is nothing left
        ablations.main(["time", *words, *few, "--output", str(output)])
    rows = rows_in(output)
    assert [row["setting"] for row in rows] == ["result kept", "pattern kept", "nothing kept"]
    assert rows[0]["over_base"] == 1 and all(row["step_ms"] > 0 for row in rows)


@pytest.fixture(scope="module")
def ruler_file(tmp_path_factory):
    """Samples of a made-up task, of different lengths."""
    path = tmp_path_factory.mktemp("ruler") / "ruler.npz"
    lengths = np.array([300, 401])
    tokens = np.random.default_rng(0).integers(1, 250, lengths.sum())
    np.savez(path, **{"vt.tokens": tokens, "vt.lengths": lengths, "vt.answers": [3, 5]})
    return path


def test_samples_of_a_file(ruler_file, tmp_path):
    found = ruler_samples.read(ruler_file, "cpu")["vt"]
    assert [(len(each.tokens), each.answer) for each in found] == [(300, 3), (401, 5)]
    (tmp_path / "bad.npz").write_bytes(b"PK")
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "half.npz", **{"vt.tokens": [1, 2]})
    for name, word in (
        ("bad", "is no file of"),
        ("half", "is no file of"),
        ("empty", "has no samples"),
    ):
        with pytest.raises(ConfigError, match=word):
            ruler_samples.read(tmp_path / f"{name}.npz", "cpu")


@pytest.mark.slow
def test_samples_are_lm_eval_s(words, tmp_path):
    """Prompts of one task, with the answer behind each."""
    pytest.importorskip("lm_eval")
    path = tmp_path / "ruler.npz"
    more = "--length 2048 --samples 2 --tasks niah_single_1 niah_multikey_2".split()
    ruler_samples.main(["--model", words[1], *more, "--output", str(path)])
    found = ruler_samples.read(path, "cpu")
    assert {task: len(samples) for task, samples in found.items()} == {
        "niah_single_1": 2,
        "niah_multikey_2": 2,
    }
    decode = transformers_tokenizer(Path(words[1])).decode
    for tokens, answer in found["niah_single_1"]:
        assert 1024 < len(tokens) <= 2048
        assert decode(tokens[:-answer]).endswith("in the provided text is")
        assert f"is: {decode(tokens[-answer:]).strip()}." in decode(tokens[:-answer])


@pytest.fixture(scope="module")
def trained(words, ruler_file, tmp_path_factory):
    """Rows of training, and of ablations of it."""
    folder = tmp_path_factory.mktemp("rows")
    output = ["--output", str(folder / "runs.jsonl")]
    # Of the model as it is, which says the setting: it is not looked for.
    row = zero_row("price", 0.6, 0.02) | dict(model="model", seq=SEQ, block_size=64, reached=True)
    row["setting"] = dict(policy="price", price=0.7)
    (folder / "runs.jsonl").write_text(json.dumps(row) + "\n")
    own = folder / "own.json"
    own.write_text(json.dumps({"target_recall": 0.9, "layers": {"1": {"target_recall": 0.8}}}))
    runs = [
        "--run",
        "dense",
        "price@0.6",
        "target@0.9",
        f"settings@{own}",
        "--seeds",
        "1",
        "--steps",
        "3",
    ]
    runs += ["--ruler", str(ruler_file), "--curve", "2", "--token-losses", str(folder / "losses")]
    frontier.main(["train", *words, *runs, *output])
    more = ["--frontier", str(folder / "runs.jsonl"), "--output", str(folder / "ablations.jsonl")]
    more += ["--base", "price@0.6", "--steps", "3", "--variants", "cool-10", "once", "first-layers"]
    more += ["--curve"]
    ablations.main(["train", *words, *more])
    return folder, more


@pytest.mark.slow
def test_train_rows(words, trained, capsys):
    folder, _ = trained
    rows = {row["policy"]: row for row in rows_in(folder / "runs.jsonl") if row["stage"] == "train"}
    assert list(rows) == ["dense", "price", "target", "settings"]
    dense, price, target, own = rows.values()
    assert (
        own["wanted"] == "own.json"
        and own["setting"]["settings"]["layers"]["1"]["target_recall"] == 0.8
    )
    assert own["price_median"] > 0 and own["losses"] != dense["losses"]
    assert dense["own"] == dense["dense"] and dense["density"] == dense["recall"] == 1
    for row in rows.values():
        assert row["own"] < row["before_own"] and len(row["losses"]) == 3
        assert [step for step, *_ in row["curve"]] == [2, 3]
        assert row["curve"][-1] == [3, row["own"], row["dense"]]
        assert row["dense_curve_by_text"][-1] == [3, row["dense_by_text"]]
        assert row["before_dense_by_text"]["all"] == row["before_dense"]
        assert ("needle_tail" in row) == (row is not dense)
        for kind in ("own", "dense"):
            assert [len(values) for values in row[f"ruler_{kind}"]["vt"].values()] == [2, 2]
    written = sorted(path.name for path in (folder / "losses").iterdir())
    assert written == sorted(
        f"{name}_seed1_steps3.npz" for name in ("dense", "price@0.6", "target@0.9", "own.json")
    )
    with np.load(folder / "losses" / "price@0.6_seed1_steps3.npz") as found:
        for name, loss in (("own", price["own"]), ("dense", price["dense"])):
            losses = np.concatenate([found[f"{name}_{kind}"] for kind in price["own_by_window"]])
            assert losses.shape[1] == SEQ
            assert losses.astype(np.float64).mean() == pytest.approx(loss, rel=1e-3)
    assert price["own"] != price["dense"] and price["density"] == pytest.approx(0.6, abs=0.35)
    assert 0 < price["recall"] < 1 and price["setting"] == dict(policy="price", price=0.7)
    assert price["before_dense"] == dense["before_dense"]  # the same weights and data
    assert target["price_median"] > 0 and target["setting"]["target_recall"] == 0.9
    assert price["ruler_own"] != price["ruler_dense"] and dense["ruler_own"] == dense["ruler_dense"]
    found = frontier_rows.joined(list(rows.values()))
    by_name = {row["policy"]: row for row in found}
    own = price["own"] / dense["dense"] - 1
    assert by_name["price"]["trained_own_over_dense"] == pytest.approx(own, abs=1e-5)
    frontier.main(["train", *words, "--run", "dense", "--seeds", "1", "--steps", "3",
                   "--output", str(folder / "runs.jsonl")])  # fmt: skip
    assert "0 runs" in capsys.readouterr().out


@pytest.mark.slow
def test_ablation_rows(words, trained, capsys):
    folder, more = trained
    rows = {row["variant"]: row for row in rows_in(folder / "ablations.jsonl")}
    assert list(rows) == ["cool-10", "once", "first-layers"]
    base = next(
        row
        for row in rows_in(folder / "runs.jsonl")
        if row.get("steps") == 3 and row["policy"] == "price"
    )
    assert rows["cool-10"]["dense_share"] == pytest.approx(1 / 3, abs=1e-3)
    # The first two steps are the base's; the dense one is another.
    assert rows["cool-10"]["losses"][:2] == base["losses"][:2]
    assert rows["cool-10"]["dense"] != base["dense"]
    assert rows["first-layers"]["density"] == 1.0 > base["density"]  # the tiny model has two layers
    assert rows["once"]["recall"] is None and rows["once"]["losses"] != base["losses"]
    for row in rows.values():
        assert math.isfinite(row["loss_over_dense"]) and row["step_ms"] > 0
        assert row["curve"] == [[3, row["own"], row["dense"]]]
    results = folder / "results"
    results.mkdir()
    ablations.main(["recorded", *words, *more, "--results", str(results)])
    ablations.main(["table", *words, *more])
    table = capsys.readouterr().out
    assert "selected once" in table and "| policy: price, 3 steps | 1 |" in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def test_an_ablation_needs_its_dense_run(words, tmp_path, capsys):
    more = ["--frontier", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit, match=r"no dense run of 300 steps with seeds \[1\]"):
        ablations.main(["train", *words, *more])


def test_dense_steps():
    assert [step for step in range(20) if ablations.IsDense("last", 0.1)(step, 20)] == [18, 19]
    assert [step for step in range(20) if ablations.IsDense("first", 0.05)(step, 20)] == [0]
    assert [step for step in range(20) if ablations.IsDense("every", 10)(step, 20)] == [9, 19]


def test_recorded_rows_are_compared_with_striped_and_one_group():
    rows = ablations.layouts(ablations.record.RESULTS)
    assert all(row["over_base"] == 1 for row in rows if row["setting"].startswith("striped"))
    assert all(row["over_base"] > 1 for row in rows if row["setting"].startswith("contiguous"))
    rings = ablations.rings(ablations.record.RESULTS)
    assert rings and all(
        row["over_base"] == 1
        for row in rings
        if row["setting"].startswith(("all gathered", "plain ring"))
    )
