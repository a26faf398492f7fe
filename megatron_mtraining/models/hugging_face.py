# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Hugging Face folders and GGUF files, through transformers."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from ..config import ConfigError
from ..tools.inspect.options import first_line, require
from ..tools.inspect.sources import LayerInput, Score, Shape, dense_attention

ATTENTION = "mtraining_inspect"
"""The name that our attention has in transformers."""
LOSS_CHUNK = 256
"""Tokens whose predictions exist at once, those of the first run too: 0.7 GiB of 150 thousand words."""


def open_folder(options):
    """A Hugging Face folder: config.json, weights and tokenizer."""
    require("transformers")
    return HuggingFace(options, options.model, {}, nullcontext)


def open_gguf(options):
    """A GGUF file: configuration, tokenizer and weights in one, quantised or not."""
    path: Path = options.model
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"MODEL is {path}, which cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ConfigError(
            f"MODEL is {path}, which is not a GGUF file (it begins with {magic!r}): give a Hugging Face "
            "folder, a .gguf file or a Megatron checkpoint's folder"
        )
    require("transformers", "gguf", "accelerate")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:
        raise ConfigError(f"MODEL is {path}, which gguf cannot read: {first_line(error)}") from None
    # transformers does not read these, and without them the positions of long texts are wrong.
    scaled = [name for name in reader.fields if ".rope.scaling." in name]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    if scaled:
        raise ConfigError(
            f"MODEL is {path}, which scales its rotary positions ({scaled[0]}), and transformers does not "
            "read that from GGUF: use the model's Hugging Face folder"
        )

    def one_reader():
        # transformers reads the file for each of configuration, tokenizer and weights: seconds each.
        return mock.patch.object(gguf, "GGUFReader", lambda *args, **kwargs: reader)

    source = HuggingFace(options, path.parent, {"gguf_file": path.name}, one_reader)
    source.weights = _unpacked()
    return source


def _unpacked() -> dict:
    """What makes transformers unpack a GGUF file's weights, in versions that would otherwise look for
    kernels that multiply with packed ones."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


class HuggingFace:
    """See :class:`~megatron_mtraining.tools.inspect.sources.Source`."""

    def __init__(self, options, folder: Path, how: dict, reading):
        self.options, self.folder, self.how = options, folder, how
        self.reading = reading
        self.weights: dict = {}  # more arguments for loading them
        with self._explained("configuration"), reading():
            from transformers import AutoConfig

            self.config = AutoConfig.from_pretrained(folder, local_files_only=True, **how)
        self.description = f"{self.config.model_type}, {options.model}"
        _check_architecture(self.config, self._place)
        self.shape = _shape_of(self.config, self._place)
        self.shape.check(self._place)
        if options.yarn is not None:
            self.shape = _with_yarn(self.config, self.shape, options.yarn, self._place)

    @property
    def _place(self) -> str:
        return f"MODEL ({self.options.model})"

    def tokenizer(self):
        named = self.options.tokenizer
        if named is not None:
            return tokenizer_of(named)
        with self._explained("tokenizer"), self.reading():
            return _load_tokenizer(self.folder, self.how)

    @contextmanager
    def loaded(self, scored: bool = False):
        if scored:
            _check_scored(self.config, self._place)
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attention)
        with self._explained("weights"), self.reading():
            model = AutoModelForCausalLM.from_pretrained(
                self.folder,
                config=self.config,
                dtype=self.options.dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                **self.how,
                **self.weights,
            )
        # The body: logits over the vocabulary would be the largest tensor of all.
        body = model.base_model.to(self.options.device).eval()
        head = model.get_output_embeddings().to(self.options.device) if scored else None
        del model
        yield partial(self._run, body, head, [])

    @torch.no_grad()
    def _run(self, body, head, first: list, tokens, visit) -> Score | None:
        self._visit, self._layer = visit, 0
        tokens = tokens.to(self.options.device)
        hidden = body(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        if self._layer != self.shape.layers:
            raise ConfigError(
                f"{self._place} has {self.shape.layers} layers, but {self._layer} of them called the "
                "attention that can be replaced: models where every layer has causal softmax attention "
                "are supported"
            )
        if head is None:
            return None
        hidden = hidden[:-1]
        if not first:
            first.append(hidden)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        parts = (each.split(LOSS_CHUNK) for each in (hidden, first[0], tokens[1:]))
        for part, before, label in zip(*parts):
            found = head(part).float().log_softmax(-1)
            sums[0] -= found.gather(1, label[:, None]).sum(dtype=torch.float64)
            if hidden is not first[0]:
                expected = head(before).float().log_softmax(-1)
                apart = (expected - found).mul_(expected.exp_())
                sums[1] += apart.sum(dtype=torch.float64)
        return Score(*(sums / len(hidden)).tolist())

    def _attention(self, module, query, key, value, attention_mask, scaling=None, **more):
        """What layers call in place of their attention: ``[b, h, s, d]`` in, ``[b, s, h, d]`` out."""
        unknown = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")
        for name in unknown:
            if more.get(name) is not None:
                raise ConfigError(
                    f"layer {self._layer} of {self._place} has attention with {name}: causal softmax "
                    "attention over the whole sequence is supported"
                )
        if attention_mask is not None or not getattr(module, "is_causal", True):
            raise ConfigError(
                f"layer {self._layer} of {self._place} has attention that is masked, or not causal: causal "
                "softmax attention over the whole sequence is supported"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sides = (side.permute(2, 0, 1, 3) for side in (query, key))
        given = LayerInput(self._layer, *sides, scale, value.permute(2, 0, 1, 3))
        out = self._visit(given)
        self._layer += 1
        if out is not None:
            return out.transpose(0, 1), None
        return dense_attention(query, key, value, scale).transpose(1, 2).contiguous(), None

    @contextmanager
    def _explained(self, what: str):
        """transformers' own errors about a file, as one line of ours."""
        try:
            yield
        except ConfigError:
            raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the {what} of {self._place} cannot be loaded: {first_line(error)}"
            ) from error


