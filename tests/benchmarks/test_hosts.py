# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``benchmarks.hosts.four``: its jobs, how it goes on and what it refuses; on CPU processes, all stages."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.hosts import four, host_runs
from benchmarks.hosts.host import FULL, REHEARSAL, STAGES, TINY, Host, Job
from benchmarks.hosts.host_jobs import jobs_of, left_out
from benchmarks.hosts.host_runs import States
from benchmarks.hosts.training_jobs import slash_cap
from benchmarks.layer import rings
from benchmarks.layer.ring_cases import LENGTHS, host_cases
from benchmarks.lib import jobs as lib_jobs
from benchmarks.lib import record
from benchmarks.model import layouts, pretrain
from benchmarks.sparsebalance import ranks

HERE = dict(gpu="a GPU", commit="abc", torch="2", triton="3", command="python")


@pytest.fixture
def host(tmp_path):
    checkout = tmp_path / "Megatron-LM"
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    (tmp_path / "out").mkdir()
    return Host(4, "cuda", FULL, tmp_path / "out", tmp_path / "scratch", checkout, True)


def names(host, *stages):
    return [job.name for job in jobs_of(list(stages or STAGES), host)]


def test_stages_of_four_gpus(host):
    todo = jobs_of(list(STAGES), host)
    assert {job.stage for job in todo} == set(STAGES)
    assert len({(job.stage, job.name) for job in todo}) == len(todo)
    groups = ("side by side", "all pairs pruned")
    assert names(host, "layer") == [
        f"{length}, {group}" for length in ("128K", "256K", "512K") for group in groups
    ]
    cases = [row["case"] for job in jobs_of(["layer"], host) for row in job.rows]
    assert set(cases) == {case.name for seq in LENGTHS for case in host_cases(seq)}
    modes = ("off", "length", "cost", "tuning", "both")
    assert names(host, "sparsebalance") == [
        f"DP {4 // cp} x CP {cp}, {mode}" for cp in (1, 2) for mode in modes
    ]
    assert {"CP 4, hierarchical 2 x 2", "TP 2 x CP 2", "PP 2 x CP 2"} < set(names(host, "parity"))
    assert "TP 2" not in names(host, "parity")
    steps = names(host, "steps")
    assert [name for name in steps if name.endswith("dense")] == [
        "128K, dense", "512K, dense", "256K, dense",
    ]  # fmt: skip
    [job] = [job for job in todo if job.name == "512K, dense"]
    at = job.words.index("--iterations")
    assert int(job.words[at + 1]) - int(job.words[at + 3]) > 1, "more than one dense step at 512K"
    assert all(job.seconds * lib_jobs.MARGIN <= 570 for job in todo), "a call has ten minutes"
    assert all(other in names(host, job.stage) for job in todo for other in job.needs)
    impls = {row["impl"] for job in todo if job.stage == "layer" for row in job.rows}
    assert impls == {"mtraining_flat", "mtraining_hier", "te_p2p", "torch_cp_cudnn"}


def test_what_two_gpus_and_no_transformer_engine_leave_out(host):
    two = replace(host, gpus=2)
    assert (
        names(two, "sparsebalance")[0] == "DP 2 x CP 1, off"
        and len(names(two, "sparsebalance")) == 5
    )
    assert not [name for name in names(two, "parity") if "4" in name or "TP 2 x" in name]
    assert {"TP 2", "PP 2", "CP 2", "experts, EP 2 x CP 2"} < set(names(two, "parity"))
    assert not [name for name in names(two, "steps") if name.startswith("1024K")]
    said = "\n".join(left_out(list(STAGES), replace(two, has_te=False)))
    assert "te_p2p" in said and "no dense steps" in said and "DP 2 x CP 2" in said
    assert left_out(list(STAGES), host) == []
    without = replace(host, has_te=False)
    assert not [name for name in names(without) if "dense" in name]
    impls = {row["impl"] for job in jobs_of(["layer"], without) for row in job.rows}
    assert "te_p2p" not in impls and "torch_cp_cudnn" in impls
    steps = jobs_of(["steps"], without)
    assert all("local" in job.words for job in steps if job.name != "data")


