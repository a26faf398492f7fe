# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What makes ``attn_implementation="mtraining"`` known to transformers, and gives models their settings."""

from __future__ import annotations

import inspect
import warnings
from functools import cache, wraps
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config import MEGATRON_ONLY, ConfigError, MTrainingConfig, lookahead_warning
from ..cp_group import ProcessGroup
from ..kernels.limits import HEAD_DIMS
from ..requirements import require
from .checkpointing import is_second_run, keep_results
from .interface import NAME, attention, is_in_use, mask
from .masking import PatternMask, under_way, zeros_and_ones
from .sequence import check_model
from .state import ATTRIBUTE, PatternState, find_state
from .trainers import is_trainer, share_sequences

if TYPE_CHECKING:
    from transformers import Trainer

SLIDING, RECURRENT = "sliding_attention", "linear_attention"
LAYER_TYPES = ("full_attention", SLIDING, RECURRENT)
"""Kinds of layers, as configurations of transformers name them, that are supported."""


@cache
def register() -> None:
    """Add ``attn_implementation="mtraining"`` to transformers, and :class:`~.callback.PatternCallback` to its
    trainers. Importing :mod:`megatron_mtraining.transformers` calls it, once.

    Raises:
        ConfigError: transformers is not installed, or too old to have attention and mask interfaces.
    """
    require("transformers", extra="hf")
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
    except ImportError:
        import transformers

        raise ConfigError(
            f"transformers {transformers.__version__} has no attention interface: install transformers>=5.10"
        ) from None
    # What is chosen online is not for torch.compile, which compiles the layers around it.
    ALL_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(attention))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    _give_defaults(PreTrainedModel)
    _refuse_assisted_decoding()
    from .callback import add_to_trainers

    add_to_trainers()


def _give_defaults(kind: type) -> None:
    """Have models of transformers take the default settings with this attention, where they are made
    (``from_pretrained(..., attn_implementation="mtraining")``) and where it is set."""
    post_init, set_implementation = kind.post_init, kind.set_attn_implementation

    @wraps(post_init)
    def after_init(self):
        post_init(self)
        if self.config._attn_implementation == NAME and find_state(self) is None:
            _attach_defaults(self)
            _check_interface(self)

    @wraps(set_implementation)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        if isinstance(attn_implementation, dict):  # by part of a model
            named = attn_implementation.get("") == NAME
        else:
            named = attn_implementation == NAME
        if named and find_state(self) is None:
            _attach_defaults(self)
        set_implementation(self, attn_implementation, *args, **kwargs)
        if named:
            _check_interface(self)

    kind.post_init, kind.set_attn_implementation = after_init, set_attn_implementation


def _attach_defaults(model: nn.Module) -> None:
    """Default settings, with a line in the log: trainers make models of their own, such as reference models,
    which do not have the settings that :func:`configure` gives to another."""
    from transformers.utils import logging

    _attach(model, MTrainingConfig())
    logging.get_logger(__name__).warning(
        f"{type(model).__name__} attends with the default settings of attention mtraining (policy price, "
        f"{MTrainingConfig().policy.price:g}) until megatron_mtraining.transformers.configure gives it others"
    )


def _refuse_assisted_decoding() -> None:
    """Have ``generate`` refuse assisted decoding for models with this attention.

    Its first forward is of the prompt and of tokens that an assistant proposes, so the pattern would depend
    on them. The mask function and the attention function cannot tell it from a prompt. So the method that
    makes the assistant refuses.
    """
    from transformers.generation import GenerationMixin

    # No public method is called with assisted decoding alone. Without this one nothing can be refused.
    original = getattr(GenerationMixin, "_get_candidate_generator", None)
    if original is None:
        return

    @wraps(original)
    def candidates(self, *args, **kwargs):
        if is_in_use(self):
            raise ConfigError(
                "generate is asked for assisted decoding (assistant_model, prompt_lookup_num_tokens or "
                "another way to propose tokens), where a prompt's pattern would depend on the proposed "
                "tokens: attention mtraining supports generation without it"
            )
        return original(self, *args, **kwargs)

    GenerationMixin._get_candidate_generator = candidates


