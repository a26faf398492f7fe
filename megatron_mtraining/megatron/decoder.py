# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The layers of a model, as one: what a forward begins with, their documents, and their layout of tokens.

Here and not around the model: trainers exchange a model's ``forward`` or ``_postprocess`` (verl, for fused
losses and multi-token prediction), and Bridge's models have their own. All of them call the decoder, with
hidden states in Megatron's layout, and get such.
"""

from __future__ import annotations

import inspect

from torch import Tensor

from ..config import ConfigError
from .backend import is_active
from .borders import enter, relayout_of
from .packed_documents import check_length, params_for_layers
from .run_state import RUN


def wrap_preprocess(original):
    """``GPTModel._preprocess`` that makes the rotary table for documents laid out as layers have them, also
    where it is called by a forward that is not Megatron's."""
    signature = inspect.signature(original)

    def _preprocess(self, *args, **kwargs):
        if not is_active(self.config):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        borders = getattr(self, "mtraining_borders", None)
        params = given.get("packed_seq_params")
        given["packed_seq_params"] = params_for_layers(params, self.config, borders)
        return original(*bound.args, **bound.kwargs)

    return _preprocess


def wrap_forward(original):
    """``TransformerBlock.forward`` whose layers are given documents (:mod:`.packed_documents`), and hidden
    states in the striped layout (:mod:`.borders`)."""
    signature = inspect.signature(original)

    def forward(self, *args, **kwargs):
        if not is_active(self.config):
            return original(self, *args, **kwargs)
        RUN.begin_forward()
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        borders = getattr(self, "mtraining_borders", None)
        params = params_for_layers(given.get("packed_seq_params"), self.config, borders)
        given["packed_seq_params"] = params
        # Later pipeline stages are given striped hidden states, by Megatron's pipeline.
        hidden = given["hidden_states"] if self.pre_process else None
        if isinstance(hidden, Tensor) and params is not None:
            check_length(params, hidden.shape[0] * _ranks(self))
        if borders is None:
            return original(*bound.args, **bound.kwargs)
        if given.get("extract_layer_indices"):
            raise ConfigError(
                f"extract_layer_indices is {given['extract_layer_indices']}: attention backend mtraining "
                "gives hidden states of layers between without context parallelism only"
            )
        lengths = getattr(params, "lengths", None)
        if hidden is not None:
            enter(borders, given, lengths)
        result = original(*bound.args, **bound.kwargs)
        return relayout_of(borders, result, lengths).back(result) if self.post_process else result

    return forward


def _ranks(decoder) -> int:
    """Ranks that have a part of each sequence of hidden states."""
    groups, config = decoder.pg_collection, decoder.config
    size = 1 if groups.cp is None else groups.cp.size()
    return size * (groups.tp.size() if config.sequence_parallel else 1)
