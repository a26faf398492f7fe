# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``GPTModel`` with attention backend ``mtraining``: what its construction is given and leaves."""

from __future__ import annotations

import inspect

from ..config import ConfigError, option
from .arguments import config_from_args, settings
from .backend import is_active, training_arguments
from .checks import ranks_a_node


def wrap_gpt_model(original):
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        """Puts our core attention into the layer spec, stripes the rotary embedding and splits the
        loss into chunks, when the config chooses attention backend mtraining. Megatron has no registry
        of core attentions; this is the one place that every version builds its GPT models through."""
        bound = signature.bind(self, *args, **kwargs)
        config = bound.arguments["config"]
        if not is_active(config):
            return original(self, *args, **kwargs)
        from . import output, rotary
        from .spec import replace_core_attention

        given = bound.arguments
        if given.get("mtp_block_spec") is not None:
            raise ConfigError(
                "mtp_block_spec is given (--mtp-num-layers): multi-token prediction shifts tokens "
                "in Megatron's own context-parallel layout, which attention backend mtraining "
                "does not use; leave it out"
            )
        _check_one_layout(config)
        if given.get("position_embedding_type") == "yarn":
            rotary.check_yarn_fields(config)
        given["transformer_layer_spec"] = replace_core_attention(given["transformer_layer_spec"])
        with rotary.building():
            original(*bound.args, **bound.kwargs)
        ours = settings(config)
        output.chunk_loss(self, ours.loss_chunk)
        embedding = getattr(self, "rotary_pos_emb", None)
        if embedding is not None:
            group = self.pg_collection.cp
            size = 1 if group is None else group.size()
            inner = ranks_a_node(config, size, ours.gathered_ranks, command_line=False)
            rotary.stripe_embedding(embedding, group, ours.block_size, inner)

    return __init__


def _check_one_layout(config) -> None:
    """The batch is striped by the command line's settings, the model by its config's."""
    arguments = training_arguments()
    if arguments is None or not is_active(arguments):
        return
    for name in ("block_size", "gathered_ranks"):
        batch, model = (getattr(s, name) for s in (config_from_args(arguments), settings(config)))
        if batch != model:
            raise ConfigError(
                f"config.mtraining has {name} {model}, but {option(name)}, which batches are cut by, is "
                f"{batch}: make them equal"
            )
    name = "hierarchical_context_parallel_sizes"
    batch, model = ([*(getattr(s, name, None) or ())] for s in (arguments, config))
    if batch != model:
        raise ConfigError(
            f"config.{name} is {model}, but --{name.replace('_', '-')}, which batches are dealt to ranks "
            f"by, is {batch}: make them equal"
        )


def wrap_any_model(original):
    signature = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        """Refuses models other than GPTModel with attention backend mtraining, vision encoders
        too: Megatron does nothing on a backend that it does not know, so they would run dense,
        unseen."""
        from megatron.core.models.gpt.gpt_model import GPTModel

        config = signature.bind(self, *args, **kwargs).arguments["config"]
        if is_active(config) and not isinstance(self, GPTModel):
            raise ConfigError(
                f"attention backend mtraining works with GPTModel only, not with "
                f"{type(self).__name__}: choose another --attention-backend"
            )
        return original(self, *args, **kwargs)

    return __init__
