# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of Megatron-LM in its format torch_dist, read into a GPTModel in one process.

The model is built of Megatron-Core's local layers, which read what its Transformer Engine layers have
saved, for any parallelism that it was saved with.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from argparse import Namespace
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..config import ConfigError
from ..tools.inspect.options import first_line, require
from ..tools.inspect.sources import LayerInput, Shape, dense_attention

TRACKER = "latest_checkpointed_iteration.txt"
FIX = "save it with --ckpt-format torch_dist"

CONFIG_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "rotary_interleaved", "softmax_scale",
    "apply_residual_connection_post_layernorm", "no_rope_freq", "attention_output_gate",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
"""Those fields of TransformerConfig that say what a model computes before and in its attention, as far
as arguments have the same names. None is taken that says how: parallelism, fusions, precision."""

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
}


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a Megatron checkpoint, in any format, or its parent."""
    names = (TRACKER, "metadata.json", "common.pt", ".metadata")
    inside = ("mp_rank_*", "iter_*")
    return any((folder / name).exists() for name in names) or any(
        True for pattern in inside for _ in folder.glob(pattern)
    )


def open_checkpoint(options):
    """The checkpoint in ``options.model``: an iteration's folder, or the parent of several."""
    require("megatron.core")
    return MegatronCheckpoint(options, find_iteration(options.model))


def find_iteration(folder: Path) -> Path:
    """The folder of the latest iteration, where ``folder`` is the parent of several.

    Raises:
        ConfigError: there is none, or it is in another format.
    """
    tracker = folder / TRACKER
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        name = f"iter_{int(word):07d}" if word.isdecimal() else word
        if not (folder / name).is_dir():
            raise ConfigError(
                f"MODEL is {folder}, whose {TRACKER} says {word!r}, but there is no folder {name}: name an "
                "iteration's folder"
            )
        folder = folder / name
    elif iterations := sorted(folder.glob("iter_*")):
        raise ConfigError(
            f"MODEL is {folder}, without {TRACKER}: name an iteration's folder, such as {iterations[-1]}"
        )
    if any(folder.glob("mp_rank_*")):
        raise ConfigError(
            f"MODEL is {folder}, a Megatron checkpoint in the format torch: {FIX}, which Megatron-LM does "
            "when it loads this one and saves it again (--ckpt-convert-format torch_dist)"
        )
    try:
        kind = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = None
    if kind != "torch_dist" or not (folder / ".metadata").is_file():
        what = f"in the format {kind}" if kind not in (None, "torch_dist") else "that is not whole"
        raise ConfigError(
            f"MODEL is {folder}, a Megatron checkpoint {what} (it takes .metadata, and metadata.json with "
            f"sharded_backend torch_dist): {FIX}"
        )
    return folder


def read_common(folder: Path, place: str) -> dict:
    """What of an iteration's folder is not a tensor, the run's arguments among it.

    Args:
        place: what messages call the folder.

    Raises:
        ConfigError: it cannot be read.
    """

    def load():
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_common_state_dict(str(folder))

    try:
        return _quietly(load)
    except (Exception, CheckpointException) as error:
        raise ConfigError(
            f"the arguments in {place} cannot be read by the Megatron-Core that is installed: "
            f"{_reason(error)}"
        ) from error


