# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: rotary positions, there and back."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from megatron_mtraining import ConfigError
from megatron_mtraining.tools.convert import arguments, positions, to_hf
from tests.support.convert_cases import config_of, convert, plain_pair, to_megatron


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_pair(tmp_path_factory.mktemp("plain"))


def test_positions_go_there_and_back(plain, tmp_path):
    folder, _ = plain
    words = ("--yarn", 4, "--rotary-base", 5000000)
    assert to_megatron(folder, tmp_path / "meg", *words) == 0
    args = to_hf.read_args(tmp_path / "meg" / "release")
    assert (args.position_embedding_type, args.rotary_base) == ("yarn", 5000000)
    assert (args.rotary_scaling_factor, args.yarn_original_max_position_embeddings) == (4.0, 256)
    flags = [word for line in arguments.flags(args) for word in line]
    assert float(flags[flags.index("--rotary-scaling-factor") + 1]) == 4
    assert flags[flags.index("--max-position-embeddings") + 1] == "1024"
    assert convert("megatron-to-hf", tmp_path / "meg", tmp_path / "back") == 0
    found = config_of(tmp_path / "back")
    assert found["max_position_embeddings"] == 1024
    assert found["rope_parameters"]["rope_type"] == "yarn"
    file = tmp_path / "back" / "config.json"
    # Read again, they are the same arguments.
    assert positions.arguments_of(found, file).items() <= vars(args).items()


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        },
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
        {"rope_type": "llama3", "factor": 8.0, **positions.LLAMA3},
    ],
)
def test_positions_of_both_kinds_of_config(rope, old):
    file = Path("config.json")
    config = {"max_position_embeddings": 40960}
    if old:
        config |= {"rope_theta": 10000.0, "rope_scaling": None}
        if rope["rope_type"] != "default":
            config["rope_scaling"] = rope
    else:
        config["rope_parameters"] = {**rope, "rope_theta": 10000.0}
    found = positions.arguments_of(config, file)
    assert positions.into_config(config, Namespace(**found), file) is config
    # Another model of the family, brought to the same positions, and read again.
    plain = {"max_position_embeddings": 512, "rope_theta": 5.0}
    if not old:
        plain = {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 5.0}}
    again = positions.into_config(plain, Namespace(**found), file)
    assert positions.arguments_of(again, file) == found


def test_positions_that_are_scaled_already():
    file = Path("config.json")
    config = {"max_position_embeddings": 64, "rope_theta": 1e4}
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match="--yarn is 2"):
        positions.extended(positions.arguments_of(config, file), None, 2.0, None)


def test_a_config_without_a_base_has_that_of_transformers(tmp_path):
    """As Llama 2's own has none."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    for kind in (LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig):
        (tmp_path / "config.json").write_text("{}")
        theirs = kind.from_pretrained(tmp_path)
        base = getattr(theirs, "rope_theta", None) or theirs.rope_parameters["rope_theta"]
        found = positions.arguments_of({"max_position_embeddings": 64}, Path("config.json"))
        assert found["rotary_base"] == base == 10000


def test_of_two_scalings_it_is_the_one_that_transformers_takes():
    from transformers import Qwen2Config

    both = dict(
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    )
    theirs = Qwen2Config(**both)
    kind = (getattr(theirs, "rope_parameters", None) or theirs.rope_scaling)["rope_type"]
    found = positions.arguments_of(both, Path("config.json"))
    assert found["position_embedding_type"] == kind == "yarn"
    found |= dict(position_embedding_type="rope", rotary_base=5)
    again = positions.into_config(both, Namespace(**found), Path("config.json"))
    assert positions.arguments_of(again, Path("config.json"))["position_embedding_type"] == "rope"