def configure(
    model: nn.Module,
    config: MTrainingConfig | None = None,
    *,
    dense_tail: int = 0,
    num_steps: int | None = None,
    sequence_parallel: ProcessGroup | Trainer | None = None,
) -> PatternState:
    """Switch a transformers model to dynamic sparse attention.

    Sets its attention implementation to ``mtraining`` and gives its attention layers the settings. Weights do
    not change; ``model.set_attn_implementation("sdpa")`` switches back.

    Args:
        model: a causal language model, or its body.
        config: the settings, also by layer and head (``settings``); None for the defaults. Options of
            context parallelism, Megatron's loss and balance have no effect here and are refused.
        dense_tail: in evaluation mode, this many last tokens of a prompt attend to all keys. A pattern is
            selected by what many queries attend to; the few queries of a question at the end of a prompt
            have little say in it. Of packed sequences, tokens of the last one alone, all of it if it is
            shorter. Density does not count it. In training mode there is no such tail.
        num_steps: optimizer steps of the run, for a schedule in a training loop of your own; ``Trainer``
            says it itself (``max_steps``).
        sequence_parallel: the process group of ranks that each have consecutive tokens of the same
            sequences, in its order; give the model what :func:`~.sequence.cut_batch` makes of a batch. In
            evaluation mode and under ``torch.no_grad()``, forwards without ``use_cache=False``, such as those
            of ``generate``, have whole sequences on each rank. Or the model's trainer, with ``cp_size`` or
            ``sp_size`` in its ``ParallelismConfig``, which then shares sequences by itself.

    Returns:
        The state of the model: its prices, and means of density and recall.

    Raises:
        ConfigError: the model or the settings are not supported; the message names the reason.
    """
    register()
    config = MTrainingConfig() if config is None else config
    if not isinstance(config, MTrainingConfig):
        raise ConfigError(f"config is a {type(config).__name__}: give an MTrainingConfig")
    check_config(config)
    of_model = getattr(model, "config", None)
    if of_model is None or not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"model is a {type(model).__name__}: give a model of transformers")
    _check_devices(model)
    state = _attach(model, config, dense_tail, num_steps, sequence_parallel)
    model.set_attn_implementation(NAME)
    return state


def _attach(
    model: nn.Module,
    config: MTrainingConfig,
    dense_tail: int = 0,
    num_steps: int | None = None,
    sequence_parallel: ProcessGroup | Trainer | None = None,
) -> PatternState:
    """Give a model's attention layers their settings, and see what its forwards are given."""
    from transformers import PreTrainedModel

    of_model, name = model.config, type(model).__name__
    _check_model(of_model, name)
    layers = [module for module in model.modules() if _is_attention(module)]
    numbers = sorted(module.layer_idx for module in layers)
    count, without = of_model.num_hidden_layers, _layers_of(of_model, RECURRENT)
    if not numbers or sorted([*numbers, *without]) != list(range(count)):
        raise ConfigError(
            f"{name} has {count} layers, but causal attention in layers {numbers}: attention mtraining "
            "supports models with one causal self-attention in each layer that is not linear"
        )
    if type(dense_tail) is not int or dense_tail < 0:
        raise ConfigError(f"dense_tail is {dense_tail!r}: give a number of tokens, 0 or more")
    if num_steps is not None and (type(num_steps) is not int or num_steps < 1):
        raise ConfigError(
            f"num_steps is {num_steps!r}: give a number of optimizer steps, 1 or more"
        )
    heads = of_model.num_attention_heads
    state = PatternState(config, count, heads, dense_tail, num_steps)
    if sequence_parallel is not None:
        check_model(of_model, name, without)
        if is_trainer(sequence_parallel):
            share_sequences(sequence_parallel, state)
        else:
            state.share_sequences(sequence_parallel)
    state.steering.leave_out(_layers_of(of_model, SLIDING, RECURRENT))
    if ahead := lookahead_warning(config, *state.shape):
        warnings.warn(ahead, stacklevel=3)
    # The innermost model around the layers: heads and adapters around it may come and go.
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    body = [each for each in models if any(module is layers[0] for module in each.modules())][-1]
    if not hasattr(body, ATTRIBUTE):
        body.register_forward_pre_hook(_before_forward, with_kwargs=True)
        body.register_forward_hook(_after_forward, always_call=True)
    for module in (body, *layers):
        setattr(module, ATTRIBUTE, state)
    return state