class MegatronCheckpoint:
    """See :class:`~megatron_mtraining.tools.inspect.sources.Source`."""

    def __init__(self, options, folder: Path):
        self.options, self.folder = options, folder
        self.keys = self._keys()
        common = read_common(self.folder, self._place)
        self.args = common.get("args")
        if not isinstance(self.args, Namespace):
            raise ConfigError(
                f"{self._place} has no arguments of a training run (it has {', '.join(sorted(common))}): "
                "checkpoints of Megatron-LM's pretrain_gpt.py are supported"
            )
        # How keys are named: it differs between versions, and is kept since some.
        self.content = common.get("content_metadata")
        self.description = f"Megatron checkpoint, {folder}"
        self._check()
        self.shape = self._shape()
        self.shape.check(self._place)

    @property
    def _place(self) -> str:
        return f"MODEL ({self.folder})"

    def _arg(self, name: str, default=None):
        value = getattr(self.args, name, None)
        return default if value is None else value

    def _check(self) -> None:
        for name, what in REFUSED.items():
            value = getattr(self.args, name, None)
            if value not in (None, False):
                raise ConfigError(
                    f"{self._place} was trained with {what} ({name} {value}): GPT models with full causal "
                    "attention in every layer are supported"
                )
        softmax = self._arg("softmax_type", "vanilla")
        if softmax != "vanilla":
            raise ConfigError(f"{self._place} was trained with softmax_type {softmax}: use vanilla")
        kind = self._arg("position_embedding_type", "learned_absolute")
        if kind not in ("rope", "yarn", "learned_absolute", "none"):
            raise ConfigError(
                f"{self._place} was trained with position_embedding_type {kind}: rope, yarn, "
                "learned_absolute and none are supported"
            )
        yarn = self.options.yarn
        if yarn is not None and (kind != "rope" or self._arg("use_rope_scaling")):
            named = "--use-rope-scaling" if kind == "rope" else f"positions of type {kind}"
            raise ConfigError(
                f"--yarn is {yarn:g}, but {self._place} has {named}: leave --yarn out"
            )

    def _shape(self) -> Shape:
        names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        missing = [name for name in (*names, "padded_vocab_size") if self._arg(name) is None]
        if missing:
            raise ConfigError(f"the arguments in {self._place} do not say {', '.join(missing)}")
        layers, hidden, heads, positions = (self._arg(name) for name in names)
        grouped = self._arg("group_query_attention", False)
        kv_heads = self._arg("num_query_groups", heads) if grouped else heads
        head_dim = self._arg("kv_channels", hidden // heads)
        if self.options.yarn is not None:
            positions = int(positions * self.options.yarn)
        return Shape(layers, heads, kv_heads, head_dim, positions, self._arg("padded_vocab_size"))

    def tokenizer(self):
        from .hugging_face import tokenizer_of

        if self.options.tokenizer is not None:
            return tokenizer_of(self.options.tokenizer)
        kind = self._arg("tokenizer_type", "an unknown one")
        named = self._arg("tokenizer_model")
        which = f"{kind} {named}" if named else kind
        raise ConfigError(
            f"{self._place} has no tokenizer (it was trained with {which}): name one with --tokenizer, or "
            "give --text as token ids, a .npy file or an indexed data set's .bin"
        )

    @contextmanager
    def loaded(self, scored: bool = False):
        if scored:
            raise ConfigError(
                f"MODEL is {self.options.model}, a Megatron checkpoint, and --sensitivity takes models of "
                "Hugging Face: convert it first (mtraining convert megatron-to-hf)"
            )
        with _one_process(self.options.device):
            yield partial(self._run, _quietly(self._model))

    @torch.no_grad()
    def _run(self, model, tokens, visit) -> None:
        for number, layer in enumerate(model.decoder.layers):
            attention = layer.self_attention
            attention.core_attention = _Listener(number, visit, attention.core_attention)
        tokens = tokens[None].to(self.options.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        _quietly(lambda: model(tokens, positions, None))

    def _model(self, output_layer: bool = False, prepare=lambda config: None):
        """A GPTModel with the checkpoint's weights, on the device.

        Args:
            output_layer: whether it has one.
            prepare: called with its TransformerConfig, before it is built.
        """
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_layer_local_spec,
        )

        kind = self._arg("position_embedding_type", "learned_absolute")
        try:
            config = self._config()
            prepare(config)
            if config.num_moe_experts:
                spec = get_gpt_decoder_block_spec(
                    config, use_transformer_engine=False, normalization=config.normalization
                )
            else:
                spec = get_gpt_layer_local_spec(
                    qk_layernorm=config.qk_layernorm,
                    normalization=config.normalization,
                    qk_l2_norm=config.qk_l2_norm,
                )
            model = GPTModel(
                config,
                spec,
                vocab_size=self.shape.vocabulary,
                max_sequence_length=self._arg("max_position_embeddings"),
                post_process=output_layer,
                share_embeddings_and_output_weights=output_layer
                and not self._arg("untie_embeddings_and_output_weights", False),
                position_embedding_type="yarn" if self.options.yarn else kind,
                rotary_percent=self._arg("rotary_percent", 1.0),
                rotary_base=self._arg("rotary_base", 10000),
                rope_scaling=self._arg("use_rope_scaling", False),
                rope_scaling_factor=self._arg("rope_scaling_factor", 8.0),
                seq_len_interpolation_factor=self._arg("rotary_seq_len_interpolation_factor"),
            )
        except (AssertionError, TypeError, ValueError, NotImplementedError, ImportError) as error:
            raise ConfigError(
                f"{self._place} cannot be built of Megatron-Core's local layers: {first_line(error)}"
            ) from error
        model = model.to(self.options.device).eval()
        self._load_weights(model)
        return model

    def _config(self):
        from dataclasses import fields

        from megatron.core.activations import squared_relu
        from megatron.core.fusions.fused_bias_geglu import quick_gelu
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.enums import AttnBackend

        known = {field.name for field in fields(TransformerConfig)}
        values = {
            name: getattr(self.args, name)
            for name in CONFIG_FIELDS
            if name in known and getattr(self.args, name, None) is not None
        }
        # Names that arguments have had in other versions.
        for name, other in {
            "layernorm_epsilon": "norm_epsilon",
            "layernorm_zero_centered_gamma": "apply_layernorm_1p",
            "num_moe_experts": "num_experts",
        }.items():
            if self._arg(other) is not None:
                values.setdefault(name, self._arg(other))
        values["num_query_groups"] = self.shape.kv_heads
        if self._arg("swiglu"):
            values |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        elif self._arg("squared_relu"):
            values["activation_func"] = squared_relu
        elif self._arg("quick_geglu"):
            values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
        dtype = self.options.dtype
        config = TransformerConfig(
            **values,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            use_cpu_initialization=True,
            perform_initialization=False,
            attention_backend=AttnBackend.auto,
            # Fusions need a GPU, apex or Transformer Engine.
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
        )
        yarn = self.options.yarn
        settings = {
            "yarn_rotary_scaling_factor": yarn or self._arg("rotary_scaling_factor", 1.0),
            "yarn_original_max_position_embeddings": self._arg("max_position_embeddings")
            if yarn
            else self._arg("yarn_original_max_position_embeddings", 4096),
            "yarn_beta_fast": self._arg("yarn_beta_fast", 32.0),
            "yarn_beta_slow": self._arg("yarn_beta_slow", 1.0),
            "yarn_mscale": self._arg("mscale", 1.0),
            "yarn_mscale_all_dim": self._arg("mscale_all_dim", 0.0),
            "yarn_correction_range_round_to_int": self._arg(
                "yarn_correction_range_round_to_int", True
            ),
        }
        if yarn or self._arg("position_embedding_type") == "yarn":
            for name, value in settings.items():
                setattr(config, name, value)
        return config

    def _load_weights(self, model) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        try:
            wanted = model.sharded_state_dict(metadata=self.content)
        except TypeError:  # a version without
            wanted = model.sharded_state_dict()
        # What Transformer Engine keeps beside tensors, of which local layers have none.
        _, wanted = extract_matching_values(wanted, lambda value: isinstance(value, ShardedObject))
        missing = sorted({entry.key for entry in _entries(wanted)} - self.keys)
        if missing:
            near = sorted(
                key for key in self.keys if key.startswith(("decoder", "embedding", "model"))
            )
            raise ConfigError(
                f"{self._place} lacks {len(missing)} of the tensors that such a model has, {missing[0]} for "
                f"one; among those it has are {', '.join(near[:5]) or 'none of a model'}"
            )
        try:
            loaded = dist_checkpointing.load(
                {"model": wanted}, str(self.folder), validate_access_integrity=False
            )
        except (Exception, CheckpointException) as error:
            raise ConfigError(
                f"the weights of {self._place} cannot be loaded: {_reason(error)}"
            ) from error
        left = model.load_state_dict(loaded["model"], strict=False)
        absent = [name for name in left.missing_keys if not name.endswith("_extra_state")]
        if absent or left.unexpected_keys:
            raise ConfigError(
                f"the weights of {self._place} do not fit: {(absent + left.unexpected_keys)[0]}"
            )

    def _keys(self) -> set[str]:
        """The names of all that is saved in parts, tensors above all."""
        from torch.distributed.checkpoint import FileSystemReader

        try:
            return set(FileSystemReader(self.folder).read_metadata().state_dict_metadata)
        except Exception as error:
            raise ConfigError(
                f".metadata of {self._place} cannot be read by torch {torch.__version__}; was it saved by a "
                f"newer one? ({first_line(error)})"
            ) from error


class _Listener(torch.nn.Module):
    """Core attention of a layer: hands on what it is given, and is dense."""

    def __init__(self, layer: int, visit, replaced):
        super().__init__()
        self.layer, self.visit, self.softmax_scale = layer, visit, replaced.softmax_scale

    def forward(self, query, key, value, *args, **kwargs):
        self.visit(LayerInput(self.layer, query, key, self.softmax_scale))
        heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return dense_attention(*heads_first, self.softmax_scale).permute(2, 0, 1, 3).flatten(2)


def indexed_tokens(path: Path, count: int):
    """The first tokens of Megatron's indexed data set (.bin, with .idx beside it): int64 ``[n]``.

    Raises:
        ConfigError: it cannot be read.
    """
    import numpy as np

    require("megatron.core")
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise ConfigError(f"--text is {path}, an indexed data set without {index.name} beside it")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    parts, length = [], 0
    try:
        documents = IndexedDataset(str(path.with_suffix("")))
        for number in range(len(documents)):
            parts.append(np.asarray(documents[number], dtype=np.int64))
            length += len(parts[-1])
            if length >= count:
                break
    except Exception as error:
        raise ConfigError(
            f"--text is {path}, which Megatron-Core cannot read: {first_line(error)}"
        ) from None
    return np.concatenate(parts or [np.empty(0, np.int64)])[:count]


@contextmanager
def _one_process(device: torch.device):
    """Megatron's process groups, of this process alone, while the context lasts."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from .cpu import megatron_on_cpu

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        with megatron_on_cpu(not on_gpu), _without_variables("NVTE_"):
            parallel_state.initialize_model_parallel()
            try:
                model_parallel_cuda_manual_seed(0)
                yield
            finally:
                parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_variables(prefix: str):
    """The environment without variables of a prefix, while the context lasts: Megatron-Core sets some by the
    attention backend of a model, and refuses the next model if they are not what it would set."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(prefix)]:
            del os.environ[name]
        yield


def _reason(error: BaseException) -> str:
    """What went wrong, in a line; of a CheckpointException, the end of the traceback that it quotes."""
    if isinstance(error, CheckpointException):
        return str(error).strip().splitlines()[-1].strip()
    return first_line(error)


def _entries(tree):
    """The leaves of nested dicts and lists."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _entries(part)
    else:
        yield tree


def _quietly(function):
    """Call a function without Megatron's notices of what is deprecated or not installed."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()
    finally:
        logger.setLevel(level)
