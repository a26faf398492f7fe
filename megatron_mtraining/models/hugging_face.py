# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face folders and GGUF files, through transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..errors import ConfigError
from ..requirements import require
from .dense_attention import dense_attention
from .pretrained import LOCAL, REPORTED, check_whole_model, reason
from .tokenizer import (
    Tokenizer,
    of_transformers,
    open_tokenizer,
    open_transformers_tokenizer,
    transformers_tokenizer,
)
from .types import LayerInput, ModelOptions, Score, Shape, Visitor

ATTENTION = "mtraining_inspect"
"""The name under which our attention function is registered with transformers."""
LOSS_CHUNK = 256
"""Tokens whose logits are in memory at a time, with the first run's: 0.7 GiB for a vocabulary of 150K."""


def open_folder(options: ModelOptions) -> HuggingFaceModel:
    """Open a Hugging Face folder: config.json, weights and tokenizer."""
    require("transformers", extra="inspect")
    return HuggingFaceModel(options, options.path)


def unpacked() -> dict[str, Any]:
    """Arguments of ``from_pretrained`` with which weights of a GGUF file are tensors as any others. Some
    versions of transformers would otherwise keep them packed, and look for kernels that multiply with
    them."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def open_gguf(options: ModelOptions) -> HuggingFaceModel:
    """Open a GGUF file, quantised or not: configuration, tokenizer and weights in one file."""
    path, label = options.path, f"{options.name} is {options.path}"
    require("transformers", "gguf", "accelerate", extra="inspect")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:
        raise ConfigError(
            f"{label}, which gguf cannot read ({reason(error)}): give a Hugging Face folder, a whole .gguf "
            "file or a Megatron checkpoint's folder"
        ) from None
    # transformers does not read these, and without them the positions of long texts are wrong.
    scaled = [name for name in reader.fields if ".rope.scaling." in name]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    if scaled:
        raise ConfigError(
            f"{label}, which scales its rotary positions ({scaled[0]}), and transformers does not "
            "read that from GGUF: use the model's Hugging Face folder"
        )

    def shared_reader():
        # transformers parses the file for configuration, tokenizer and weights: seconds each time.
        return mock.patch.object(gguf, "GGUFReader", lambda *args, **kwargs: reader)

    return HuggingFaceModel(
        options, path.parent, {"gguf_file": path.name}, weights=unpacked(), reading=shared_reader
    )


class HuggingFaceModel:
    """See :class:`~megatron_mtraining.models.types.Source`."""

    def __init__(
        self,
        options: ModelOptions,
        folder: Path,
        files: dict | None = None,
        weights: dict | None = None,
        reading: Callable[[], AbstractContextManager] = nullcontext,
    ):
        """
        Args:
            files: arguments of each ``from_pretrained`` that say which files to read.
            weights: further arguments of the one that loads weights.
            reading: a context in which files are read.
        """
        self.options, self.folder, self.reading = options, folder, reading
        self.files, self.weights = files or {}, weights or {}
        with self._explained("configuration"), reading():
            from transformers import AutoConfig

            self.config = AutoConfig.from_pretrained(folder, **LOCAL, **self.files)
        self.description = f"{self.config.model_type}, {options.path}"
        _check_architecture(self.config, options.label)
        self.shape = _shape_of(self.config, options.label)
        self.shape.check(options.label)
        if options.yarn_factor is not None:
            self.shape = _with_yarn(self.config, self.shape, options.yarn_factor, options.label)

    def tokenizer(self) -> Tokenizer:
        if self.options.tokenizer is not None:
            return open_tokenizer(self.options.tokenizer)
        return of_transformers(self.transformers_tokenizer())

    def transformers_tokenizer(self):
        """The tokenizer that was asked for, else the model's own, as transformers opens it.

        Raises:
            ConfigError: it cannot be read, or is no tokenizer of transformers.
        """
        if self.options.tokenizer is not None:
            return open_transformers_tokenizer(self.options.tokenizer)
        with self._explained("tokenizer"), self.reading():
            return transformers_tokenizer(self.folder, **self.files)

    def causal_model(self):
        """transformers' whole model, with dense attention (``sdpa``): on the device, in evaluation mode."""
        return self._load("sdpa", with_head=True).to(self.options.device).eval()

    def _load(self, attention: str, *, with_head: bool):
        """The model with all its weights; those of the output layer may be missing unless it is needed."""
        from transformers import AutoModelForCausalLM

        with self._explained("weights"), self.reading():
            model, info = AutoModelForCausalLM.from_pretrained(
                self.folder,
                config=self.config,
                dtype=self.options.dtype,
                attn_implementation=attention,
                **LOCAL,
                **REPORTED,
                **self.files,
                **self.weights,
            )
        unneeded = () if with_head else _weights_of(model, model.get_output_embeddings())
        check_whole_model(self.options.label, info, unneeded=unneeded)
        return model

    @contextmanager
    def loaded(self, scored: bool = False) -> Iterator[_LoadedModel]:
        if scored:
            check_logits(self.config, self.options.label, "--sensitivity")
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        run = _LoadedModel(self.options.label, self.shape.layers)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, run.attention)
        model = self._load(ATTENTION, with_head=scored)
        # Without the head: logits over the vocabulary would be the largest tensor of all.
        run.body = model.base_model.to(self.options.device).eval()
        run.head = model.get_output_embeddings().to(self.options.device) if scored else None
        del model
        try:
            yield run
        finally:  # transformers keeps the registered function
            run.body = run.head = None

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn transformers' errors about a file into a :class:`ConfigError` of one line."""
        try:
            yield
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"the {what} of {self.options.label} cannot be loaded: {reason(error)}"
            ) from error


