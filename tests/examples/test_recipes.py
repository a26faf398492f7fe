# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The recipes of examples/: what they start is what torchrun and Megatron-LM understand."""

import inspect
import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser

from megatron_mtraining.megatron import register
from tests.examples import pages
from tests.support.recipes import (
    EVERY_RECIPE,
    EXAMPLES,
    VARIABLE,
    Recorder,
    config_of,
    converted,
    dataset,
)

BIG, MIDDLE, SMALL = "qwen2.5-3b-512k", "qwen2.5-7b-256k", "qwen2.5-0.5b-128k"
YARN = {BIG: 16, MIDDLE: 8, SMALL: 4}
SECOND = dict(NODE_RANK="1", MASTER_ADDR="node07")
FOUR_NODES = dict(NODES="4", GPUS="8", NODE_RANK="2", MASTER_ADDR="node07", MASTER_PORT="7000")


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path)


def started(recorder, recipe, *words, **environment):
    """torchrun's arguments, by its own parser, of one node."""
    if recipe == MIDDLE:
        environment = {**SECOND, **environment}
    script = EXAMPLES / recipe / "run.sh"
    run, lines = recorder.start(script, recorder.checkout, *words, **environment)
    assert run.returncode == 0, run.stderr
    ((line, connections),) = lines
    launch = get_args_parser().parse_args(line)
    launch.connections = connections
    assert launch.module and launch.training_script == "megatron_mtraining.launch"
    assert launch.training_script_args[0] == str(recorder.checkout / "pretrain_gpt.py")
    return launch


@pytest.fixture
def megatron(monkeypatch):
    """Megatron-LM's own parser and validation, of the recipes' arguments on one rank."""
    reason = "this megatron-core has no megatron.training"
    module = pytest.importorskip("megatron.training.arguments", reason=reason)
    if "--yarn-original-max-position-embeddings" not in inspect.getsource(module):
        pytest.skip("this Megatron has no options for YaRN, which 0.19 has")
    register()

    def validated(launch):
        nodes = int(launch.nnodes.split(":")[0])
        processes = nodes * int(launch.nproc_per_node)
        monkeypatch.setattr(sys, "argv", launch.training_script_args)
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", "0")
        # An H100's, for what is chosen by it.
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        properties = SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        monkeypatch.delenv(VARIABLE, raising=False)  # asked for on such GPUs
        if launch.connections is not None:
            monkeypatch.setenv(VARIABLE, launch.connections)
        return module.validate_args(module.parse_args())

    return validated


def shape(args):
    names = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels"
    )
    return [getattr(args, name) for name in names.split()]


def test_one_node_of_4(recorder, megatron):
    launch = started(recorder, BIG)
    assert (launch.nproc_per_node, launch.standalone) == ("4", True)
    args = megatron(launch)
    assert shape(args) == [36, 2048, 11008, 16, 2, 128]
    assert args.context_parallel_size == 4 and args.data_parallel_size == 1
    assert not args.hierarchical_context_parallel_sizes
    check_512k(args)


def test_four_nodes_of_8(recorder, megatron):
    launch = started(recorder, BIG, **FOUR_NODES)
    assert (launch.nproc_per_node, launch.nnodes, launch.node_rank) == ("8", "4", 2)
    assert (launch.master_addr, launch.master_port) == ("node07", 7000)
    args = megatron(launch)
    assert args.context_parallel_size == 32 and args.data_parallel_size == 1
    assert args.hierarchical_context_parallel_sizes == [8, 4]
    check_512k(args)


def check_512k(args):
    assert args.seq_length == 524288 == 16 * args.yarn_original_max_position_embeddings
    assert (args.rotary_scaling_factor, args.rotary_base) == (16.0, 1000000)
    check_both(args)
    assert args.padded_vocab_size == 151936 and not args.untie_embeddings_and_output_weights
    assert args.global_batch_size == 1


def check_both(args):
    assert args.position_embedding_type == "yarn" and args.attention_backend.name == "mtraining"
    # Made-up tokens: a price would keep nearly all of their attention.
    assert (args.mtraining_vertical, args.mtraining_slash) == (1000, 100)
    assert args.mtraining_loss_chunk == 4096
    assert args.recompute_granularity == "full" and args.use_distributed_optimizer
    assert args.layernorm_epsilon == 1e-6 and args.bf16


