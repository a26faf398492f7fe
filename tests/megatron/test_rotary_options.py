# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Options of context extension that Megatron would ignore are refused."""

import pytest

from megatron_mtraining.megatron.arguments import ArgumentsError, wrap_load_args_from_checkpoint
from megatron_mtraining.megatron.rotary_options import ROUNDS, warn_of_other_positions
from tests.support.megatron_cases import check, parse

POSITIONS = [
    ("rope", {"rotary_scaling_factor": 16.0}, "--rotary-scaling-factor 16.0 .* yarn"),
    ("rope", {"mscale": 0.0}, "--mscale 0.0 .* yarn"),
    ("none", {"yarn_original_max_position_embeddings": 32768}, "--yarn-original.* 32768 .* yarn"),
    ("rope", {"yarn_correction_range_round_to_int": False}, "--no-yarn-correction-range.* yarn"),
    ("yarn", {"use_rope_scaling": True}, "--use-rope-scaling is given.* is yarn.* rope"),
    ("yarn", {"rotary_seq_len_interpolation_factor": 4}, "interpolation-factor 4 .* rope"),
    ("yarn", {"rotary_percent": 0.5}, "--rotary-percent 0.5 .* rope"),
]


@pytest.mark.parametrize(
    "kind, given, message",
    POSITIONS,
    ids=[f"{kind}-{next(iter(given))}" for kind, given, _ in POSITIONS],
)
def test_scalings_of_positions_that_megatron_would_ignore(kind, given, message):
    with pytest.raises(ArgumentsError, match=message):
        check(parse(position_embedding_type=kind, **given))
    other = "rope" if kind == "yarn" else "yarn"
    check(parse(position_embedding_type=other, **given))


@pytest.mark.parametrize(
    "factor, original, said",
    [(16.0, 256, 0), (16.0, None, 0), (8.0, 256, 1)],
    ids=["16x256", "16xdefault", "8x256"],
)
def test_samples_longer_than_yarn_extends_to(factor, original, said):
    args = parse(
        position_embedding_type="yarn",
        rotary_scaling_factor=factor,
        yarn_original_max_position_embeddings=original,
    )
    out = "\n".join(check(args))
    assert out.count("warning: --seq-length is 4096") == said
    assert out.count("to 2048") == said


FORGOTTEN = [
    (
        "learned_absolute",
        {"use_rope_scaling": True},
        "--use-rope-scaling is given.* learned_absolute",
    ),
    ("learned_absolute", {"rotary_base": 500000}, "--rotary-base 500000 .* is learned_absolute"),
    ("learned_absolute", {"rotary_percent": 0.5}, "--rotary-percent 0.5 .* is learned_absolute"),
    ("none", {"rotary_seq_len_interpolation_factor": 4}, "interpolation-factor 4 .* is none"),
    ("rope", {"rope_scaling_factor": 4.0}, "--rope-scaling-factor 4.0 .*add --use-rope-scaling"),
]


@pytest.mark.parametrize(
    "kind, given, message", FORGOTTEN, ids=[f"{kind}-{next(iter(g))}" for kind, g, _ in FORGOTTEN]
)
def test_a_kind_of_positions_that_was_forgotten(kind, given, message):
    """Megatron's default, learned positions, reads none of these."""
    with pytest.raises(ArgumentsError, match=message):
        check(parse(position_embedding_type=kind, **given))
    check(parse(position_embedding_type="rope", **{**given, "use_rope_scaling": True}))
    # Megatron's validation makes it rope.
    check(
        parse(
            position_embedding_type="learned_absolute",
            use_rotary_position_embeddings=True,
            **{**given, "use_rope_scaling": True},
        )
    )


def test_a_factor_that_yarn_does_not_read():
    with pytest.raises(ArgumentsError, match="factor 4.0 .*use --rotary-scaling-factor"):
        check(parse(position_embedding_type="yarn", rope_scaling_factor=4.0))


YARN = dict(
    position_embedding_type="yarn", rotary_scaling_factor=8.0, yarn_beta_fast=32.0,
    **{ROUNDS: True}, yarn_original_max_position_embeddings=128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        (YARN, {}, "-factor 8.0, --yarn-original-max-position-embeddings 128, which --use-check"),
        (YARN, YARN, None),
        (YARN, {**YARN, "rotary_scaling_factor": 16.0}, None),  # it extends further
        (YARN | {ROUNDS: False}, YARN | {ROUNDS: None}, f"had --no-{ROUNDS.replace('_', '-')}, which"),
        (dict(use_rope_scaling=True, rope_scaling_factor=32.0), {},
         "--use-rope-scaling, --rope-scaling-factor 32.0, which"),
        (dict(layernorm_epsilon=1e-6), {}, "had --norm-epsilon 1e-06, which"),
        ({}, {}, None),
    ],
)  # fmt: skip
def test_what_use_checkpoint_args_leaves_out(saved, given, message):
    """Megatron takes the kind of positions from the checkpoint, and the base."""
    saved = parse(**{"position_embedding_type": "rope", "layernorm_epsilon": 1e-5, **saved})
    args = parse(**{"layernorm_epsilon": 1e-5, **given})
    load = wrap_load_args_from_checkpoint(lambda args: (args, saved))
    if message is None:
        load(args)
    else:
        with pytest.raises(ArgumentsError, match=message):
            load(args)


def test_a_run_that_goes_on_without_them_is_warned(capsys):
    warn_of_other_positions(parse(), parse(**YARN))
    assert "the checkpoint had --rotary-scaling-factor 8.0, --yarn-orig" in capsys.readouterr().out
    warn_of_other_positions(parse(**YARN), parse(**YARN))
    assert not capsys.readouterr().out


def test_use_checkpoint_args_without_a_checkpoint():
    args = parse()
    assert wrap_load_args_from_checkpoint(lambda args: args)(args) is args
