# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The output layer with the loss in chunks: which models and runs have it, and where it is refused."""

import copy
import pickle

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining import ConfigError
from megatron_mtraining.megatron import output_layer
from megatron_mtraining.megatron.arguments import ArgumentsError
from megatron_mtraining.megatron.options import config_from_args
from tests.support.megatron_cases import check, parse


class Model(GPTModel):
    """As much of a model as is looked at."""

    def __init__(self, layer=None, **settings):
        torch.nn.Module.__init__(self)
        self.config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
        for name, value in settings.items():
            setattr(self.config, name, value)
        if layer is not None:
            self.output_layer = layer


class OwnLoss(Model):
    def compute_language_model_loss(self, labels, logits):
        return LanguageModule.compute_language_model_loss(self, labels, logits)


def linear(kind=ColumnParallelLinear, bias=None, dtype=None):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.register_parameter("bias", bias)
    layer.gather_output, layer.output_dtype = False, dtype
    return layer


class OtherLinear(ColumnParallelLinear):
    pass


REFUSED = {
    "config.defer_embedding_wgrad_compute is True": lambda: Model(
        linear(), defer_embedding_wgrad_compute=True
    ),
    "config.config_logger_dir is logs": lambda: Model(linear(), config_logger_dir="logs"),
    "config.fp8_output_proj is True": lambda: Model(fp8_output_proj=True),
    "config.gtp_weight_remat_size is 2": lambda: Model(gtp_weight_remat_size=2),
    "OwnLoss has a compute_language_model_loss": lambda: OwnLoss(linear()),
    "output layer is a OtherLinear": lambda: Model(linear(OtherLinear)),
    "has a bias": lambda: Model(linear(bias=torch.nn.Parameter(torch.zeros(1)))),
    "logits are torch.float64": lambda: Model(linear(dtype=torch.float64)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_needs_all_logits(words):
    """Refused if chunks were asked for; else Megatron's own loss, and it says so."""
    with pytest.raises(ConfigError, match=f"--mtraining-loss-chunk is 64, but .*{words}.*chunk 0"):
        output_layer.chunk_loss(REFUSED[words](), 64)
    model = REFUSED[words]()
    with pytest.warns(UserWarning, match=f"all tokens are held at once, as .*{words}"):
        output_layer.chunk_loss(model, None)
    assert not isinstance(getattr(model, "output_layer", None), output_layer.ChunkedOutputLayer)


@pytest.mark.parametrize(("chunk", "expected"), [(None, 4096), (7, 7), (0, None)])
def test_the_chunk(chunk, expected):
    model = Model(linear())
    output_layer.chunk_loss(model, chunk)
    assert isinstance(model.output_layer, output_layer.ChunkedOutputLayer) is (expected is not None)
    assert getattr(model.output_layer, "mtraining_chunk", None) == expected
    assert type(model.output_layer).__name__ == "ColumnParallelLinear"  # Megatron-FSDP looks
    assert type(copy.deepcopy(model.output_layer)) is type(model.output_layer)
    assert pickle.loads(pickle.dumps(type(model.output_layer))) is type(model.output_layer)
    output_layer.chunk_loss(Model(), chunk)  # a pipeline stage without an output layer


def test_a_loss_that_no_other_backend_has(monkeypatch):
    """The wrapper hands over to Megatron unless the output layer is ours, and without labels."""
    seen = []

    def _postprocess(
        self, hidden_states, labels, runtime_gather_output=None, inference_context=None
    ):
        seen.append(labels)
        return "Megatron's"

    wrapped = output_layer.wrap_postprocess(_postprocess)
    assert wrapped(Model(linear()), 1, labels=2) == "Megatron's"
    ours = Model(linear())
    output_layer.chunk_loss(ours, None)
    assert wrapped(ours, 1, None) == wrapped(ours, 1, 2, inference_context=3) == "Megatron's"
    assert wrapped(ours, 1, 2, True) == "Megatron's"
    ours.compute_language_model_loss = lambda *given: "distillation's"
    assert wrapped(ours, 1, 2) == "Megatron's"
    assert seen == [2, None, 2, 2, 2]


def test_loss_chunk_on_the_command_line():
    lines = check(args := parse(cross_entropy_loss_fusion=True))
    assert args.mtraining_loss_chunk is None and config_from_args(args).loss_chunk is None
    assert "--cross-entropy-loss-fusion) is not used" in "\n".join(lines)
    lines = check(parse("--mtraining-loss-chunk", "0", cross_entropy_loss_fusion=True))
    lines += check(parse(cross_entropy_loss_fusion=True, config_logger_dir="logs"))
    assert "not used" not in "\n".join(lines)
    with pytest.raises(ArgumentsError, match="--mtraining-loss-chunk is -1: use 0 or more"):
        check(parse("--mtraining-loss-chunk", "-1"))
    words = ["--mtraining-loss-chunk", "100"]  # which need not divide anything
    check(args := parse(*words))
    assert config_from_args(args).loss_chunk == 100


IN_HOOKS = {
    "logits_save_dir": "--logits-save-dir is logits",
    "logits_load_dir": "--logits-load-dir is logits",
    "save_activations_interval": "--save-activations-interval is 10",
    "save_dgrads_interval": "--save-dgrads-interval is 10",
    "export_kd_teacher_load": "--export-kd-teacher-load is logits",
}
"""Megatron's options that take what the output layer returns, which in chunks are losses."""
ALL_LOGITS = {
    "config_logger_dir": "--config-logger-dir is logs",
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute is True",
    "logit_dtype": "--output-logit-dtype is fp32",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards is 2",
}


@pytest.mark.parametrize("name", [*ALL_LOGITS, *IN_HOOKS])
def test_options_that_need_all_logits(name, monkeypatch):
    said = {**ALL_LOGITS, **IN_HOOKS}[name]
    value = {"True": True, "2": 2, "10": 10}.get(said.split()[-1], said.split()[-1])
    given = {"context_parallel_size": 1, name: value}
    with pytest.raises(ArgumentsError, match=f"--mtraining-loss-chunk is 64, but {said}.*-chunk 0"):
        check(parse("--mtraining-loss-chunk", "64", **given))
    check(parse("--mtraining-loss-chunk", "0", **given))
    if name in IN_HOOKS:
        monkeypatch.setattr(output_layer, "training_arguments", lambda: parse(**given))
        with pytest.warns(UserWarning, match=f"all tokens are held at once, as {said}"):
            output_layer.chunk_loss(model := Model(linear()), None)
        assert type(model.output_layer) is ColumnParallelLinear
