# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The recipes of examples/: what they start is what torchrun and Megatron-LM understand."""

import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser

from megatron_mtraining.megatron import register
from tests.support.recipes import EXAMPLES, RECIPES, VARIABLE, Recorder

BIG, SMALL = "qwen2.5-3b-512k", "qwen2.5-0.5b-128k"
FOUR_NODES = dict(NODES="4", GPUS="8", NODE_RANK="2", MASTER_ADDR="node07", MASTER_PORT="7000")


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path)


def started(recorder, recipe, *words, **environment):
    """torchrun's arguments, by its own parser, of one node."""
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
    assert args.global_batch_size == 1


def check_both(args):
    assert args.position_embedding_type == "yarn" and args.attention_backend.name == "mtraining"
    # Made-up tokens: a price would keep nearly all of their attention.
    assert (args.mtraining_vertical, args.mtraining_slash) == (1000, 100)
    assert args.mtraining_loss_chunk == 4096
    assert args.recompute_granularity == "full" and args.use_distributed_optimizer
    assert args.padded_vocab_size == 151936 and not args.untie_embeddings_and_output_weights
    assert args.layernorm_epsilon == 1e-6 and args.bf16


def test_one_gpu(recorder, megatron):
    args = megatron(started(recorder, SMALL))
    assert args.world_size == 1 and args.global_batch_size == 4
    assert shape(args) == [24, 896, 4864, 14, 2, 64]
    assert args.seq_length == 131072 == 4 * args.yarn_original_max_position_embeddings
    assert (args.rotary_scaling_factor, args.rotary_base) == (4.0, 1000000)
    check_both(args)
    many = megatron(started(recorder, SMALL, GPUS="8", BATCH="16"))
    assert many.data_parallel_size == 8 and many.global_batch_size == 16


@pytest.mark.parametrize("recipe", RECIPES)
def test_data_a_checkpoint_and_other_settings(recipe, recorder, megatron, tmp_path):
    (tmp_path / "text.idx").write_text("")
    words = ["--lr", "2e-5"]
    environment = dict(DATA_PATH=str(tmp_path / "text"), TOKENIZER="words", CHECKPOINT="kept")
    launch = started(recorder, recipe, *words, **environment, ITERATIONS="7", VERTICAL="500")
    args = megatron(launch)
    assert args.data_path == [str(tmp_path / "text")] and not args.mock_data
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", "words")
    assert args.load == args.save == "kept"
    assert (args.train_iters, args.lr) == (7, 2e-5)
    assert (args.mtraining_policy, args.mtraining_vertical) == ("fixed", 500)
    assert args.padded_vocab_size == 151936, "whatever the tokenizer has"
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


WRONG = [
    ({"NODES": "4"}, "set MASTER_ADDR"),
    ({"NODES": "4", "MASTER_ADDR": "node07"}, "set NODE_RANK"),
    ({"SETTINGS": "nowhere.json"}, "there is no nowhere.json"),
    ({"RECALL": "0.97", "PRICE": "0.25"}, "RECALL and PRICE are both set"),
    ({"SETTINGS": "s.json", "SLASH": "10"}, "SETTINGS and VERTICAL or SLASH are both set"),
    ({"DATA_PATH": "nowhere/text"}, "there is no nowhere/text.idx"),
    ({"DATA_PATH": __file__.removesuffix(".py")}, ".idx"),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_missing_is_named(recipe, recorder, tmp_path):
    script = EXAMPLES / recipe / "run.sh"
    (tmp_path / "text.idx").write_text("")
    without_tokenizer = ({"DATA_PATH": str(tmp_path / "text")}, "set TOKENIZER")
    for environment, message in [*WRONG, without_tokenizer]:
        run, lines = recorder.start(script, recorder.checkout, **environment)
        assert (run.returncode, lines) == (2, []) and message in run.stderr, run.stderr
    for words, message in [([], "usage: "), ([tmp_path], f"no pretrain_gpt.py in {tmp_path}")]:
        run, lines = recorder.start(script, *words)
        assert (run.returncode, lines) == (2, []) and message in run.stderr, run.stderr
    (recorder.checkout / "megatron/training/arguments.py").write_text("'--rotary-base'")
    run, lines = recorder.start(script, recorder.checkout)
    assert (run.returncode, lines) == (2, []) and "use Megatron-LM 0.19" in run.stderr


@pytest.mark.parametrize("recipe", RECIPES)
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
