# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``GPTModel`` with attention backend ``mtraining``: its layer specs, rotary embedding and output layer."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

from ..config import ConfigError
from . import packed_documents
from .arguments import settings
from .backend import is_active, training_arguments
from .borders import borders_of
from .checks import SCHEDULE_PLAN, inner_group_size, is_from
from .layer_pattern import HYBRID
from .ranks import check_ranks
from .rotary_options import pass_on, warn_of_dropped
from .run_state import RUN
from .wrapping import log_replaced


def wrap_build_schedule_plan(original):
    """``GPTModel.build_schedule_plan``, which runs layers one by one: what the model's forward and
    :mod:`.decoder` do, but for context parallelism."""
    with_documents = packed_documents.wrap_forward(original)

    def build_schedule_plan(self, *args, **kwargs):
        if is_active(self.config):
            if self.mtraining_borders is not None:
                raise ConfigError(
                    f"build_schedule_plan: {SCHEDULE_PLAN}; call the model's forward, or use a "
                    "context_parallel_size of 1"
                )
            RUN.begin_forward()
        return with_documents(self, *args, **kwargs)

    return build_schedule_plan


def wrap_gpt_model(original):
    """``GPTModel.__init__`` with our core attention, rotary embedding and output layer."""
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        config = given["config"]
        if not is_active(config):
            warn_of_dropped(given, training_arguments())
            return original(self, *args, **kwargs)
        from .layer_spec import replace_core_attention
        from .mtp import check_mtp, convert_layers, replace_mtp_attention

        if pattern := getattr(training_arguments(), "hybrid_layer_pattern", None):
            raise ConfigError(
                f"--hybrid-layer-pattern is {pattern}, but this script builds a GPTModel, which ignores it: "
                "use pretrain_hybrid.py, or leave it out"
            )
        with prepare_model(given):
            check_mtp(config)
            if given.get("mtp_block_spec") is not None:
                given["mtp_block_spec"] = replace_mtp_attention(given["mtp_block_spec"])
            spec = replace_core_attention(given["transformer_layer_spec"])
            given["transformer_layer_spec"] = spec
            original(*bound.args, **bound.kwargs)
        finish_model(self)
        convert_layers(self)

    return __init__


@contextmanager
def prepare_model(given: dict):
    """Around a model's own constructor.

    Args:
        given: its arguments, by name; changed.
    """
    from .rotary_embedding import building, check_yarn_fields

    log_replaced()
    check_ranks(given["config"])
    if given.get("position_embedding_type") == "yarn":
        check_yarn_fields(given["config"])
    pass_on(given, training_arguments())
    with building():
        yield


def finish_model(model) -> None:
    """Change the rotary embedding and the output layer of a model that is built, and the layout of tokens
    around its decoder."""
    from . import output_layer, rotary_embedding
    from .recurrent import stripe_layers

    config = model.config
    ours = settings(config)
    output_layer.chunk_loss(model, ours.loss_chunk)
    group = model.pg_collection.cp
    size = 1 if group is None else group.size()
    inner = inner_group_size(config, size, ours.gathered_ranks, command_line=False)
    model.mtraining_borders = borders_of(model, ours.block_size, inner)
    model.decoder.mtraining_borders = model.mtraining_borders
    stripe_layers(model)
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is not None:
        rotary_embedding.stripe_embedding(embedding, group, ours.block_size, inner)


def wrap_any_model(original):
    """A model's ``__init__`` that refuses the backend unless the model is a GPTModel or a HybridModel."""
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        config = signature.bind(self, *args, **kwargs).arguments["config"]
        if is_active(config) and not isinstance(self, _models()):
            raise ConfigError(
                f"attention backend mtraining works with GPTModel only, and from Megatron-Core 0.18 on with "
                f"HybridModel, not with {type(self).__name__}: choose another --attention-backend"
            )
        return original(self, *args, **kwargs)

    return __init__


def _models() -> tuple[type, ...]:
    """The classes that the backend works with."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    if not is_from(HYBRID):
        return (GPTModel,)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return GPTModel, HybridModel


def wrap_inference(original):
    """``AbstractModelInferenceWrapper.__init__`` that refuses models with the backend."""

    def __init__(self, model, *args, **kwargs):
        if is_active(getattr(model, "config", None)):
            raise ConfigError(
                "attention backend mtraining does not support inference: build the model with "
                "--attention-backend auto, into which checkpoints of this one load"
            )
        return original(self, model, *args, **kwargs)

    return __init__
