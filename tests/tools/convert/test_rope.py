# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: RoPE of config.json and of Megatron's arguments, converted both ways."""

from __future__ import annotations

import math
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.convert import megatron_args, rope, to_hf
from tests.support.convert_cases import (
    LLAMA3,
    change_args,
    config_of,
    convert,
    flags_of,
    refused,
    save,
    to_megatron,
)


def test_yarn_round_trip(plain, tmp_path):
    folder, _ = plain
    words = ("--yarn", 4, "--rotary-base", 5000000)
    assert to_megatron(folder, tmp_path / "meg", *words) == 0
    args = to_hf.read_args(tmp_path / "meg" / "release")
    assert (args.position_embedding_type, args.rotary_base) == ("yarn", 5000000)
    assert (args.rotary_scaling_factor, args.yarn_original_max_position_embeddings) == (4.0, 256)
    flags = [word for line in megatron_args.flags(args) for word in line]
    assert float(flags[flags.index("--rotary-scaling-factor") + 1]) == 4
    assert flags[flags.index("--max-position-embeddings") + 1] == "1024"
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    found = config_of(tmp_path / "back")
    assert found["max_position_embeddings"] == 1024
    assert found["rope_parameters"]["rope_type"] == "yarn"
    file = tmp_path / "back" / "config.json"
    # It gives the same arguments again.
    assert rope.arguments_of(found, file).items() <= vars(args).items()


FIELDS = {
    "default": {},
    "yarn": dict(factor=4.0, original_max_position_embeddings=32768),
    "yarn-beta": dict(factor=8.0, original_max_position_embeddings=64, beta_fast=16.0),
    "yarn-mscale": dict(factor=2.0, mscale=0.7, mscale_all_dim=0.9, truncate=False),
    "llama3": dict(factor=8.0, **rope.LLAMA3),
}


@pytest.mark.parametrize("old", [True, False], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", FIELDS)
def test_both_forms_of_config(name, old):
    """The fields of transformers 4 and of 5: unchanged if they say the same, else rewritten."""
    fields = {"rope_type": name.partition("-")[0], **FIELDS[name]}
    file = Path("config.json")
    config = {"max_position_embeddings": 40960}
    if old:
        config |= {"rope_theta": 10000.0, "rope_scaling": None}
        if name != "default":
            config["rope_scaling"] = fields
    else:
        config["rope_parameters"] = {**fields, "rope_theta": 10000.0}
    found = rope.arguments_of(config, file)
    assert rope.into_config(config, Namespace(**found), file) is config
    # The same positions in another model's config.json, and read again.
    plain = {"max_position_embeddings": 512, "rope_theta": 5.0}
    if not old:
        plain = {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 5.0}}
    again = rope.into_config(plain, Namespace(**found), file)
    assert rope.arguments_of(again, file) == found


def test_the_original_length_of_the_config_itself():
    """transformers prefers it to the scaling's own, on either way."""
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=512)
    config = dict(max_position_embeddings=2048, original_max_position_embeddings=128)
    config |= dict(rope_parameters=yarn)
    file = Path("config.json")
    found = rope.arguments_of(config, file)
    assert found["yarn_original_max_position_embeddings"] == 128
    again = rope.into_config(config, Namespace(**found | {"rotary_scaling_factor": 8.0}), file)
    assert rope.arguments_of(again, file)["yarn_original_max_position_embeddings"] == 128
    assert "original_max_position_embeddings" not in again


def test_a_scale_of_none_is_refused():
    """transformers would take it for 1."""
    config = dict(max_position_embeddings=2048, rope_parameters=dict(rope_theta=1e4))
    args = dict(position_embedding_type="yarn", rotary_base=10000, rotary_scaling_factor=4.0)
    args |= dict.fromkeys(rope.ARGUMENTS - args.keys())
    args |= dict(rotary_percent=1.0, use_rope_scaling=False, mscale=0.0, mscale_all_dim=1.0)
    with pytest.raises(
        ConfigError, match="mscale and mscale_all_dim of the checkpoint are 0 and 1"
    ):
        rope.into_config(config, Namespace(**args), Path("config.json"))


