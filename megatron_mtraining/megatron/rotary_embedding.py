# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Rotary embeddings in the striped layout, for the models that use it and no others."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from ..config import ConfigError
from ..layout import stripe

CACHED = 4
"""Lengths whose table a model caches: training and evaluation have one each."""

_building: ContextVar[bool] = ContextVar("mtraining_building_a_model", default=False)


@contextmanager
def building():
    """Marks the construction of one of our models; see :func:`wrap_yarn_cache`."""
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


class _Striped:
    """The part of a rotary table that lives on this rank.

    In place of upstream's ``forward``, which slices in zigzag order and keeps whole tables in a
    cache shared by all models (``functools.lru_cache``, keyed by the module).
    """

    def _own_part(self, max_seq_len: int, offset: int, packed_seq: bool, cp_group):
        if packed_seq:
            raise ConfigError("attention backend mtraining does not support packed sequences")
        group = self.mtraining_cp_group if cp_group is None else cp_group
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        key = (max_seq_len, offset, rank, size)
        cache = self.mtraining_cache
        if key not in cache:
            if len(cache) == CACHED:
                del cache[next(iter(cache))]
            with torch.inference_mode(False):  # kept for training, too
                table = self.get_emb(max_seq_len, offset)
                table, rest = table if isinstance(table, tuple) else (table, None)
                if size > 1:  # on one rank the last block may be partial
                    block_size, inner = self.mtraining_block_size, self.mtraining_inner
                    table = stripe(table, rank, size, block_size, inner=inner)
                cache[key] = (table, rest)
        return cache[key]


class StripedRotaryEmbedding(_Striped, RotaryEmbedding):
    """RoPE; made from a ``RotaryEmbedding`` by :func:`stripe_embedding`."""

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> Tensor:
        """``[max_seq_len / cp, 1, 1, dim]`` float32, as upstream's, of this rank's tokens."""
        return self._own_part(max_seq_len, offset, packed_seq, cp_group)[0]


class StripedYarnRotaryEmbedding(_Striped, YarnRotaryEmbedding):
    """YaRN; made from a ``YarnRotaryEmbedding`` by :func:`stripe_embedding`."""

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> tuple[Tensor, float]:
        """As upstream's: the table ``[max_seq_len / cp, 1, 1, dim]`` and the concentration."""
        return self._own_part(max_seq_len, offset, packed_seq, cp_group)


STRIPED = {
    RotaryEmbedding: StripedRotaryEmbedding,
    YarnRotaryEmbedding: StripedYarnRotaryEmbedding,
}


def stripe_embedding(
    embedding: torch.nn.Module, cp_group, block_size: int, inner: int | None = None
) -> None:
    """Turn one model's rotary embedding into its striped counterpart, in place.

    The class is exchanged rather than ``forward`` set on the instance, so that copies and pickles
    of the model have their own.

    Args:
        embedding: ``model.rotary_pos_emb``.
        cp_group: the model's context-parallel group, or None.
        block_size: tokens in a block of the layout.
        inner: ranks of the inner group, as for :func:`~megatron_mtraining.layout.inner_size`.

    Raises:
        ConfigError: it is neither RoPE nor YaRN.
    """
    if isinstance(embedding, _Striped):
        return
    if type(embedding) not in STRIPED:
        raise ConfigError(
            f"the position embedding is {type(embedding).__name__}: attention backend mtraining "
            "supports --position-embedding-type rope and yarn (and those without a table)"
        )
    embedding.mtraining_cp_group = cp_group
    embedding.mtraining_block_size = block_size
    embedding.mtraining_inner = inner
    embedding.mtraining_cache = {}
    embedding.__class__ = STRIPED[type(embedding)]


YARN_FIELDS = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
"""What ``GPTModel`` reads of its config with YaRN, in all versions: no fields of TransformerConfig,
and set by Megatron-LM itself from 0.19 on only."""


def check_yarn_fields(config) -> None:
    """Raise :class:`ConfigError` unless ``config`` has all of :data:`YARN_FIELDS`."""
    missing = [name for name in YARN_FIELDS if not hasattr(config, name)]
    if missing:
        raise ConfigError(
            f"position_embedding_type is yarn, but the config has no {', '.join(missing)}: set them on "
            "it. Megatron-LM 0.19 and later sets them from --rotary-scaling-factor and "
            "--yarn-original-max-position-embeddings; earlier ones have no options for YaRN of GPT models"
        )


def wrap_yarn_cache(original):
    """``YarnRotaryEmbedding._set_cos_sin_cache``, unsliced while one of our models is built."""

    def _set_cos_sin_cache(self, seq_len, offset, dtype, packed_seq=False, *others, **named):
        packed_seq = packed_seq or _building.get()
        return original(self, seq_len, offset, dtype, packed_seq, *others, **named)

    return _set_cos_sin_cache
