# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Which tensor of Hugging Face's is which part of which of Megatron's.

Megatron's torch_dist keeps a tensor of all layers as one, ``[layers, ...]``, and those of experts as
``[layers, experts, ...]``. Its names are those of Transformer Engine's layers, which local layers are mapped
to when they load: but for the norm before experts, which the two look for under two names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .families import Model


@dataclass(frozen=True)
class Mapped:
    """A tensor of Hugging Face's, and where it is in Megatron's.

    Attributes:
        name, shape: Hugging Face's.
        key, size: Megatron's, whole.
        offset, region: the part of it that holds this tensor; with ``part``, also others.
        part: ``q``, ``k`` or ``v`` where these are interleaved by group, else empty.
        also: another key that holds the same.
    """

    name: str
    shape: tuple[int, ...]
    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    region: tuple[int, ...]
    part: str = ""
    also: str = ""


def mapped(model: Model) -> Iterator[Mapped]:
    """All tensors of a model, in the order in which Hugging Face writes them."""
    hidden, vocab = model.hidden, (model.vocab, model.hidden)
    padded = (model.padded_vocab, hidden)

    def whole(name, key, shape, size=None):
        return Mapped(name, shape, key, size or shape, (0,) * len(shape), shape)

    yield whole("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab, padded)
    for layer in range(model.layers):
        yield from _layer(model, layer)
    yield whole("model.norm.weight", "decoder.final_layernorm.weight", (hidden,))
    if not model.tied:
        yield whole("lm_head.weight", "output_layer.weight", vocab, padded)


def _layer(model: Model, layer: int) -> Iterator[Mapped]:
    hf, meg = f"model.layers.{layer}.", "decoder.layers."
    hidden, dim, layers = model.hidden, model.head_dim, model.layers
    queries, keys = model.heads * dim, model.groups * dim

    def stacked(name, key, shape, size=None, start=0, experts=(), also="", part="", region=None):
        lead = (layer, *(index for index, _ in experts))
        outer = (layers, *(count for _, count in experts))
        region = region or shape
        return Mapped(
            hf + name,
            shape,
            meg + key,
            (*outer, *(size or shape)),
            (*lead, start, *(0 for _ in shape[1:])),
            (*(1 for _ in outer), *region),
            part,
            meg + also if also else "",
        )

    attention = "self_attention."
    yield stacked("input_layernorm.weight", attention + "linear_qkv.layer_norm_weight", (hidden,))
    rows = queries + 2 * keys
    for kind in ("weight", "bias") if model.family.qkv_bias else ("weight",):
        inner = (hidden,) if kind == "weight" else ()
        for part, count in (("q", queries), ("k", keys), ("v", keys)):
            yield stacked(
                f"self_attn.{part}_proj.{kind}",
                f"{attention}linear_qkv.{kind}",
                (count, *inner),
                (rows, *inner),
                part=part,
                region=(rows, *inner),
            )
    if model.family.qk_norm:
        for part in ("q", "k"):
            key = f"{attention}{part}_layernorm.weight"
            yield stacked(f"self_attn.{part}_norm.weight", key, (dim,))
    yield stacked("self_attn.o_proj.weight", attention + "linear_proj.weight", (hidden, queries))
    fused, own = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    name = "post_attention_layernorm.weight"
    if not model.experts:
        yield stacked(name, fused, (hidden,))
        yield from _mlp(stacked, "mlp.", "mlp.", hidden, model.ffn)
        return
    yield stacked(name, own, (hidden,), also=fused)
    yield stacked("mlp.gate.weight", "mlp.router.weight", (model.experts, hidden))
    for expert in range(model.experts):
        where = dict(experts=((expert, model.experts),))
        hf_mlp, meg_mlp = f"mlp.experts.{expert}.", "mlp.experts.experts."
        yield from _mlp(stacked, hf_mlp, meg_mlp, hidden, model.expert_ffn, **where)


def _mlp(stacked, hf: str, meg: str, hidden: int, ffn: int, **where) -> Iterator[Mapped]:
    """Gate and up projection are one in Megatron, the gate's rows first."""
    fc1, both = meg + "linear_fc1.weight", (2 * ffn, hidden)
    yield stacked(hf + "gate_proj.weight", fc1, (ffn, hidden), both, 0, **where)
    yield stacked(hf + "up_proj.weight", fc1, (ffn, hidden), both, ffn, **where)
    yield stacked(hf + "down_proj.weight", meg + "linear_fc2.weight", (hidden, ffn), **where)


def extra_states(model: Model) -> Iterator[str]:
    """The entries beside tensors that layers look for when they load, Transformer Engine's among them: they
    hold FP8's scales, and are empty here."""
    names = ["linear_qkv", "linear_proj", "core_attention"]
    if model.family.qk_norm:
        names += ["q_layernorm", "k_layernorm"]
    names = [f"self_attention.{name}" for name in names]
    names += ["input_layernorm", "pre_mlp_layernorm"]
    if not model.experts:
        names += ["mlp.linear_fc1", "mlp.linear_fc2"]
    count = model.layers
    for layer in range(count):
        for name in names:
            yield f"decoder.layers.{name}._extra_state/shard_{layer}_{count}"
        for expert in range(model.experts):
            for name in ("linear_fc1", "linear_fc2"):
                place = f"shard_{layer}.{expert}_{count}.{model.experts}"
                yield f"decoder.layers.mlp.experts.experts.{name}._extra_state/{place}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def interleave(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Megatron's rows of queries, keys and values: for each group its queries' heads, key and value.

    Args:
        query: ``[heads * dim, ...]``; key, value: ``[groups * dim, ...]``.

    Returns:
        ``[(heads + 2 * groups) * dim, ...]``.
    """
    rest = query.shape[1:]
    parts = [x.reshape(model.groups, -1, *rest) for x in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, *rest)


def part_of(model: Model, rows: Tensor, part: str) -> Tensor:
    """The inverse of :func:`interleave`, for one of the three."""
    per = model.heads // model.groups * model.head_dim
    begin, end = {
        "q": (0, per),
        "k": (per, per + model.head_dim),
        "v": (per + model.head_dim, per + 2 * model.head_dim),
    }[part]
    grouped = rows.reshape(model.groups, -1, *rows.shape[1:])
    return grouped[:, begin:end].reshape(-1, *rows.shape[1:])


def places(
    tensor: Mapped,
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Where a checkpoint may hold a tensor: ``(key, size, offset, region)``, the usual place first.

    Runs with layers that differ, or with singleton_local_shards in their metadata, save each layer under a
    key of its own, and each expert and each half of a gated linear layer, too.
    """
    usual = tensor.size, tensor.offset, tensor.region
    yield tensor.key, *usual
    if tensor.also:
        yield tensor.also, *usual
    for key in filter(None, (tensor.key, tensor.also)):
        if not key.startswith("decoder.layers."):
            return
        layer = f"decoder.layers.{tensor.offset[0]}."
        key = layer + key.removeprefix("decoder.layers.")
        size, offset, region = (place[1:] for place in usual)
        yield key, size, offset, region
        experts = ".mlp.experts.experts."
        if experts in key:
            key = key.replace(experts, f"{experts}{offset[0]}.")
            size, offset, region = (place[1:] for place in (size, offset, region))
            yield key, size, offset, region
        if key.endswith("linear_fc1.weight"):
            half = "_v" if offset[0] else "_w"
            yield key + half, region, (0,) * len(region), region
