# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
import argparse
import json
import os
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import field_types, option
from megatron_mtraining.megatron import arguments as module
from megatron_mtraining.megatron import register, settings
from megatron_mtraining.megatron.arguments import (
    CHOICES,
    ArgumentsError,
    add_arguments,
    check_arguments,
    config_from_args,
    help_texts,
)
from megatron_mtraining.megatron.checks import REFUSALS, check_settings


def parse(*words: str, backend=AttnBackend.mtraining, **others) -> argparse.Namespace:
    """Arguments as Megatron would have them, with our options parsed from ``words``."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    usual = {
        "attention_backend": backend,
        "attention_dropout": 0.0,
        "seq_length": 4096,
        "encoder_seq_length": None,
        "context_parallel_size": 2,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "kv_channels": None,
        "cp_comm_type": ["p2p"],
        "softmax_type": "vanilla",
        "create_attention_mask_in_dataloader": False,
        "rank": 0,
    }
    for name, value in {**usual, **others}.items():
        setattr(args, name, value)
    return args


def test_an_option_and_a_help_text_for_every_field():
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for field in fields(MTrainingConfig):
        assert option(field.name) in text
        assert len(help_texts()[field.name]) > 20
        if field.default is not None:
            assert f"(default: {field.default})" in text


def test_values_reach_the_config():
    args = parse(
        "--mtraining-vertical", "500", "--mtraining-slash=20", "--mtraining-block-size", "64"
    )
    check_arguments(args)
    assert config_from_args(args) == MTrainingConfig(vertical=500, slash=20, block_size=64)
    assert (args.mtraining_vertical, args.mtraining_sink) == (500, MTrainingConfig.sink)


def test_all_diagonals():
    args = parse("--mtraining-slash", "all")
    check_arguments(args)
    assert args.mtraining_slash == 4096
    assert config_from_args(args).keeps_all(4096)


def test_defaults_fit_a_short_sequence_but_given_values_must():
    args = parse(seq_length=512)
    check_arguments(args)
    assert (args.mtraining_policy, args.mtraining_vertical_cap) == ("price", 512)
    args = parse("--mtraining-policy", "fixed", seq_length=512)
    check_arguments(args)
    assert args.mtraining_vertical == 512
    with pytest.raises(ConfigError, match="--mtraining-vertical is 1000"):
        check_arguments(parse("--mtraining-vertical", "1000", seq_length=512))


def test_files_are_checked_before_training(tmp_path):
    budgets = tmp_path / "budgets.json"
    heads = {str(head): ["vertical_and_slash", 1000, 6096, 0.9] for head in range(8)}
    budgets.write_text(json.dumps([heads] * 3))
    words = ["--mtraining-budgets", str(budgets)]
    check_arguments(args := parse(*words, num_layers=3))
    check_arguments(args)  # again, with what was filled in
    with pytest.raises(ArgumentsError, match="has 3 layers, but the model 4"):
        check_arguments(parse(*words, num_layers=4))
    with pytest.raises(ArgumentsError, match="--mtraining-vertical is 9, but --mtraining-budgets"):
        check_arguments(parse(*words, "--mtraining-vertical", "9", num_layers=3))
    recommended = tmp_path / "settings.json"
    recommended.write_text(json.dumps({"price": 0.2, "layers": {"1": {"dense": True}}}))
    words = ["--mtraining-overrides", str(recommended)]
    check_arguments(args := parse(*words, num_layers=3))
    assert args.mtraining_price == 0.2
    with pytest.raises(ArgumentsError, match="has price 0.2, but the run 0.5"):
        check_arguments(parse(*words, "--mtraining-price", "0.5", num_layers=3))
    with pytest.raises(ArgumentsError, match="--mtraining-overrides nowhere.json cannot be read"):
        check_arguments(parse("--mtraining-overrides", "nowhere.json", num_layers=3))


STEERING = ["--mtraining-target-recall 0.95", "--mtraining-target-density 0.05"]
STEERING += ["--mtraining-slash-refresh 10"]
STEERING += ["--mtraining-price-start 2.0 --mtraining-price-steps 10"]


def test_files_fit_the_run_s_steering_and_sequence(tmp_path):
    def given(content, *words, option="overrides", **others):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_bytes(content)
        words = [f"--mtraining-{option}", str(path), *words]
        check_arguments(parse(*words, num_layers=1, **others))

    heads = {str(head): ["vertical_and_slash", 1000, 6096, 0.9] for head in range(8)}
    budgets, fixed = json.dumps([heads]).encode(), b'{"layers": {"0": {"policy": "fixed"}}}'
    for words in STEERING:
        refused = " is ".join(words.split()[:2]) + ", but .*[.]json"
        with pytest.raises(ArgumentsError, match=f"{refused} has the budgets of all heads"):
            given(budgets, *words.split(), option="budgets")
        with pytest.raises(ArgumentsError, match=f"{refused} leaves no head with policy price"):
            given(fixed, *words.split())
    floor = b'{"layers": {"0": {"slash_floor": 600}}}'
    given(floor, seq_length=1024)
    with pytest.raises(ArgumentsError, match="slash_floor 600, more than --seq-length .512"):
        given(floor, seq_length=512)
    with pytest.raises(ArgumentsError, match="--mtraining-overrides .* is not UTF-8 text"):
        given(b"\xff\xfe")


def test_a_price_of_0_on_a_short_sequence():
    check_arguments(args := parse("--mtraining-price", "0", seq_length=512))
    once = dict(vars(args))
    check_arguments(args)
    assert vars(args) == once and config_from_args(args).keeps_all(512)
    with pytest.raises(ArgumentsError, match="--mtraining-vertical-cap is 64, but .*price is 0"):
        check_arguments(parse("--mtraining-price", "0", "--mtraining-vertical-cap", "64"))


def test_a_flag():
    for words in ([], ["--mtraining-recompute-attention"]):
        args = parse(*words)
        check_arguments(args)
        assert args.mtraining_recompute_attention is bool(words)
        assert config_from_args(args).recompute_attention is bool(words)
    for wrong in (1, "yes", None):
        with pytest.raises(ConfigError, match="--mtraining-recompute-attention must be True or"):
            MTrainingConfig(recompute_attention=wrong)


def test_words_that_are_no_number(capsys):
    with pytest.raises(SystemExit):
        parse("--mtraining-slash", "most")
    assert "--mtraining-slash" in capsys.readouterr().err


@pytest.mark.parametrize("field", fields(MTrainingConfig), ids=lambda field: field.name)
def test_options_without_the_backend_are_refused(field):
    text = CHOICES.get(field.name, ("fixed",))[-1]
    word = {bool: [], str: [text], float: ["0.5"]}
    words = [option(field.name), *word.get(field_types()[field.name], ["64"])]
    with pytest.raises(ArgumentsError) as raised:
        check_arguments(parse(*words, backend=AttnBackend.auto))
    assert f"{' '.join(words)} is given" in str(raised.value)
    assert "--attention-backend mtraining" in str(raised.value)


def test_runs_with_other_backends_are_unchanged():
    args = parse(backend=AttnBackend.auto, attention_dropout=0.1, mtp_num_layers=1, seq_length=17)
    before = dict(vars(args))
    check_arguments(args)
    assert vars(args) == before
    assert not [name for name in before if name.startswith("mtraining")]


def test_checking_twice_changes_nothing_more():
    args = parse("--mtraining-slash", "all")
    check_arguments(args)
    once = dict(vars(args))
    check_arguments(args)
    assert vars(args) == once


def test_the_data_loader_makes_no_mask_and_says_so_once(capsys):
    args = parse(create_attention_mask_in_dataloader=True)
    check_arguments(args)
    check_arguments(args)
    assert args.create_attention_mask_in_dataloader is False
    assert capsys.readouterr().out.count("[mtraining]") == 1


def test_the_loss_in_chunks(capsys):
    check_arguments(args := parse(cross_entropy_loss_fusion=True))
    check_arguments(args)
    assert args.mtraining_loss_chunk is None and config_from_args(args).loss_chunk is None
    assert capsys.readouterr().out.count("--cross-entropy-loss-fusion) is not used") == 1
    check_arguments(parse("--mtraining-loss-chunk", "0", cross_entropy_loss_fusion=True))
    check_arguments(parse(cross_entropy_loss_fusion=True, config_logger_dir="logs"))
    assert "not used" not in capsys.readouterr().out
    with pytest.raises(ArgumentsError, match="--mtraining-loss-chunk is -1: use 0 or more"):
        check_arguments(parse("--mtraining-loss-chunk", "-1"))
    words = ["--mtraining-loss-chunk", "100"]  # which need not divide anything
    check_arguments(args := parse(*words))
    assert config_from_args(args).loss_chunk == 100
    for name, given in {
        "config_logger_dir": "--config-logger-dir is logs",
        "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute is True",
        "logit_dtype": "--output-logit-dtype is fp32",
        "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards is 2",
    }.items():
        value = {"logs": "logs", "True": True, "fp32": "fp32", "2": 2}[given.split()[-1]]
        with pytest.raises(ArgumentsError, match=f"chunk is 100, but {given}.*-chunk 0"):
            check_arguments(parse(*words, **{name: value}))
        check_arguments(parse("--mtraining-loss-chunk", "0", **{name: value}))


REFUSED = {
    "attention_dropout": 0.1,
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "linear_attention_freq": 2,
    "use_kitchen_attention": True,
    "window_size": (128, 0),
    "softmax_type": "learnable",
    "position_embedding_type": "mrope",
    "sft": True,
    "rl_use_sequence_packing": True,
    "hybrid_context_parallel": True,
    "dynamic_context_parallel": True,
    "hierarchical_context_parallel_sizes": [2, 2, 2],
    "cp_comm_type": ["a2a"],
    "mtp_num_layers": 1,
    "is_hybrid_model": True,
    "hybrid_layer_pattern": "M*M*",
    "hybrid_override_pattern": "M*M*",
    "hybrid_attention_ratio": 0.5,
    "hybrid_mlp_ratio": 0.5,
    "use_legacy_models": True,
    "yaml_cfg": "run.yaml",
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "transformer_impl": "inference_optimized",
    "flash_decode": True,
    "perform_rl_step": True,
    "batch_invariant_mode": True,
    "qk_clip": True,
    "log_max_attention_logit": True,
    "flash_attention_version": 3,
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
}


def test_every_refusal_is_tried():
    assert {refusal.name for refusal in REFUSALS} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_option_value_and_what_to_do(name):
    value = REFUSED[name]
    refusal = next(refusal for refusal in REFUSALS if refusal.name == name)
    with pytest.raises(ArgumentsError) as raised:
        check_arguments(parse(**{name: value}))
    message = str(raised.value)
    assert "--" + name.replace("_", "-") in message
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    assert f"is {shown}," in message
    assert refusal.advice in message and refusal.why in message
    check_arguments(parse(backend=AttnBackend.auto, **{name: value}))


OTHERS = {
    "sequence not a multiple": ({"seq_length": 1000}, "--seq-length is 1000", "1024"),
    "sequence from the old option": (
        {"seq_length": None, "encoder_seq_length": 1000},
        "--seq-length is 1000",
        "1024",
    ),
    "head dim given": ({"kv_channels": 80}, "--kv-channels", "is 80"),
    "head dim derived": ({"hidden_size": 8 * 32}, "is 32", "(64, 128)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_refusals(name):
    given, *words = OTHERS[name]
    with pytest.raises(ArgumentsError) as raised:
        check_arguments(parse(**given))
    assert all(word in str(raised.value) for word in words)


BUDGETS = ["--mtraining-block-size 100", "--mtraining-vertical -1", "--mtraining-window -1"]
BUDGETS += ["--mtraining-sink 5000", "--mtraining-sample-strata 1", "--mtraining-vertical 5000"]


@pytest.mark.parametrize("words", BUDGETS)
def test_budgets_out_of_range(words):
    with pytest.raises(ArgumentsError) as raised:
        check_arguments(parse(*words.split()))
    assert all(word in str(raised.value) for word in words.split())


def test_uncaught_it_ends_the_process_with_the_message_once_a_node():
    code = (
        "from megatron_mtraining.megatron.arguments import ArgumentsError\n"
        "raise ArgumentsError('use 64')"
    )
    for rank, message in (("0", "error: use 64\n"), ("1", "")):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "LOCAL_RANK": rank},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert run.stderr.endswith(message) and ("error:" in run.stderr) == bool(message)


def test_where_settings_come_from(monkeypatch):
    own = MTrainingConfig(slash=7)
    args = parse("--mtraining-slash", "9")
    assert settings() == MTrainingConfig()
    assert settings(SimpleNamespace(mtraining=own)) is own
    monkeypatch.setattr(module, "training_arguments", lambda: args)
    assert settings(SimpleNamespace()).slash == 9
    assert settings(SimpleNamespace(mtraining=own)) is own, "the config's own settings come first"
    with pytest.raises(ConfigError, match="MTrainingConfig"):
        settings(SimpleNamespace(mtraining={"slash": 7}))


def test_validation_is_wrapped_around_megatron_s():
    seen = []

    def original(args, defaults=None):
        seen.append(args.mtraining_slash)
        args.kv_channels = args.kv_channels or 80

    with pytest.raises(ArgumentsError, match="is 80"):
        module.wrap_validate_args(original)(parse("--mtraining-slash", "all"), {})
    assert seen == [4096]
    seen.clear()
    with pytest.raises(ArgumentsError):
        module.wrap_validate_args(original)(parse(seq_length=1000))
    assert not seen, "ours come before Megatron's"


def test_yaml_would_drop_our_options(monkeypatch):
    parse_args = module.wrap_parse_args(lambda: "parsed")
    monkeypatch.setattr(sys, "argv", ["x", "--yaml-cfg", "f"])
    assert parse_args() == "parsed"
    monkeypatch.setattr(sys, "argv", ["x", "--yaml-cfg=f", "--mtraining-slash=3"])
    with pytest.raises(ArgumentsError, match="--mtraining-slash"):
        parse_args()


REAL = "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 4096 --bf16"


@pytest.fixture
def real_parser():
    """Megatron-LM's own parser, where the installed megatron-core carries it (0.18 on)."""
    arguments = pytest.importorskip(
        "megatron.training.arguments", reason="this megatron-core has no megatron.training"
    )
    register()
    return arguments.add_megatron_arguments(argparse.ArgumentParser())