def _before_forward(body: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Before the forward of a model's body: keep what says where tokens and sequences are, of which
    transformers tells a mask function only a part. Returns other arguments for it, or None."""
    state: PatternState = getattr(body, ATTRIBUTE)
    is_ours = body.config._attn_implementation == NAME
    if is_ours and not state.is_placed:  # from_pretrained places a model only after it has made it
        _check_devices(body)
        state.is_placed = True
    names = inspect.signature(body.forward).parameters
    given = {**dict(zip(names, args)), **kwargs}
    if is_ours and not is_second_run():
        state.settle(body, all_ranks=body.training)
    trains = body.training and torch.is_grad_enabled()
    parallel, passed = state.parallel if is_ours else None, None
    if is_ours and (given_mask := given.get("attention_mask")) is not None:
        passed = _with_mask(args, kwargs, [*names], zeros_and_ones(given_mask))
    # Others than in training are of whole sequences, such as prompts, unless they say that they are not.
    if parallel is not None and not trains:
        is_part = parallel.evaluates and given.get("use_cache") is False
        parallel = parallel if is_part else None
    if parallel is not None:
        given = parallel.whole(given, state.agreed())
    if is_ours and trains:
        state.begin_forward(body)
        keep_results(body, not state.config.recompute_attention)
    recurrent = body.config.model_type if _layers_of(body.config, RECURRENT) else None
    under_way.set(PatternMask(given, parallel, recurrent))
    return passed


def _with_mask(
    args: tuple, kwargs: dict, names: list[str], mask: torch.Tensor
) -> tuple[tuple, dict]:
    """Arguments of a forward with another ``attention_mask``."""
    if "attention_mask" in kwargs:
        return args, kwargs | dict(attention_mask=mask)
    at = names.index("attention_mask")
    return (*args[:at], mask, *args[at + 1 :]), kwargs


def _after_forward(body: nn.Module, args: tuple, output) -> None:
    under_way.set(None)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "is_causal")


def check_config(config: MTrainingConfig) -> None:
    """Raise :class:`ConfigError` for options that only Megatron's runs read."""
    defaults = MTrainingConfig()
    for name in set(MEGATRON_ONLY) - {"recompute_attention"}:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise ConfigError(
                f"{name} is {value}, which has no effect in transformers: leave it out"
            )


def _check_devices(model: nn.Module) -> None:
    devices = sorted({str(each.device) for each in model.parameters()})
    if len(devices) > 1:
        raise ConfigError(
            f"{type(model).__name__} has parameters on {', '.join(devices)}: attention mtraining supports "
            "one device in each process; leave out device_map, and start one process for each GPU with "
            "torchrun"
        )


def _check_interface(model: nn.Module) -> None:
    can_set = getattr(model, "_can_set_attn_implementation", lambda: True)
    if model.config._attn_implementation != NAME or not can_set():
        raise ConfigError(
            f"{type(model).__name__} does not go through transformers' attention interface: models such as "
            "Llama, Mistral, Qwen2 and Qwen3 do"
        )


def _check_model(config, name: str) -> None:
    if config.get_text_config() is not config:
        raise ConfigError(f"{name} has several parts: call configure on its language model")
    heads = _of_all_layers(config, "num_attention_heads", name)
    if not heads:
        raise ConfigError(f"{name} has no attention heads: give a model with attention")
    head_dim = _of_all_layers(config, "head_dim", name) or config.hidden_size // heads
    _of_all_layers(config, "sliding_window", name)
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"{name} has attention heads of dimension {head_dim}: attention mtraining supports {HEAD_DIMS}"
        )
    keys, values = getattr(config, "qk_head_dim", head_dim), getattr(config, "v_head_dim", None)
    if values and values != keys:
        raise ConfigError(
            f"{name} has keys of dimension {keys} and values of {values} (v_head_dim), as in multi-latent "
            "attention: attention mtraining supports heads whose keys and values have the same"
        )
    others = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if others:
        raise ConfigError(
            f"{name} has layers of type {', '.join(sorted(others))}: attention mtraining supports "
            f"{', '.join(LAYER_TYPES)}"
        )


def _of_all_layers(config, field: str, name: str):
    """What a configuration has for all layers alike; None if it has nothing."""
    try:
        return getattr(config, field, None)
    except RuntimeError as error:  # of transformers, where layers have settings of their own
        raise ConfigError(
            f"{name} has layers with {field} of their own: attention mtraining supports models whose layers "
            "have the same"
        ) from error


def _layers_of(config, *wanted: str) -> list[int]:
    """The layers, from 0, of these types."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # then all are alike
        window = getattr(config, "sliding_window", None)
        kinds = ["full_attention" if window is None else SLIDING] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind in wanted]
