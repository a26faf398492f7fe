# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options ``--mtraining-*``: parsed, refused or filled in around Megatron's own validation."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import BY_NAME, OPTIONS, head_policies, option
from megatron_mtraining.megatron import arguments as module
from megatron_mtraining.megatron import register, settings
from megatron_mtraining.megatron.arguments import ArgumentsError, refuse
from megatron_mtraining.megatron.options import add_arguments, config_from_args
from megatron_mtraining.megatron.wrapping import PATIENCE
from tests.support.megatron_cases import check, parse


def shown(text: str) -> str:
    """Help text on one line; a word may be split at its hyphen."""
    return " ".join(text.split()).replace("- ", "-")


def test_help_shows_the_common_options_on_one_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = add_arguments(argparse.ArgumentParser()).format_help().partition("\nmtraining:\n")[2]
    assert text.count("\n") <= 24, text
    for each in OPTIONS:
        assert (each.flag in text) is each.common
        assert not each.common or shown(each.summary) in shown(text)
    assert "--mtraining-help-all" in text


def test_help_all_shows_every_option_in_full(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--mtraining-help-all")
    assert stopped.value.code in (0, None)
    text = shown(capsys.readouterr().out)
    for each in OPTIONS:
        assert each.flag in text and shown(each.full_help) in text


def test_a_settings_file_takes_every_option(tmp_path):
    everything = MTrainingConfig.from_options(price=0.3, target_recall=0.9, sink=8, loss_chunk=512)
    options = {name: value for name, value in everything.options().items() if value is not None}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(options))
    check(args := parse("--mtraining-settings", str(path)))
    assert config_from_args(args) == replace(everything, settings=str(path))
    assert args.mtraining_sink == 8


def test_values_reach_the_config():
    words = "--mtraining-vertical 500 --mtraining-slash=20 --mtraining-block-size 64"
    check(args := parse(*words.split()))
    expected = MTrainingConfig.from_options(vertical=500, slash=20, block_size=64)
    assert config_from_args(args) == expected
    assert (args.mtraining_vertical, args.mtraining_sink) == (500, MTrainingConfig.sink)
    check(args := parse("--mtraining-slash", "all"))
    assert args.mtraining_slash == 4096 and config_from_args(args).keeps_all(4096)


def test_defaults_fit_a_short_sequence_but_given_values_must():
    args = parse(seq_length=512)
    check(args)
    assert (args.mtraining_policy, args.mtraining_vertical_cap) == ("price", 512)
    args = parse("--mtraining-policy", "fixed", seq_length=512)
    check(args)
    assert args.mtraining_vertical == 512
    with pytest.raises(ConfigError, match="--mtraining-vertical is 1000"):
        check(parse("--mtraining-vertical", "1000", seq_length=512))


def test_defaults_fit_the_sequence_that_a_batch_becomes():
    joined = dict(seq_length=512, dataloader_inter_document_masking=True, micro_batch_size=4)
    check(args := parse(**joined))
    assert args.mtraining_vertical_cap == 2048
    check(args := parse("--mtraining-slash", "all", **joined))
    assert config_from_args(args).keeps_all(2048)


def test_files_are_checked_before_training(tmp_path):
    budgets = tmp_path / "budgets.json"
    heads = {str(head): ["vertical_and_slash", 1000, 6096, 0.9] for head in range(8)}
    budgets.write_text(json.dumps([heads] * 3))
    words = ["--mtraining-settings", str(budgets)]
    check(args := parse(*words, num_layers=3))
    check(args)  # again, with what was filled in
    with pytest.raises(ArgumentsError, match="has 3 layers, but the model 4"):
        check(parse(*words, num_layers=4))
    with pytest.raises(ArgumentsError, match="--mtraining-vertical is 9, but --mtraining-settings"):
        check(parse(*words, "--mtraining-vertical", "9", num_layers=3))
    recommended = tmp_path / "settings.json"
    recommended.write_text(json.dumps({"price": 0.2, "layers": {"1": {"dense": True}}}))
    words = ["--mtraining-settings", str(recommended)]
    check(args := parse(*words, num_layers=3))
    assert args.mtraining_price == 0.2
    with pytest.raises(ArgumentsError, match="has price 0.2, but the run 0.5"):
        check(parse(*words, "--mtraining-price", "0.5", num_layers=3))
    with pytest.raises(ArgumentsError, match="--mtraining-settings nowhere.json cannot be read"):
        check(parse("--mtraining-settings", "nowhere.json", num_layers=3))