def test_megatron_s_own_parser_has_the_group_and_the_choice(real_parser):
    (group,) = [g for g in real_parser._action_groups if g.title == "mtraining"]
    names = {name for action in group._group_actions for name in action.option_strings}
    assert names == {option(field.name) for field in fields(MTrainingConfig)}
    args = real_parser.parse_args(
        [*REAL.split(), "--attention-backend", "mtraining", "--mtraining-slash", "7"]
    )
    assert args.attention_backend is AttnBackend["mtraining"] and args.mtraining_slash == 7


def test_megatron_s_own_arguments_are_checked(real_parser):
    def parsed(*words):
        words = [*REAL.split(), *words, "--attention-backend", "mtraining"]
        args = real_parser.parse_args(words)
        args.rank = 0
        return args

    with pytest.raises(ArgumentsError, match="--attention-dropout is 0.1"):
        check_arguments(parsed())
    check_arguments(parsed("--attention-dropout", "0"))
    with pytest.raises(ArgumentsError, match="--window-size"):
        check_arguments(parsed("--attention-dropout", "0", "--window-size", "128,0"))
    dense = real_parser.parse_args([*REAL.split(), "--mtraining-slash", "7"])
    with pytest.raises(ArgumentsError, match="--mtraining-slash 7"):
        check_arguments(dense)