def test_random_weights_get_the_frontier_s_density_from_a_cap(host):
    for seq in (131072, 1048576):
        blocks, cap = seq // 128, slash_cap(seq)
        kept = sum(blocks - distance for distance in range(cap))
        assert kept / (blocks * (blocks + 1) / 2) == pytest.approx(0.145, abs=0.002)
    weights = host.folder / "qwen"
    trained = jobs_of(["steps"], replace(host, weights=weights))
    [job] = [job for job in trained if job.name == "128K, price at 14.5%"]
    assert "--mtraining-slash-cap" not in job.words and "0.2925" in job.words
    assert any("threshold" in job.name for job in trained)
    assert not any("threshold" in name for name in names(host, "steps")), "nothing is pruned"
    assert job.rows[0]["weights"] == "qwen" and str(weights) in job.words


@pytest.mark.parametrize("sizes", [FULL, REHEARSAL, TINY], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("gpus", [2, 4])
def test_benchmarks_take_the_options_of_their_jobs(host, sizes, gpus, monkeypatch):
    device = "cpu" if sizes is TINY else "cuda"
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(
        layouts, "earlier", lambda options: [dict(layout=n) for n in layouts.LAYOUTS]
    )
    monkeypatch.setattr(record, "installed", lambda name: "2.11.0")
    host = replace(host, gpus=gpus, sizes=sizes, device=device, has_te=device == "cuda")
    done = 0
    for job in jobs_of(list(STAGES), host):
        module, words = job.words[1], list(job.words[2:])
        if module == "torch.distributed.run":
            at = job.words.index("benchmarks.layer.rings") + 1
            _, cases = rings.parse(list(job.words[at:]))
            assert {case.name for case in cases} == {row["case"] for row in job.rows}
        elif module == "benchmarks.model.pretrain":
            options = pretrain.parse(words)
            if options.command == "run":
                assert options.seq_length == job.rows[0]["seq"] and options.gpus == gpus
                assert not [word for word in options.more if word in ("--slash", "--script")]
        elif module == "benchmarks.sparsebalance.ranks":
            assert ranks.parse(words).more == [] and job.file == "sparsebalance.jsonl"
        else:
            assert layouts.LAYOUTS[layouts.parse(words).layout].ranks <= gpus
        done += 1
    assert done >= 5


# Going on.


def fake(name: str, code: str, seconds: float = 1, **more) -> Job:
    words = ("-c", code)
    fields = dict(file="rows.jsonl", rows=(dict(name=name),)) | more
    return Job("layer", name, seconds, words, **fields)


def writes(host, name: str, gpu: str = "a GPU", commit: str = "abc") -> str:
    row = json.dumps(dict(name=name, gpu=gpu, commit=commit)) + "\n"
    return f"open({str(host.folder / 'rows.jsonl')!r}, 'a').write({row!r})"


def test_it_goes_on_after_a_failure_and_in_the_next_call(host, capsys):
    states = States(host, HERE)
    todo = [
        fake("good", writes(host, "good")),
        fake("bad", "raise ValueError('no such thing')"),
        fake("late", writes(host, "late"), 1000),
        fake("after", writes(host, "after"), needs=("bad",)),
        fake("silent", "print('nothing')"),
        fake("other commit", writes(host, "other commit", commit="xyz")),
        fake("next", writes(host, "next")),
    ]
    deadline = lib_jobs.Deadline(None, 1.0)
    deadline.end = time.monotonic() + 300
    host_runs.run_all(todo, states, deadline)
    assert [job.name for job in todo if not states.missing(job)] == ["good", "next"]
    assert states.failure(todo[1]) == "ValueError: no such thing"
    assert "without 1 of its rows" in states.failure(todo[4])
    assert "without 1 of its rows" in states.failure(todo[5])
    log = (host.folder / host_runs.LOG).read_text()
    assert "=== layer: silent" in log and "nothing" in log
    capsys.readouterr()
    # The next call has more time; what has failed is not run again.
    deadline.end = time.monotonic() + 3000
    host_runs.run_all(todo, states, deadline)
    assert capsys.readouterr().out.count("layer: ") == 1
    assert not states.missing(todo[2])
    assert four.show(todo, states, True, 9) == 1
    said = capsys.readouterr().out
    assert "missing  layer: after (about 1 s, after bad, which has failed)" in said
    assert (
        "failed   layer: bad: ValueError: no such thing" in said and "done     layer: late" in said
    )
    four.forget(states, todo)
    assert states.failure(todo[1]) is None
    # Rows of another GPU or commit do not count, unless they are said to.
    assert States(host, dict(HERE, gpu="another")).missing(todo[0])
    assert States(host, dict(HERE, commit="later")).missing(todo[0])
    assert not States(host, dict(HERE, commit="later"), commits=["abc"]).missing(todo[0])


def test_jobs_without_times_run_together(host):
    states = States(host, HERE)

    def waits(name, other):  # for a job that runs beside it
        code = f"import pathlib, time\npathlib.Path({str(host.folder / name)!r}).touch()\n"
        code += f"while not pathlib.Path({str(host.folder / other)!r}).exists(): time.sleep(0.05)\n"
        return code + writes(host, name)

    todo = [
        fake("first", writes(host, "first")),
        fake("one", waits("one", "two"), timed=False),
        fake("two", waits("two", "one"), timed=False),
        fake("three", writes(host, "three"), timed=False, needs=("one",)),
    ]
    deadline = lib_jobs.Deadline(None, 1.0)
    deadline.end = time.monotonic() + 60
    host_runs.run_all(todo, states, deadline)
    assert not any(states.missing(job) for job in todo) and states.rows(host_runs.STATES) == []
    order = [row["name"] for row in states.rows("rows.jsonl")]
    assert order[0] == "first" and order[-1] == "three"


def test_a_chosen_job_brings_those_it_needs(host):
    every = jobs_of(list(STAGES), host)
    assert [job.name for job in four.chosen(every, ["512K, dense"])] == ["data", "512K, dense"]
    assert [job.name for job in four.chosen(every, ["CP 2, again", "EP 2"])] == [
        "CP 1", "CP 2", "CP 2, again", "experts, CP 1", "experts, EP 2 x CP 2",
    ]  # fmt: skip


def test_a_job_that_does_not_end_is_stopped_with_all_its_processes(host, capsys):
    states = States(host, HERE)
    alive = host.folder / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'w').close(); time.sleep(0.05)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    job, deadline = fake("endless", code), lib_jobs.Deadline(None, 1.0)
    deadline.end = time.monotonic() + 3
    host_runs.run_all([job], states, deadline)
    assert "stopped after" in capsys.readouterr().out
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()
    assert states.failure(job) is None and states.seconds(job) > 3, "it has more time next"
    four.show([job], states, False, 0.05)
    assert "does not fit a call of 0.05 minutes" in capsys.readouterr().out