@pytest.mark.parametrize("change", ["gone", '{"price": 0.9}', "half of a fi"])
def test_a_settings_file_that_changes_does_not_change_a_run(change, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"price": 0.2, "layers": {"1": {"dense": true}}}')
    check(args := parse("--mtraining-settings", str(path), num_layers=3))
    config, layers = config_from_args(args), head_policies(config_from_args(args), 1, 3, 8)
    path.unlink() if change == "gone" else path.write_text(change)
    assert config_from_args(args) == config and config.policy.price == 0.2
    assert head_policies(config_from_args(args), 1, 3, 8) == layers


def test_a_flag():
    for words in ([], ["--mtraining-recompute-attention"]):
        args = parse(*words)
        check(args)
        assert args.mtraining_recompute_attention is bool(words)
        assert config_from_args(args).recompute_attention is bool(words)
    for wrong in (1, "yes", None):
        with pytest.raises(ConfigError, match="--mtraining-recompute-attention must be True or"):
            MTrainingConfig(recompute_attention=wrong)


def test_words_that_are_no_number(capsys):
    with pytest.raises(SystemExit):
        parse("--mtraining-slash", "most")
    assert "--mtraining-slash" in capsys.readouterr().err


@pytest.mark.parametrize("each", OPTIONS, ids=lambda each: each.name)
def test_options_without_the_backend_are_refused(each):
    text = (each.choices or ("fixed",))[-1]
    word = {bool: [], str: [text], float: ["0.5"]}
    words = [each.flag, *word.get(each.type, ["64"])]
    with pytest.raises(ArgumentsError) as raised:
        check(parse(*words, backend="auto"))
    assert f"{' '.join(words)} is given" in str(raised.value)
    assert "--attention-backend mtraining" in str(raised.value)


def test_runs_with_other_backends_are_unchanged():
    args = parse(backend="auto", attention_dropout=0.1, mtp_num_layers=1, seq_length=17)
    before = dict(vars(args))
    check(args)
    assert vars(args) == before
    assert not [name for name in before if name.startswith("mtraining")]


def test_a_misspelled_backend_is_named(capsys):
    def original(parser):
        parser.add_argument("--attention-backend", type=lambda name: AttnBackend[name])
        return parser

    parser = module.wrap_add_megatron_arguments(original)(argparse.ArgumentParser())
    given = parser.parse_args(["--attention-backend", "mtraining"])
    assert given.attention_backend.name == "mtraining"
    with pytest.raises(SystemExit):
        parser.parse_args(["--attention-backend", "mtraning"])
    assert "'mtraning' is no attention backend" in capsys.readouterr().err


def test_environment_is_checked_before_training(monkeypatch):
    monkeypatch.setenv("MTRAINING_BACKWARD", "fast")
    with pytest.raises(ArgumentsError, match="MTRAINING_BACKWARD is 'fast'.*auto, one_pass or two"):
        check(parse())
    check(parse(backend="auto"))


def test_the_log_names_what_the_environment_chooses(monkeypatch):
    assert not any(line.startswith("environment") for line in check(parse()))
    monkeypatch.setenv("MTRAINING_DENSE", "flash4")
    monkeypatch.setenv("MTRAINING_SEARCH_GRAPH", "0")
    _, environment = check(parse(context_parallel_size=1))
    assert environment == "environment: MTRAINING_DENSE=flash4 MTRAINING_SEARCH_GRAPH=0"
    monkeypatch.setenv("MTRAINING_DENSES", "flash4")
    assert "MTRAINING_DENSES in the environment is not one of" in check(parse())[1]
    monkeypatch.delenv("MTRAINING_DENSES")
    others = dict(context_parallel_size=2, deterministic_mode=True, kv_channels=256)
    _, _, *warnings = check(parse(**others))
    assert [line.partition(", ")[0] for line in warnings] == [
        "warning: with --context-parallel-size 2",
        "warning: with --deterministic-mode",
        "warning: with heads of dimension 256",
    ]