@pytest.mark.parametrize("factor", [None, 0.1 * math.log(8) + 1], ids=["absent", "given"])
def test_scales_beside_attention_factor(factor):
    """transformers ignores mscale and mscale_all_dim if there is an attention_factor."""
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, mscale=1.0, mscale_all_dim=1.0)
    yarn |= dict(original_max_position_embeddings=32)
    yarn |= {} if factor is None else {"attention_factor": factor}
    config = {"max_position_embeddings": 256, "rope_parameters": yarn}
    found = rope.arguments_of(config, Path("config.json"))
    assert rope.into_config(config, Namespace(**found), Path("config.json")) is config
    scales = found["mscale"], found["mscale_all_dim"]
    assert scales == ((1.0, 1.0) if factor is None else (1.0, 0.0))
    theirs = Qwen2Config(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=256, rope_theta=1e4,
        rope_scaling=dict(yarn),
    )  # fmt: skip
    theirs = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")[1]
    # Megatron's concentration factor.
    numerator, denominator = (0.1 * scale * math.log(8) + 1 for scale in scales)
    assert theirs == pytest.approx(numerator / denominator)


def test_yarn_of_scaled_positions():
    """--yarn is refused if the model scales its positions already."""
    file = Path("config.json")
    config = {"max_position_embeddings": 64, "rope_theta": 1e4}
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match="--yarn is 2"):
        rope.extended(rope.arguments_of(config, file), None, 2.0, None)


def test_default_base(tmp_path):
    """A config.json without rope_theta, such as Llama 2's, has transformers' default."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    for kind in (LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig):
        (tmp_path / "config.json").write_text("{}")
        theirs = kind.from_pretrained(tmp_path)
        base = getattr(theirs, "rope_theta", None) or theirs.rope_parameters["rope_theta"]
        found = rope.arguments_of({"max_position_embeddings": 64}, Path("config.json"))
        assert found["rotary_base"] == base == 10000


def test_two_scalings():
    """Of rope_scaling and rope_parameters, transformers and the conversion prefer the first."""
    from transformers import Qwen2Config

    both = dict(
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    )
    theirs = Qwen2Config(**both)
    kind = (getattr(theirs, "rope_parameters", None) or theirs.rope_scaling)["rope_type"]
    found = rope.arguments_of(both, Path("config.json"))
    assert found["position_embedding_type"] == kind == "yarn"
    found |= dict(position_embedding_type="rope", rotary_base=5)
    again = rope.into_config(both, Namespace(**found), Path("config.json"))
    assert rope.arguments_of(again, Path("config.json"))["position_embedding_type"] == "rope"


def test_a_factor_that_megatron_drops(tmp_path, capsys):
    """Llama 3.2's: a warning, in megatron_args.sh too. Whether a run's model had it is in its arguments."""
    folder = save("llama 3", tmp_path / "hf", rope_parameters={**LLAMA3, "factor": 32.0})
    checkpoint, back = tmp_path / "meg", tmp_path / "back"
    assert to_megatron(folder, checkpoint) == 0
    assert "--rope-scaling-factor 32 has an effect with" in capsys.readouterr().err
    script = subprocess.run(
        ["bash", checkpoint / "megatron_args.sh"], capture_output=True, text=True, check=True
    )
    assert "--rope-scaling-factor 32 has an effect with" in script.stderr
    assert "--rope-scaling-factor" in flags_of(checkpoint)
    assert convert("megatron-to-hf", checkpoint, back) == 0
    assert config_of(back)["rope_parameters"]["factor"] == 32.0
    # As a run with another backend saves it: its model had 8.
    change_args(checkpoint, mtraining_rope_scaling_factor=None)
    words = ("megatron-to-hf", checkpoint, tmp_path / "other")
    refused(capsys, tmp_path / "other", words, ["rope_scaling_factor 32", "trained with 8"])
    like = save("llama 3", tmp_path / "like")
    assert convert(*words, "--like", like) == 0
    assert config_of(tmp_path / "other") == config_of(like)


def test_interpolation_that_megatron_dropped(plain):
    """Before 0.19, whose arguments have YaRN's; attention backend mtraining passes it on."""
    folder, checkpoint = plain
    args = to_hf.read_args(checkpoint / "release")
    args.rotary_seq_len_interpolation_factor = 4
    config, file = config_of(folder), folder / "config.json"
    assert rope.into_config(config, args, file) == config
    for name, value in {
        "yarn_beta_fast": None,
        "mtraining_rotary_seq_len_interpolation_factor": 4,
    }.items():
        passed = Namespace(**{**vars(args), name: value})
        with pytest.raises(ConfigError, match="interpolation_factor of the checkpoint is 4"):
            rope.into_config(config, passed, file)
