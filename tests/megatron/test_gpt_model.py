# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Models other than GPTModel must not run dense, unseen."""

from argparse import Namespace

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron import gpt_model as model_module
from megatron_mtraining.megatron import register, rotary_options
from megatron_mtraining.models.environment import quietly, single_process


class Encoder(VisionModule):
    pass


class Translator(LanguageModule):
    pass


@pytest.fixture(autouse=True)
def registered():
    register()


def config(backend):
    made = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    made.attention_backend = backend
    return made


def build(made, **more):
    return GPTModel(
        config=made, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64,
        max_sequence_length=128, **more,
    )  # fmt: skip


# Megatron's YAML files leave the backend's name a string.
@pytest.mark.parametrize("backend", ["member", "mtraining"])
@pytest.mark.parametrize("model", [Encoder, Translator])
def test_other_models_are_refused(model, backend):
    chosen = AttnBackend["mtraining"] if backend == "member" else backend
    with pytest.raises(ConfigError, match=f"works with GPTModel.*, not with {model.__name__}"):
        model(config=config(chosen))


@pytest.mark.parametrize(
    "name, match",
    [
        ("mtp_standalone", "--mtp-num-layers.*stage without the loss.*layout"),
        ("overlap_moe_expert_parallel_comm", "--mtp-num-layers.*runs the layers .* in parts"),
    ],
)
def test_multi_token_prediction_is_refused_where_it_is_run_otherwise(name, match):
    made = config(AttnBackend["mtraining"])
    made.mtp_num_layers = 1
    setattr(made, name, True)
    with pytest.raises(ConfigError, match=match):
        build(made)


def test_yarn_without_its_settings_is_refused():
    made = config(AttnBackend["mtraining"])
    made.yarn_rotary_scaling_factor = 4.0
    with pytest.raises(ConfigError, match=r"no yarn_original\w+, yarn_beta_fast.* 0.19"):
        build(made, position_embedding_type="yarn")


@pytest.mark.parametrize("backend", ["mtraining", "auto"])
def test_rotary_options_that_megatron_drops(backend, monkeypatch, capsys):
    """They reach the model; with another backend a line in the log says that they do not."""
    arguments = Namespace(rope_scaling_factor=32.0, rotary_seq_len_interpolation_factor=4)
    monkeypatch.setattr(model_module, "training_arguments", lambda: arguments)
    made = config(AttnBackend[backend])
    made.use_cpu_initialization, made.attention_dropout = True, 0.0

    def rotary():  # as Megatron-LM before 0.19 builds it
        return build(made, position_embedding_type="rope", rope_scaling=True).rotary_pos_emb

    scalings = dict(rope_scaling=True, use_cpu_initialization=True)
    with single_process(torch.device("cpu")):
        found = quietly(rotary)
        if backend == "mtraining":
            scalings |= dict(rope_scaling_factor=32.0, seq_len_interpolation_factor=4)
        expected = RotaryEmbedding(64, 1.0, **scalings)
        assert torch.equal(found.get_emb(128), expected.get_emb(128))
    said = capsys.readouterr().out
    for option in ("--rope-scaling-factor", "--rotary-seq-len-interpolation-factor"):
        name = "mtraining_" + option[2:].replace("-", "_")
        if backend == "mtraining":
            assert f"{option} {getattr(arguments, name)}: passed on to the model" in said
        else:
            assert f"warning: {option} is " in said and not hasattr(arguments, name)


def test_other_backends_are_left_alone():
    assert Encoder(config=config(AttnBackend.auto)).config.attention_backend is AttnBackend.auto


def test_inference_is_refused_by_name():
    """Megatron's own words are `Unknown attention backend`, at the first prompt."""
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )

    with pytest.raises(ConfigError, match="does not support inference.*--attention-backend auto"):
        GPTInferenceWrapper(Namespace(config=config(AttnBackend["mtraining"])), None)
    with pytest.raises(Exception) as other:  # no process groups
        GPTInferenceWrapper(Namespace(config=config(AttnBackend.auto)), None)
    assert not isinstance(other.value, ConfigError)


def test_a_checkpoint_that_was_trained_with_other_positions_is_named(capsys):
    name = rotary_options.passed_on("rope_scaling_factor")
    ours, before = Namespace(**{name: 32.0}), Namespace(rope_scaling_factor=32.0)
    rotary_options.warn_of_other_positions(ours, ours)
    assert "trained" not in capsys.readouterr().out
    rotary_options.warn_of_other_positions(ours, before)
    assert "--rope-scaling-factor is passed on" in (said := capsys.readouterr().out)
    assert "trained with 8" in said