def test_hierarchical_sizes_must_make_the_context_parallel_ranks():
    check_arguments(parse(context_parallel_size=8, hierarchical_context_parallel_sizes=[4, 2]))
    with pytest.raises(
        ArgumentsError, match="--hierarchical-context-parallel-sizes is 2 2.* 4 ranks.* 8"
    ):
        check_arguments(parse(context_parallel_size=8, hierarchical_context_parallel_sizes=[2, 2]))


@pytest.mark.parametrize("sizes", [4, "22", [2.0, 2.0], [2, -2], [True, 4], [4]])
def test_hierarchical_sizes_are_two_whole_numbers(sizes):
    settings = SimpleNamespace(hierarchical_context_parallel_sizes=sizes)
    with pytest.raises(ConfigError, match="hierarchical_context_parallel_sizes is .*two whole"):
        check_settings(settings, command_line=False)


def test_gathered_ranks_must_fit_the_context_parallel_ranks():
    check_arguments(parse(context_parallel_size=8, mtraining_gathered_ranks=4))
    with pytest.raises(ArgumentsError, match="--mtraining-gathered-ranks is 3.* 8 .*divisor"):
        check_arguments(parse(context_parallel_size=8, mtraining_gathered_ranks=3))
    with pytest.raises(ArgumentsError, match="--mtraining-gathered-ranks is -1"):
        check_arguments(parse(context_parallel_size=8, mtraining_gathered_ranks=-1))
    nodes = dict(context_parallel_size=8, hierarchical_context_parallel_sizes=[4, 2])
    check_arguments(parse(**nodes, mtraining_gathered_ranks=4))
    with pytest.raises(ArgumentsError, match="--mtraining-gathered-ranks is 2, but .*nodes of 4"):
        check_arguments(parse(**nodes, mtraining_gathered_ranks=2))