def _weights_of(model: torch.nn.Module, part: torch.nn.Module | None) -> list[str]:
    """The names that the weights of a part of a model have in it."""
    own = {id(weight) for weight in ([] if part is None else part.parameters())}
    return [name for name, weight in model.named_parameters() if id(weight) in own]


class _LoadedModel:
    """Runs a model, and hands each layer's attention input to a visitor."""

    body: torch.nn.Module | None = None
    """The model without its output layer."""
    head: torch.nn.Module | None = None
    """The output layer; None if runs are not scored."""

    def __init__(self, label: str, layers: int):
        self.label, self.layers = label, layers
        self._first_hidden: Tensor | None = None  # of the first run, ``[s - 1, hidden]``

    @torch.no_grad()
    def __call__(self, tokens: Tensor, visit: Visitor) -> Score | None:
        self._visit, self._layer = visit, 0
        tokens = tokens.to(next(self.body.parameters()).device)
        hidden = self.body(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        if self._layer != self.layers:
            raise ConfigError(
                f"{self.label} has {self.layers} layers, but only {self._layer} called the attention "
                "function that transformers lets us replace: every layer must have causal softmax attention"
            )
        return None if self.head is None else self._score(hidden[:-1], tokens[1:])

    def _score(self, hidden: Tensor, labels: Tensor) -> Score:
        """Compare predictions with labels, and with the predictions of the first run."""
        if self._first_hidden is None:
            self._first_hidden = hidden
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        chunks = (each.split(LOSS_CHUNK) for each in (hidden, self._first_hidden, labels))
        for chunk, first, label in zip(*chunks):
            log_p = self.head(chunk).float().log_softmax(-1)
            sums[0] -= log_p.gather(1, label[:, None]).sum(dtype=torch.float64)
            if hidden is not self._first_hidden:
                expected = self.head(first).float().log_softmax(-1)
                difference = (expected - log_p).mul_(expected.exp_())
                sums[1] += difference.sum(dtype=torch.float64)
        return Score(*(sums / len(hidden)).tolist())

    def attention(self, module, query, key, value, attention_mask, scaling=None, **more):
        """Replaces a layer's attention function: ``[b, h, s, d]`` in, ``[b, s, h, d]`` out."""
        place = f"layer {self._layer} of {self.label}"
        for name in ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask"):
            if more.get(name) is not None:
                raise ConfigError(
                    f"{place} has attention with {name}: only causal softmax attention over the whole "
                    "sequence is supported"
                )
        if attention_mask is not None or not getattr(module, "is_causal", True):
            raise ConfigError(
                f"{place} has attention that is masked or not causal: only causal softmax attention over "
                "the whole sequence is supported"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sequence_first = (x.permute(2, 0, 1, 3) for x in (query, key))
        given = LayerInput(self._layer, *sequence_first, scale, value.permute(2, 0, 1, 3))
        out = self._visit(given)
        self._layer += 1
        if out is not None:
            return out.transpose(0, 1), None
        return dense_attention(query, key, value, scale).transpose(1, 2).contiguous(), None


def _check_architecture(config, label: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{label} is of type {name}: only text decoders are supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{label} is of type {name}, which is not a causal language model of transformers"
        )
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    replaceable = getattr(model, "_can_set_attn_implementation", lambda: True)
    if not replaceable() or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{label} is of type {name}, whose attention function transformers cannot replace: models "
            "such as Llama, Mistral, Qwen2 and Qwen3 are supported"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{label} has layers of type {', '.join(sorted(kinds - {'full_attention'}))}: only full causal "
            "attention in every layer is supported"
        )
    for field, what in {
        "sliding_window": "sliding windows",
        "attention_chunk_size": "chunked attention",
        "kv_lora_rank": "multi-latent attention",
        "attn_logit_softcapping": "capped scores",
    }.items():
        value = getattr(config, field, None)
        if value is not None:
            raise ConfigError(
                f"{label} has {what} ({field} {value}): only full causal softmax attention is supported"
            )


def check_logits(config, label: str, option: str) -> None:
    """Raise :class:`ConfigError` unless the output layer's result are the logits.

    Args:
        option: what needs that.
    """
    for field in ("logits_scaling", "logit_scale", "final_logit_softcapping"):
        value = getattr(config, field, None)
        if value not in (None, 1, 1.0):
            raise ConfigError(
                f"{label} changes its logits ({field} {value}), which {option} does not support: "
                f"leave {option} out"
            )


def _shape_of(config, label: str) -> Shape:
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    positions = getattr(config, "max_position_embeddings", None)
    if not all(isinstance(value, int) for value in (heads, layers, positions)):
        raise ConfigError(
            f"{label} is of type {config.model_type}, whose configuration lacks num_attention_heads, "
            "num_hidden_layers or max_position_embeddings: models such as Llama are supported"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ConfigError(
            f"num_key_value_heads of {label} is {kv_heads}, which does not divide num_attention_heads "
            f"({heads})"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(layers, heads, kv_heads, head_dim, positions, config.vocab_size)


def _with_yarn(config, shape: Shape, factor: float, label: str) -> Shape:
    """Extend the model's positions by ``factor``, and return its new shape."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind != "default":
        found = f"rotary positions of type {kind}" if kind else "no rotary positions to scale"
        raise ConfigError(f"--yarn is {factor:g}, but {label} has {found}: leave --yarn out")
    config.rope_parameters = {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": shape.positions,
    }
    positions = int(shape.positions * factor)
    config.max_position_embeddings = positions
    return replace(shape, positions=positions)
