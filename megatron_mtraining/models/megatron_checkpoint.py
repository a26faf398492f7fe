# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of Megatron-LM in its format torch_dist, run as a GPTModel in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from ..requirements import require
from .dense_attention import dense_attention
from .environment import quietly, single_process
from .integrity import verify_checksums
from .megatron_flags import build_from_flags
from .megatron_folder import args_in, find_iteration, read_common, read_keys
from .megatron_gpt import ROUTING, arg, build_model, load_weights, rope_scaling_factor
from .tokenizer import Tokenizer, open_tokenizer
from .types import LayerInput, ModelOptions, Shape, Visitor

REFUSED = {
    "multi_latent_attention": "multi-latent attention",
    "window_size": "sliding windows",
    "heterogeneous_layers_config_path": "layers that differ",
    "experimental_attention_variant": "an experimental attention",
    "hybrid_layer_pattern": "layers other than attention",
    "hybrid_override_pattern": "layers other than attention",
    "is_hybrid_model": "layers other than attention",
    "spec": "a layer specification of its own",
    "fp8_param_gather": "FP8 weights",
    "use_mup": "MuP",
    "activation_func_clamp_value": "clamped activations",
    "glu_linear_offset": "an offset in gated linear units",
}
REFUSED_MOE = {
    "moe_mlp_glu_interleave_size": "interleaved rows of experts",
    "moe_apply_probs_on_input": "probabilities on the input of experts",
}
"""Arguments that change what a model computes, and that
:func:`~megatron_mtraining.models.megatron_gpt.transformer_config` leaves out: of all models, and of models
with experts."""


class MegatronCheckpoint:
    """See :class:`~megatron_mtraining.models.types.Source`.

    Attributes:
        args: the arguments of the training run.
        checksums: whether it has checksums; its files fit them then.
    """

    def __init__(self, options: ModelOptions):
        """
        Raises:
            ConfigError: there is no checkpoint, or its model is not supported.
        """
        require("megatron.core", extra="inspect")
        folder = find_iteration(options.path, options.name)
        self.options = replace(options, path=folder)
        self.label = self.options.label
        self.keys = read_keys(folder)
        common = read_common(folder, self.label)
        self.args = args_in(common, self.label)
        self.content = common.get("content_metadata")
        self.description = f"Megatron checkpoint, {folder}"
        self._check()
        self.shape = self._shape()
        self.shape.check(self.label)
        self.checksums = verify_checksums(folder)

    def _check(self) -> None:
        experts = arg(self.args, "num_experts")
        found = {
            name: (what, arg(self.args, name))
            for name, what in (REFUSED | (REFUSED_MOE if experts else {})).items()
        }
        name = "moe_router_load_balancing_type"
        routing = arg(self.args, name)
        kinds = routing if isinstance(routing, list) else [routing]
        if experts and any(kind in kinds for kind in ROUTING):
            found[name] = "a routing that is not top-k", routing
        for name, (what, value) in found.items():
            if value not in (None, False):
                raise ConfigError(
                    f"{self.label} was trained with {what} ({name} {value}), which mtraining does not "
                    "compute: evaluate it with Megatron-LM"
                )
        softmax = arg(self.args, "softmax_type", "vanilla")
        if softmax != "vanilla":
            raise ConfigError(f"{self.label} was trained with softmax_type {softmax}: use vanilla")
        kind = arg(self.args, "position_embedding_type", "learned_absolute")
        if kind not in ("rope", "yarn", "learned_absolute", "none"):
            raise ConfigError(
                f"{self.label} was trained with position_embedding_type {kind}: rope, yarn, "
                "learned_absolute and none are supported"
            )
        rope_scaling_factor(self.args, self.label)
        factor = self.options.yarn_factor
        if factor is not None and (kind != "rope" or arg(self.args, "use_rope_scaling")):
            found = "--use-rope-scaling" if kind == "rope" else f"positions of type {kind}"
            raise ConfigError(
                f"--yarn is {factor:g}, but {self.label} has {found}: leave --yarn out"
            )

    def _shape(self) -> Shape:
        names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        missing = [name for name in (*names, "padded_vocab_size") if arg(self.args, name) is None]
        if missing:
            raise ConfigError(f"the arguments in {self.label} do not say {', '.join(missing)}")
        layers, hidden, heads, positions = (arg(self.args, name) for name in names)
        grouped = arg(self.args, "group_query_attention", False)
        kv_heads = arg(self.args, "num_query_groups", heads) if grouped else heads
        if heads % kv_heads:
            raise ConfigError(
                f"the arguments in {self.label} have num_query_groups {kv_heads}, which does not divide "
                f"num_attention_heads ({heads})"
            )
        head_dim = arg(self.args, "kv_channels", hidden // heads)
        positions = int(positions * (self.options.yarn_factor or 1))
        return Shape(layers, heads, kv_heads, head_dim, positions, self.args.padded_vocab_size)

    def tokenizer(self) -> Tokenizer:
        if self.options.tokenizer is not None:
            return open_tokenizer(self.options.tokenizer)
        kind, named = (
            arg(self.args, "tokenizer_type", "an unknown one"),
            arg(self.args, "tokenizer_model"),
        )
        if (
            kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer")
            and isinstance(named, str)
            and Path(named).exists()
        ):
            return open_tokenizer(Path(named))
        which = f"{kind} {named}" if named else kind
        raise ConfigError(
            f"{self.label} has no tokenizer (it was trained with {which}): name one with --tokenizer, or "
            "give --text as token ids, a .npy file or an indexed data set's .bin"
        )

    @contextmanager
    def loaded(self, scored: bool = False) -> Iterator[Callable[[Tensor, Visitor], None]]:
        if scored:
            raise ConfigError(
                f"{self.label} is a Megatron checkpoint, and --sensitivity supports only Hugging Face "
                "models: convert it first (mtraining convert megatron-to-hf)"
            )
        with single_process(self.options.device):
            yield partial(self._run, quietly(self.model))

    @torch.no_grad()
    def _run(self, model, tokens: Tensor, visit: Visitor) -> None:
        for number, layer in enumerate(model.decoder.layers):
            attention = layer.self_attention
            attention.core_attention = _VisitedAttention(number, visit, attention.core_attention)
        tokens = tokens[None].to(self.options.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        quietly(lambda: model(tokens, positions, None))

    def model(
        self,
        output_layer: bool = False,
        prepare: Callable[[object], None] | None = None,
        flags: list[str] | None = None,
    ) -> torch.nn.Module:
        """A GPTModel with the checkpoint's weights; within
        :func:`~megatron_mtraining.models.environment.single_process`.

        Args:
            output_layer: build it with an output layer.
            prepare: called with its TransformerConfig before it is built.
            flags: build it from these, as Megatron-LM does, and with an output layer; else from the
                checkpoint's arguments, as this package reads them.
        """
        if flags is None:
            model = build_model(self.args, self.shape, self.options, output_layer, prepare)
        else:
            model = build_from_flags(flags, self.options, prepare)
        load_weights(model, self.options.path, self.keys, self.content, self.label)
        return model


class _VisitedAttention(torch.nn.Module):
    """A layer's core attention: hands its input to a visitor, and computes dense attention."""

    def __init__(self, layer: int, visit: Visitor, replaced):
        super().__init__()
        self.layer, self.visit, self.softmax_scale = layer, visit, replaced.softmax_scale

    def forward(self, query, key, value, *args, **kwargs):
        self.visit(LayerInput(self.layer, query, key, self.softmax_scale))
        heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return dense_attention(*heads_first, self.softmax_scale).permute(2, 0, 1, 3).flatten(2)