def tokenizer_of(path: Path):
    """The tokenizer of --tokenizer: a Hugging Face folder, a GGUF file or a sentencepiece model."""
    if path.suffix == ".model":
        require("sentencepiece")
        import sentencepiece

        try:
            processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except Exception as error:
            raise ConfigError(
                f"--tokenizer is {path}, which sentencepiece cannot read: {first_line(error)}"
            ) from None
        return processor.encode
    if path.is_dir():
        require("transformers")
        folder, how = path, {}
    elif path.suffix == ".gguf":
        require("transformers", "gguf")
        folder, how = path.parent, {"gguf_file": path.name}
    elif path.name in ("tokenizer.json", "tokenizer_config.json"):
        require("transformers")
        folder, how = path.parent, {}
    else:
        raise ConfigError(
            f"--tokenizer is {path}: give a Hugging Face folder, a .gguf file or a sentencepiece .model"
        )
    try:
        return _load_tokenizer(folder, how)
    except Exception as error:
        raise ConfigError(
            f"--tokenizer is {path}, which transformers cannot read: {first_line(error)}"
        ) from None


def _load_tokenizer(folder: Path, how: dict):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **how)
    return lambda text: tokenizer(text, verbose=False)["input_ids"]


def _check_architecture(config, place: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{place} is of type {name}, which is more than a decoder of text: that is what is supported"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{place} is of type {name}, which is no causal language model of transformers"
        )
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    replaceable = getattr(model, "_can_set_attn_implementation", lambda: True)
    if not replaceable() or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{place} is of type {name}, whose attention in transformers cannot be replaced: models of the "
            "kind of Llama, Mistral, Qwen2 and Qwen3 are supported"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{place} has layers of {', '.join(sorted(kinds - {'full_attention'}))}: full causal attention "
            "in every layer is supported"
        )
    for field, what in {
        "sliding_window": "sliding windows",
        "attention_chunk_size": "attention in chunks",
        "kv_lora_rank": "multi-latent attention",
        "attn_logit_softcapping": "capped scores",
    }.items():
        value = getattr(config, field, None)
        if value is not None:
            raise ConfigError(
                f"{place} has {what} ({field} {value}): full causal softmax attention is supported"
            )


def _check_scored(config, place: str) -> None:
    """Logits are taken to be the output layer's, of what the last norm gives."""
    for field in ("logits_scaling", "logit_scale", "final_logit_softcapping"):
        value = getattr(config, field, None)
        if value not in (None, 1, 1.0):
            raise ConfigError(
                f"{place} changes its logits ({field} {value}), and --sensitivity measures the loss without: "
                "leave --sensitivity out"
            )


def _shape_of(config, place: str) -> Shape:
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    positions = getattr(config, "max_position_embeddings", None)
    if not all(isinstance(value, int) for value in (heads, layers, positions)):
        raise ConfigError(
            f"{place} is of type {config.model_type}, whose configuration does not say num_attention_heads, "
            "num_hidden_layers and max_position_embeddings: models of the kind of Llama are supported"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(layers, heads, kv_heads, head_dim, positions, config.vocab_size)


def _with_yarn(config, shape: Shape, factor: float, place: str) -> Shape:
    """Let the model's positions go ``factor`` times as far, and return the shape it has then."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind != "default":
        raise ConfigError(
            f"--yarn is {factor:g}, but {place} has "
            + (
                f"rotary positions of type {kind}"
                if kind
                else "no rotary positions that can be scaled"
            )
            + ": leave --yarn out"
        )
    config.rope_parameters = {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": shape.positions,
    }
    positions = int(shape.positions * factor)
    config.max_position_embeddings = positions
    return replace(shape, positions=positions)