@pytest.mark.parametrize("tp,cp,sizes", [(1, 16, [8, 2]), (2, 8, [4, 2]), (4, 4, [2, 2])])
def test_two_nodes_of_8(tp, cp, sizes, recorder, megatron):
    launch = started(recorder, MIDDLE, **({} if tp == 2 else {"TP": str(tp)}))
    assert (launch.nproc_per_node, launch.nnodes, launch.node_rank) == ("8", "2", 1)
    args = megatron(launch)
    assert shape(args) == [28, 3584, 18944, 28, 4, 128]
    assert args.seq_length == 262144 == 8 * args.yarn_original_max_position_embeddings
    assert (args.rotary_scaling_factor, args.padded_vocab_size) == (8.0, 152064)
    assert args.untie_embeddings_and_output_weights and args.global_batch_size == 4
    assert (args.tensor_model_parallel_size, args.sequence_parallel) == (tp, tp > 1)
    assert (args.context_parallel_size, args.data_parallel_size) == (cp, 1)
    assert args.hierarchical_context_parallel_sizes == sizes
    check_both(args)


def test_one_gpu(recorder, megatron):
    args = megatron(started(recorder, SMALL))
    assert args.world_size == 1 and args.global_batch_size == 4
    assert shape(args) == [24, 896, 4864, 14, 2, 64]
    assert args.seq_length == 131072 == 4 * args.yarn_original_max_position_embeddings
    assert (args.rotary_scaling_factor, args.rotary_base) == (4.0, 1000000)
    check_both(args)
    assert args.padded_vocab_size == 151936 and not args.untie_embeddings_and_output_weights
    many = megatron(started(recorder, SMALL, GPUS="8", BATCH="16"))
    assert many.data_parallel_size == 8 and many.global_batch_size == 16


@pytest.mark.parametrize("tokens, factor", [(16384, 1), (32768, 1), (40960, 2), (65536, 2)])
def test_yarn_of_a_length_that_is_not_a_multiple(tokens, factor, recorder):
    run, _ = recorder.start(
        EXAMPLES / SMALL / "run.sh", "--dry-run", recorder.checkout, SEQ_LENGTH=str(tokens)
    )
    assert f"--rotary-scaling-factor {factor} " in run.stdout.replace("\\\n", " ")


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_data_a_checkpoint_and_other_settings(recipe, recorder, megatron, tmp_path):
    dataset(tmp_path / "text", 50)
    words = ["--lr", "2e-5"]
    environment = dict(DATA_PATH=str(tmp_path / "text"), TOKENIZER="words", CHECKPOINT="kept")
    launch = started(recorder, recipe, *words, **environment, ITERATIONS="7", VERTICAL="500")
    args = megatron(launch)
    assert args.data_path == [str(tmp_path / "text")] and not args.mock_data
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", "words")
    assert args.load == args.save == "kept"
    assert (args.train_iters, args.lr) == (7, 2e-5)
    assert (args.mtraining_policy, args.mtraining_vertical) == ("fixed", 500)
    rows = 152064 if recipe == MIDDLE else 151936
    assert args.padded_vocab_size == rows, "whatever the tokenizer has"
    assert args.split == "100,0,0" and args.pretrained_checkpoint is None
    args = megatron(started(recorder, recipe, **environment))
    assert (args.mtraining_policy, args.mtraining_price) == ("price", 0.25)
    args = megatron(started(recorder, recipe, "--mtraining-price", "0.3"))
    assert (args.mtraining_policy, args.mtraining_price) == ("price", 0.3)
    args = megatron(started(recorder, recipe, PRICE="0.5"))
    assert (args.mtraining_policy, args.mtraining_price) == ("price", 0.5)
    args = megatron(started(recorder, recipe, RECALL="0.97"))
    assert (args.mtraining_policy, args.mtraining_target_recall) == ("price", 0.97)
    own = {"price": 0.3, "target_recall": 0.95, "layers": {"2": {"target_recall": 0.99}}}
    (tmp_path / "settings.json").write_text(json.dumps(own))
    args = megatron(started(recorder, recipe, SETTINGS=str(tmp_path / "settings.json")))
    assert (args.mtraining_price, args.mtraining_target_recall) == (0.3, 0.95)