@pytest.mark.parametrize("words", ["slash all", "price 0", "schedule anneal"])
def test_checking_twice_changes_nothing_more(words):
    args = parse(*f"--mtraining-{words}".split(), seq_length=512, train_iters=10)
    check(args)
    once = dict(vars(args))
    check(args)
    assert vars(args) == once


def test_the_data_loader_makes_no_mask_and_says_so():
    args = parse(create_attention_mask_in_dataloader=True)
    lines = check(args)
    assert args.create_attention_mask_in_dataloader is False
    settings, mask = lines
    assert settings.startswith("settings: policy=price price=0.25") and "no [sequence" in mask


def test_a_policy_that_looks_ahead_is_said_to(tmp_path):
    path = tmp_path / "settings.json"
    policy = {"policy": "moba", "block_lookahead": True}
    path.write_text(json.dumps({"layers": {"0": {"heads": {"0": policy}}}}))
    words = "--mtraining-policy xattention --mtraining-block-lookahead"
    for asked in (words.split(), ["--mtraining-settings", str(path)]):
        assert any(
            "depend on up to a block of later tokens" in line for line in check(parse(*asked))
        )
    quiet = check(parse("--mtraining-policy", "xattention"))
    assert not any("later tokens" in line for line in quiet)


def test_refusing_changes_nothing():
    others = dict(create_attention_mask_in_dataloader=True, reset_attention_mask=True)
    args = parse("--mtraining-slash", "all", **others)
    before = dict(vars(args))
    refuse(args)
    assert vars(args) == before


BUDGETS = ["--mtraining-block-size 100", "--mtraining-vertical -1", "--mtraining-window -1"]
BUDGETS += ["--mtraining-sink 5000", "--mtraining-sample-strata 1", "--mtraining-vertical 5000"]


@pytest.mark.parametrize("words", BUDGETS)
def test_budgets_out_of_range(words):
    with pytest.raises(ArgumentsError) as raised:
        check(parse(*words.split()))
    assert all(word in str(raised.value) for word in words.split())


def test_a_schedule_reaches_the_config_and_replaces_the_price():
    words = "--mtraining-schedule", "anneal"
    check(args := parse(*words, train_iters=10))
    assert args.mtraining_schedule == "anneal" and args.mtraining_price is None
    assert config_from_args(args) == MTrainingConfig.from_options(schedule="anneal")
    with pytest.raises(ArgumentsError, match="neither --train-iters nor --train-samples"):
        check(parse(*words, train_iters=None, train_samples=None))


@pytest.mark.slow
def test_uncaught_it_ends_the_process_with_the_message():
    """The first rank of a host at once. torchrun has stopped the others then, unless it goes on."""
    code = (
        "import time\n"
        "from megatron_mtraining.megatron import arguments, wrapping\n"
        "time.sleep = lambda seconds: print('waits', seconds)\n"
        "raise arguments.ArgumentsError('use 64')"
    )
    for rank, waits in (("0", ""), ("1", f"waits {PATIENCE}\n")):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "LOCAL_RANK": rank},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert run.stderr.endswith("error: use 64\n") and run.stdout == waits


def test_where_settings_come_from(monkeypatch):
    own = MTrainingConfig.from_options(slash=7)
    args = parse("--mtraining-slash", "9")
    assert settings() == MTrainingConfig()
    assert settings(SimpleNamespace(mtraining=own)) is own
    monkeypatch.setattr(module, "training_arguments", lambda: args)
    assert settings(SimpleNamespace()).policy.slash == 9
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
    assert seen == ["all"], "defaults are filled in after it"
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
    assert names == {"--mtraining-help-all", *map(option, BY_NAME)}
    args = real_parser.parse_args(
        [*REAL.split(), "--attention-backend", "mtraining", "--mtraining-slash", "7"]
    )
    assert args.attention_backend is AttnBackend["mtraining"] and args.mtraining_slash == 7