POSITIONS = [
    ("rope", {"rotary_scaling_factor": 16.0}, "--rotary-scaling-factor 16.0 .* yarn"),
    ("rope", {"mscale": 0.0}, "--mscale 0.0 .* yarn"),
    ("none", {"yarn_original_max_position_embeddings": 32768}, "--yarn-original.* 32768 .* yarn"),
    ("rope", {"yarn_correction_range_round_to_int": False}, "--no-yarn-correction-range.* yarn"),
    ("yarn", {"use_rope_scaling": True}, "--use-rope-scaling is given.* is yarn.* rope"),
    ("yarn", {"rotary_seq_len_interpolation_factor": 4}, "interpolation-factor 4 .* rope"),
    ("yarn", {"rotary_percent": 0.5}, "--rotary-percent 0.5 .* rope"),
]


@pytest.mark.parametrize("kind, given, message", POSITIONS)
def test_scalings_of_positions_that_megatron_would_ignore(kind, given, message):
    with pytest.raises(ArgumentsError, match=message):
        check_arguments(parse(position_embedding_type=kind, **given))
    other = "rope" if kind == "yarn" else "yarn"
    check_arguments(parse(position_embedding_type=other, **given))


@pytest.mark.parametrize("factor, original, said", [(16.0, 256, 0), (16.0, None, 0), (8.0, 256, 1)])
def test_samples_longer_than_yarn_extends_to(factor, original, said, capsys):
    args = parse(
        position_embedding_type="yarn",
        rotary_scaling_factor=factor,
        yarn_original_max_position_embeddings=original,
    )
    check_arguments(args)
    check_arguments(args)  # before and after Megatron's own validation: one warning
    out = capsys.readouterr().out
    assert out.count("[mtraining] warning: --seq-length is 4096") == said
    assert out.count("to 2048") == said