SECTIONS = [
    (dict(NODES="1", GPUS="8", TP="2"), 4, []),
    (dict(NODES="2", GPUS="8", TP="2", CP="4"), 4, []),
    (dict(NODES="4", GPUS="4", TP="2", CP="4"), 4, [2, 2]),
    (dict(NODES="4", GPUS="8", TP="4", CP="8"), 8, [2, 4]),
    (dict(NODES="4", GPUS="8", TP="2", PP="2"), 8, [4, 2]),
    (dict(NODES="3", GPUS="8", TP="1"), 24, [8, 3]),
    (dict(NODES="2", GPUS="4", TP="4"), 2, ["alone"]),
]


@pytest.mark.parametrize(("given", "cp", "sizes"), SECTIONS)
def test_inner_groups_are_the_context_parallel_ranks_of_a_host(given, cp, sizes, recorder):
    """And none has ranks of two: by the order in which Megatron numbers ranks."""
    given = {"BATCH": "64", **given}
    words = started(recorder, MIDDLE, **given).training_script_args
    flags = {word: i for i, word in enumerate(words)}
    tp = int(given["TP"])
    assert words[flags["--context-parallel-size"] + 1] == str(cp)
    assert ("--sequence-parallel" in flags) is (tp > 1)
    assert ("--mtraining-gathered-ranks" in flags) is (sizes == ["alone"])
    inner = {"alone": 1}.get(sizes[0], sizes[0]) if sizes else min(cp, 8)
    named = flags.get("--hierarchical-context-parallel-sizes")
    if named is None:
        assert sizes in ([], ["alone"])
    else:
        assert [int(word) for word in words[named + 1 : named + 3]] == sizes
    gpus, world = int(given["GPUS"]), int(given["NODES"]) * int(given["GPUS"])
    for first in range(0, world // (tp * cp)):  # data- and pipeline-parallel ranks
        for t in range(tp):
            hosts = [((first * cp + c) * tp + t) // gpus for c in range(cp)]
            groups = [hosts[i : i + inner] for i in range(0, cp, inner)]
            assert all(len(set(group)) == 1 for group in groups), (hosts, inner)


UNFIT = [
    ({"TP": "3"}, "TP is 3, which does not divide the 8 GPUs of a node"),
    ({"CP": "16"}, "TP 2 x PP 1 x CP 16 does not divide the 16 GPUs"),
    (
        {"TP": "4", "NODES": "3", "CP": "3", "BATCH": "6"},
        "not a multiple of the 2 context-parallel",
    ),
    ({"TP": "1", "NODES": "3", "CP": "3", "BATCH": "8"}, "CP is 3, which does not divide the 8"),
    ({"CP": "4", "BATCH": "3"}, "BATCH is 3, which is not a multiple of the 2 data-parallel ranks"),
    ({"CP": "none"}, "CP is none: use a positive number"),
    ({"NODES": "0"}, "NODES is 0: use a positive number"),
    ({"SEQ_LENGTH": "512K"}, "SEQ_LENGTH is 512K: use a positive number"),
    ({"TRAINED_LENGTH": "0"}, "TRAINED_LENGTH is 0: use a positive number"),
    ({"SPLIT": "all"}, "SPLIT is all: give shares for training, validation and test"),
    ({"SPLIT": "0,0,0"}, "SPLIT is 0,0,0: give shares"),
    ({"SPLIT": "97,1,1,1"}, "SPLIT is 97,1,1,1: give shares"),
]


@pytest.mark.parametrize(("given", "message"), UNFIT)
def test_ranks_that_do_not_fit_are_refused(given, message, recorder):
    script = EXAMPLES / MIDDLE / "run.sh"
    run, lines = recorder.start(script, recorder.checkout, **SECOND, **given)
    assert (run.returncode, lines) == (2, []) and message in run.stderr, run.stderr


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_random_weights_have_the_shape_of_the_converted_model(recipe, recorder, megatron, tmp_path):
    """And the same command trains either, but for where weights and tokenizer come from."""
    model = converted(tmp_path / "model", config_of(recipe), YARN[recipe])
    data = dict(DATA_PATH=str(dataset(tmp_path / "text", 50)), CHECKPOINT="run")
    ours = vars(megatron(started(recorder, recipe, **data, TOKENIZER="words")))
    theirs = vars(megatron(started(recorder, recipe, **data, MODEL=str(model))))
    different = {name for name in ours if ours[name] != theirs[name]}
    assert different == {"tokenizer_model", "pretrained_checkpoint"}
    assert theirs["pretrained_checkpoint"] == str(model) and theirs["load"] == "run"
    assert theirs["tokenizer_model"] == str(model / "hf")
    alone = megatron(started(recorder, recipe, MODEL=str(model)))
    assert (alone.load, alone.save, alone.tokenizer_type) == (str(model), None, "NullTokenizer")


def test_any_converted_model(recorder, megatron, tmp_path):
    """Without a recipe: a Llama, with the positions that it has."""
    config = config_of(SMALL, positions=8192) | dict(architectures=["LlamaForCausalLM"])
    model = converted(tmp_path / "model", config, None, tokenizer=False)
    given = dict(MODEL=str(model), NODES="2", GPUS="4", TP="2", **SECOND)
    script = EXAMPLES / "run.sh"
    run, ((line, _),) = recorder.start(script, recorder.checkout, **given)
    assert run.returncode == 0, run.stderr
    launch = get_args_parser().parse_args(line)
    launch.connections = "1"
    args = megatron(launch)
    assert (args.position_embedding_type, args.seq_length) == ("rope", 8192)
    assert args.hierarchical_context_parallel_sizes == [2, 2] and not args.add_qkv_bias
    given["DATA_PATH"] = str(dataset(tmp_path / "text", 50))
    run, lines = recorder.start(script, recorder.checkout, **given)
    assert (run.returncode, lines) == (2, []) and "set TOKENIZER" in run.stderr
    run, lines = recorder.start(script, recorder.checkout)
    assert (run.returncode, lines) == (2, []) and "set MODEL to a folder" in run.stderr


def test_a_dry_run_prints_what_would_start(recorder, tmp_path):
    script = EXAMPLES / MIDDLE / "run.sh"
    words = [recorder.checkout, "--lr", "2e-5", "--tensorboard-dir", "a folder"]
    _, ((line, connections),) = recorder.start(script, *words, **SECOND)
    for place in range(len(words)):
        dry = [*words[:place], "--dry-run", *words[place:]]
        run, lines = recorder.start(script, *dry, **SECOND)
        assert (run.returncode, lines, run.stderr) == (0, [], "")
        assert shlex.split(run.stdout.replace("\\\n", "")) == [
            f"{VARIABLE}={connections}",
            "torchrun",
            *line,
        ]
    for given in (["--mtraining-settings", "mine.json"], ["--mtraining-policy=fixed"]):
        run, _ = recorder.start(script, "--dry-run", recorder.checkout, *given)
        assert not re.search("--mtraining-(price|vertical)", run.stdout) and given[0] in run.stdout
    run, _ = recorder.start(script, "--dry-run", recorder.checkout)
    assert "--master-addr FIRST_NODE" in run.stdout and run.returncode == 0
    run, _ = recorder.start(script, "--dry-run", recorder.checkout, MODEL="nowhere")
    assert run.returncode == 2 and "there is no megatron_args.sh in nowhere" in run.stderr


WRONG = [
    ({"NODES": "4"}, "set MASTER_ADDR"),
    ({"NODES": "4", "MASTER_ADDR": "node07"}, "set NODE_RANK"),
    ({"SETTINGS": "nowhere.json"}, "there is no nowhere.json"),
    ({"RECALL": "0.97", "PRICE": "0.25"}, "RECALL and PRICE are both set"),
    ({"SETTINGS": "s.json", "SLASH": "10"}, "SETTINGS and VERTICAL or SLASH are both set"),
    ({"DATA_PATH": "nowhere/text"}, "there is no nowhere/text.idx"),
    ({"DATA_PATH": __file__.removesuffix(".py")}, ".idx"),
    ({"MODEL": "nowhere"}, "there is no megatron_args.sh in nowhere"),
]


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_what_is_missing_is_named(recipe, recorder, tmp_path):
    script = EXAMPLES / recipe / "run.sh"
    text = str(dataset(tmp_path / "text", 50))
    (tmp_path / "empty.idx").write_text("")
    (tmp_path / "empty.bin").write_text("")
    (tmp_path / "alone.idx").write_text("")
    model = str(converted(tmp_path / "model", config_of(recipe), YARN[recipe]))
    long = str(converted(tmp_path / "long", config_of(recipe, 131072), YARN[recipe]))
    short = str(converted(tmp_path / "short", config_of(recipe), 2))
    gone = converted(tmp_path / "gone", config_of(recipe), YARN[recipe])
    (gone / "latest_checkpointed_iteration.txt").unlink()
    wrong = [
        *WRONG,
        ({"DATA_PATH": text}, "set TOKENIZER"),
        ({"DATA_PATH": str(tmp_path / "empty")}, "is not an index of Megatron's"),
        ({"DATA_PATH": str(tmp_path / "alone")}, "there is no " + str(tmp_path / "alone.bin")),
        ({"DATA_PATH": f"60 {text} 40 nowhere/short"}, "there is no nowhere/short.idx"),
        ({"MODEL": str(gone)}, "there is no checkpoint in"),
        ({"MODEL": long}, "as max_position_embeddings into config.json"),
        ({"MODEL": short}, "has 65536 positions: convert it with a larger --yarn"),
        ({"MODEL": model, "CHECKPOINT": model}, "CHECKPOINT is MODEL"),
    ]
    for environment, message in wrong:
        nodes = {} if "NODES" in environment else SECOND
        run, lines = recorder.start(script, recorder.checkout, **nodes, **environment)
        assert (run.returncode, lines) == (2, []) and message in run.stderr, run.stderr
    for words, message in [([], "usage: "), ([tmp_path], f"no pretrain_gpt.py in {tmp_path}")]:
        run, lines = recorder.start(script, *words)
        assert (run.returncode, lines) == (2, []) and message in run.stderr, run.stderr
    (recorder.checkout / "megatron/training/arguments.py").write_text("'--rotary-base'")
    run, lines = recorder.start(script, recorder.checkout)
    assert (run.returncode, lines) == (2, []) and "use Megatron-LM 0.19" in run.stderr


@pytest.mark.parametrize("sequences", [*range(2, 60), 99, 1000])
def test_every_part_of_a_split_has_a_sample(sequences, recorder, tmp_path, split="99,1,0"):
    """run.sh counts as Megatron does, which numbers an epoch of n sequences 1 to n - 1."""
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    bounds = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    parts = [round(b[1] * sequences) - round(b[0] * sequences) for b in bounds if b is not None]
    given = dict(DATA_PATH=str(dataset(tmp_path / "text", sequences)), TOKENIZER="words")
    script = EXAMPLES / SMALL / "run.sh"
    run, lines = recorder.start(script, recorder.checkout, SPLIT=split, EVAL_ITERS="1", **given)
    assert (run.returncode == 0) is (min(parts) >= 2), (parts, run.stderr)
    if min(parts) < 2:
        assert f"SPLIT is {split}, and {tmp_path}/text has {sequences} sequences" in run.stderr


def test_evaluation_and_a_mix_of_datasets(recorder, megatron, tmp_path):
    long, short = (str(dataset(tmp_path / name, 50)) for name in ("long", "short"))
    given = dict(DATA_PATH=f"60 {long} 40 {short}", TOKENIZER="words", EVAL_ITERS="2")
    script = EXAMPLES / SMALL / "run.sh"
    run, lines = recorder.start(script, recorder.checkout, **given)
    assert (run.returncode, lines) == (2, []) and "EVAL_ITERS is 2, but SPLIT is" in run.stderr
    args = megatron(started(recorder, SMALL, **given, SPLIT="95,5,0"))
    assert args.data_path == ["60", long, "40", short]
    assert (args.split, args.eval_iters) == ("95,5,0", 2)


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_slurm(recipe, recorder):
    script = EXAMPLES / recipe / "slurm.sh"
    job = dict(
        SLURM_SUBMIT_DIR=str(script.parent),
        SLURM_JOB_NUM_NODES="4",
        SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_NODELIST="node[07-10]",
    )
    run, lines = recorder.start(script, recorder.checkout, "--lr", "2e-5", BATCH="32", **job)
    assert run.returncode == 0, run.stderr
    launches = [get_args_parser().parse_args(line) for line, _ in lines]
    assert [launch.node_rank for launch in launches] == [0, 1, 2, 3]
    for launch in launches:
        assert (launch.nnodes, launch.nproc_per_node) == ("4", "8")
        assert (launch.master_addr, launch.master_port) == ("node07", 29500)
        assert launch.training_script_args[-2:] == ["--lr", "2e-5"]
    run, lines = recorder.start(script, recorder.checkout, **{**job, "SLURM_SUBMIT_DIR": "/"})
    assert run.returncode == 2 and not lines and "in the folder of slurm.sh" in run.stderr
    run, lines = recorder.start(script, "--dry-run", recorder.checkout, BATCH="32", **job)
    assert (run.returncode, lines) == (0, []) and "--node-rank 3" in run.stdout, run.stderr
    # Once, not from each node.
    run, lines = recorder.start(script, recorder.checkout, **job, BATCH="32", MODEL="nowhere")
    assert (run.returncode, lines) == (2, [])
    assert run.stderr.count("there is no megatron_args.sh in nowhere") == 1


def test_slurm_without_a_recipe(recorder, tmp_path):
    model = converted(tmp_path / "model", config_of(SMALL), 4)
    run, lines = recorder.start(
        EXAMPLES / "slurm.sh",
        recorder.checkout,
        MODEL=str(model),
        SLURM_SUBMIT_DIR=str(EXAMPLES),
        SLURM_JOB_NUM_NODES="4",
        SLURM_GPUS_ON_NODE="2",
        SLURM_JOB_NODELIST="node[07-10]",
    )
    assert run.returncode == 0 and len(lines) == 4, run.stderr


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_a_job_has_the_nodes_of_its_page(recipe):
    """The Slurm script asks for what the page plans."""
    folder = EXAMPLES / recipe
    asked = dict(
        re.findall(r"#SBATCH --(nodes|gpus-per-node)=(\d+)", (folder / "slurm.sh").read_text())
    )
    marker = f"NODES={asked['nodes']} GPUS={asked['gpus-per-node']} -->"
    assert f"{marker}\n" in (folder / "README.md").read_text()


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.parent.name)
def test_pages_quote_plans_and_rows_as_they_are_now(page):
    assert pages.filled(page) == page.read_text(), "run python -m tests.examples.pages"


QUOTED = [
    (SMALL, "policy=target@0.95", 4, "four times target recall's is {:.1f} s"),
    (SMALL, "policy=target@0.95", 4000 / 3600, "1000 steps {:.1f} hours"),
    (SMALL, "policy=dense", 4000 / 3600, "dense: {:.1f} hours"),
    (BIG, "seq=524288 attention=fused commit=4072a84", 1, "took {:.1f} s a step"),
    (
        BIG,
        "seq=524288 attention=mtraining vertical=1000 commit=4072a84",
        1000 / 3600,
        "take {:.1f} hours",
    ),
    (BIG, "seq=524288 attention=mtraining price=0.25 commit=4072a84", 1, "a step took {:.1f} s"),
    (MIDDLE, "seq=262144 attention=mtraining commit=0e6121e", 2, "only: {:.1f} GPU-seconds"),
]


@pytest.mark.parametrize(("recipe", "words", "times", "said"), QUOTED)
def test_seconds_in_the_text_are_those_of_rows(recipe, words, times, said):
    file = "long.jsonl tokens=131072" if "policy" in words else "pretrain.jsonl"
    (row,) = pages.rows_of([*f"file={file}".split(), *words.split()])[1]
    text = " ".join((EXAMPLES / recipe / "README.md").read_text().split())
    ms = row.get("iter_ms") or row["step_ms"]
    if row.get("warm_up") == 1 and "step_ms" not in row:  # it counts a mean with the first step
        ms = sum(row["breakdown"].values())
    assert said.format(ms / 1000 * times) in text