def test_reasons():
    lines = [
        "x",
        "ValueError: bad",
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory",
        "",
        "ended",
    ]
    assert host_runs.reason(lines) == "[rank0]: torch.OutOfMemoryError: CUDA out of memory"
    assert (
        host_runs.reason([*lines, "x.errors.ChildFailedError: ", "  error_file: <N/A>"]) == lines[2]
    )
    assert host_runs.reason(["one", "two"]) == "two" and host_runs.reason([]) == ""


# What it refuses.

BAD = {
    "--device cpu": "--device cpu goes with --tiny",
    "--tiny": "--device cpu goes with --tiny",
    "--tiny --device cpu --rehearse": "give one",
    "--minutes 0": "--minutes 0: use more than 0",
    "--balance-cache x.npz": "belong together",
    "--weights .": "--weights . has no megatron_args.sh",
    f"--rehearse --output-folder {record.RESULTS}": "toy rows are no measurements",
}


@pytest.mark.parametrize("words", BAD)
def test_options_that_cannot_work(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        four.parse(["--output-folder", str(tmp_path), *words.split()])
    assert BAD[words] in capsys.readouterr().err


def test_what_is_not_there_is_said_early(host, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)

    def refused(*words, gpus=4):
        options = four.parse(
            ["--output-folder", str(host.folder), "--scratch", str(tmp_path / "s"), *words]
        )
        with pytest.raises(SystemExit):
            four.check(options, dict(HERE, gpus=gpus))
        return capsys.readouterr().err

    assert "--gpus 4, but there are 2: give --gpus 2" in refused(gpus=2)
    said = refused("--stage", "layer", "steps")
    assert "stages steps need a Megatron-LM checkout: set MEGATRON_LM_PATH" in said
    assert said.rstrip().endswith("or leave them out: --stage layer")
    assert "there is no pretrain_gpt.py in" in refused("--megatron", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(four, "find_spec", lambda name: None)
        assert "without psutil" in refused("--megatron", str(host.megatron))
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "folder")
    assert "nothing can be written to" in refused("--stage", "layer", "--output-folder", nowhere)
    options = four.parse(["--output-folder", str(host.folder), "--stage", "layer", "--list"])
    four.check(options, dict(HERE, gpus=0))  # a list needs no GPU


@pytest.mark.slow
def test_all_stages_on_cpu_processes(tree, checkout, tmp_path, monkeypatch, capsys):
    """From options to rows; a second call finds nothing missing."""
    if "core_v0.16" in str(checkout):
        pytest.skip("one checkout is enough, and the recipes' options need Megatron-LM 0.19")
    monkeypatch.setenv("MTRAINING_COMMIT", "a commit")
    path = os.pathsep.join(filter(None, [str(record.ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    out = tmp_path / "out"
    words = ["--output-folder", str(out), "--scratch", str(tmp_path / "scratch"), "--gpus", "2"]
    words += ["--device", "cpu", "--tiny", "--megatron", str(tree.roots["launcher"])]
    four.main(words)
    said = capsys.readouterr().out
    log = (out / host_runs.LOG).read_text()
    assert "0 of 9 jobs are missing" in said and "failed" not in said, said + log[-6000:]
    assert "its rows are no measurements" in said

    def rows(name):
        return [json.loads(line) for line in (out / name).read_text().splitlines()]

    assert all(row["gpu"] == "none" and row["commit"] == "a commit" for row in rows("rings.jsonl"))
    pruned = [row for row in rows("rings.jsonl") if row["backward_threshold"]]
    # A mean over ranks, which have not quite the same number of pairs.
    assert all(0 < row["backward_density"] <= 1.05 * row["density"] for row in pruned)
    every = [row for row in pruned if row["slash"]]
    assert every and all(row["backward_density"] < 0.7 < row["density"] for row in every)
    plain = [row for row in rows("rings.jsonl") if row["inner"] == 1]
    # Two ranks, and as many rounds.
    assert all([len(rank) for rank in row["rounds_ms"]["forward"]] == [2, 2] for row in plain)
    fixed, priced = rows("pretrain.jsonl")
    assert fixed["vertical"] == 64 and "backward_density" not in fixed
    assert priced["backward_threshold"] == 3 and 0 < priced["backward_density"] < 1
    off, both = rows("sparsebalance.jsonl")
    assert (off["dp"], off["cp"], off["mode"], both["mode"]) == (2, 1, "off", "both")
    assert off["losses"] == pytest.approx(both["losses"], abs=1e-4), "the same samples in each step"
    assert off["attention_ms"] > 0 and off["multipliers"] == [1, 1]
    losses = {row["layout"]: row for row in rows("layouts.jsonl")}
    assert losses["CP 1, again"]["equal"] and losses["CP 2"]["within"]
    before = {path: path.read_bytes() for path in out.iterdir()}
    four.main(words)
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_figures_of_a_log_of_ranks():
    line = (
        " [mtraining] iteration {0} | attention of the slowest rank: measured {1} ms (max/mean 1.250, "
        "idle 20.0%)"
    )
    tuned = line + (
        " | predicted 50 ms (max/mean 1.1, idle 9.1%), untuned 60 ms (max/mean 1.2, idle 16.7%) | density "
        "0.1000 expected untuned, 0.1000 seen | recall 0.9000 expected untuned, 0.9000 seen | price times "
        "0.8 to 1.5"
    )
    log = "\n".join([line.format(1, 900), tuned.format(2, 100), tuned.format(3, "1.2e+02")])
    found = ranks.figures(log, 1)
    assert (found["attention_ms"], found["max_over_mean"], found["idle_share"]) == (110, 1.25, 0.2)
    assert found["multipliers"] == [0.8, 1.5] and found["steps"] == 2
    assert found["predicted_over_measured"] == pytest.approx((0.5 + 50 / 120) / 2, abs=1e-5)
    with pytest.raises(ranks.ConfigError, match="no attention times of steps after 3"):
        ranks.figures(log, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 4 --cp 3", "--cp 3 does not divide --gpus 4"),
        ("--gpus 2 --cp 2", "is one rank: nothing to balance"),
        ("--batch 6", "--batch 6 is no multiple of 4 data-parallel ranks"),
        ("--iterations 4", "--learn 4 leaves none of 4 steps"),
        ("--cache none.npz", "there is no none.npz"),
    ],
)
def test_ranks_that_cannot_be_balanced(host, words, message, capsys):
    with pytest.raises(SystemExit):
        ranks.parse(
            [str(host.megatron), "--mode", "both", "--folder", str(host.folder), *words.split()]
        )
    assert message in capsys.readouterr().err


def test_documents_end_with_the_last_entry_of_the_weights_vocabulary(host, capsys):
    words = [str(host.megatron), "--mode", "off", "--folder", str(host.folder)]
    assert ranks.parse(words).vocabulary == ranks.VOCABULARY
    words += ["--weights", str(host.folder)]
    with pytest.raises(SystemExit):
        ranks.parse(words)
    assert "no megatron_args.sh with a vocabulary" in capsys.readouterr().err
    (host.folder / "megatron_args.sh").write_text("MEGATRON_ARGS=(\n  --padded-vocab-size 512\n)\n")
    assert ranks.parse(words).vocabulary == 512


def test_losses_are_compared_with_the_layout_they_should_have(host, monkeypatch, capsys):
    (host.megatron / "megatron/core").mkdir(parents=True)
    (host.megatron / "megatron/core/package_info.py").write_text(
        "MAJOR = 0\nMINOR = 19\nPATCH = 1\n"
    )
    output = host.folder / "layouts.jsonl"
    monkeypatch.setenv("MTRAINING_COMMIT", "abc")
    words = [str(host.megatron), "--folder", str(host.scratch), "--output", str(output), "--layout"]
    with pytest.raises(SystemExit):
        layouts.main([*words, "CP 2"])
    assert "is compared with 'CP 1', which has no row" in capsys.readouterr().err

    def run(name, losses):
        monkeypatch.setattr(layouts, "losses_of", lambda *given: losses)
        layouts.main([*words, name])

    run("CP 1", [4.0, 2.0])
    run("CP 1, again", [4.0, 2.0])
    run("CP 2", [4.0, 2.004])
    with pytest.raises(SystemExit, match="losses of 'CP 2, again' are not those of 'CP 2'"):
        run("CP 2, again", [4.0, 2.003])
    with pytest.raises(SystemExit, match="losses of 'CP 4' differ by 1.00% from 'CP 1'"):
        run("CP 4", [4.0, 2.02])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["within"] for row in rows] == [None, True, True, True, False]
    assert [row["equal"] for row in rows] == [None, True, False, False, False]
