# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The mapping from each Hugging Face tensor to a part of a Megatron tensor.

In Megatron's torch_dist the tensors of all layers are one, ``[layers, ...]``, and the tensors of all experts
``[layers, experts, ...]``. Keys are Transformer Engine's. Local layers map theirs to the same
keys when they load, except for the norm before experts, whose key differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .families import Model


@dataclass(frozen=True)
class Region:
    """A part of a tensor of a checkpoint.

    Attributes:
        key, shape: of the whole tensor.
        offsets, sizes: where the part begins, and how large it is, in each dimension.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def without_leading(self, key: str) -> Region:
        """The same part of a tensor ``key`` without the first dimension."""
        return Region(key, self.shape[1:], self.offsets[1:], self.sizes[1:])


@dataclass(frozen=True)
class Mapped:
    """A tensor of Hugging Face, and where Megatron has it.

    Attributes:
        name, shape: Hugging Face's.
        region: Megatron's. With ``part``, it holds other tensors too.
        part: ``q``, ``k`` or ``v`` if the region interleaves these by query group, else empty.
        also: another key with the same content, or empty.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    part: str = ""
    also: str = ""


def mapped(model: Model) -> Iterator[Mapped]:
    """All tensors of a model, in the order in which Hugging Face writes them."""
    hidden, vocab = model.hidden, (model.vocab, model.hidden)
    padded = (model.padded_vocab, hidden)

    def whole(name, key, shape, full=None):
        return Mapped(name, shape, Region(key, full or shape, (0,) * len(shape), shape))

    yield whole("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab, padded)
    for layer in range(model.layers):
        yield from _layer(model, layer)
    yield whole("model.norm.weight", "decoder.final_layernorm.weight", (hidden,))
    if not model.tied:
        yield whole("lm_head.weight", "output_layer.weight", vocab, padded)


def _layer(model: Model, layer: int) -> Iterator[Mapped]:
    hidden, dim = model.hidden, model.head_dim
    queries, keys = model.heads * dim, model.groups * dim

    def stacked(name, key, shape, full=None, start=0, expert=None, also="", part=""):
        outer = (model.layers,) if expert is None else (model.layers, model.experts)
        index = (layer,) if expert is None else (layer, expert)
        full = full or shape
        region = Region(
            "decoder.layers." + key,
            (*outer, *full),
            (*index, start, *(0 for _ in shape[1:])),
            (*(1 for _ in outer), *(full if part else shape)),
        )
        also = "decoder.layers." + also if also else ""
        return Mapped(f"model.layers.{layer}.{name}", shape, region, part, also)

    def mlp(name, key, ffn, expert=None):
        """Megatron's fc1 is the gate and the up projection, the gate's rows first."""
        fc1, both = key + "linear_fc1.weight", (2 * ffn, hidden)
        yield stacked(name + "gate_proj.weight", fc1, (ffn, hidden), both, 0, expert)
        yield stacked(name + "up_proj.weight", fc1, (ffn, hidden), both, ffn, expert)
        fc2 = key + "linear_fc2.weight"
        yield stacked(name + "down_proj.weight", fc2, (hidden, ffn), expert=expert)

    attention = "self_attention."
    yield stacked("input_layernorm.weight", attention + "linear_qkv.layer_norm_weight", (hidden,))
    rows = queries + 2 * keys
    for kind in ("weight", "bias") if model.family.qkv_bias else ("weight",):
        inner = (hidden,) if kind == "weight" else ()
        for part, count in (("q", queries), ("k", keys), ("v", keys)):
            name, key = f"self_attn.{part}_proj.{kind}", f"{attention}linear_qkv.{kind}"
            yield stacked(name, key, (count, *inner), (rows, *inner), part=part)
    if model.family.qk_norm:
        for part in ("q", "k"):
            key = f"{attention}{part}_layernorm.weight"
            yield stacked(f"self_attn.{part}_norm.weight", key, (dim,))
    yield stacked("self_attn.o_proj.weight", attention + "linear_proj.weight", (hidden, queries))
    norm, fused = "post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
    if not model.experts:
        yield stacked(norm, fused, (hidden,))
        yield from mlp("mlp.", "mlp.", model.ffn)
        return
    yield stacked(norm, "pre_mlp_layernorm.weight", (hidden,), also=fused)
    yield stacked("mlp.gate.weight", "mlp.router.weight", (model.experts, hidden))
    for expert in range(model.experts):
        yield from mlp(f"mlp.experts.{expert}.", "mlp.experts.experts.", model.expert_ffn, expert)


def extra_states(model: Model) -> Iterator[str]:
    """The keys of the entries that layers load beside tensors. Transformer Engine keeps FP8's scales there;
    here they are empty."""
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
            shard = f"shard_{layer}.{expert}_{count}.{model.experts}"
            for name in ("linear_fc1", "linear_fc2"):
                yield f"decoder.layers.mlp.experts.experts.{name}._extra_state/{shard}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def interleave(model: Model, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The rows of Megatron's linear_qkv: each query group's query heads, its key and its value.

    Args:
        query: ``[heads * dim, ...]``; key, value: ``[groups * dim, ...]``.

    Returns:
        ``[(heads + 2 * groups) * dim, ...]``.
    """
    rest = query.shape[1:]
    parts = [x.reshape(model.groups, -1, *rest) for x in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, *rest)


def part_of(model: Model, rows: Tensor, part: str) -> Tensor:
    """The inverse of :func:`interleave` for ``q``, ``k`` or ``v``."""
    sizes = [model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim]
    grouped = rows.reshape(model.groups, -1, *rows.shape[1:])
    return grouped.split(sizes, 1)["qkv".index(part)].reshape(-1, *rows.shape[1:])


def locations(tensor: Mapped) -> Iterator[Region]:
    """Where a checkpoint may have a tensor, the usual place first.

    Runs whose layers differ, or with singleton_local_shards in their metadata, save each layer under its own
    key, and each expert and each half of a gated linear layer too.
    """
    usual = tensor.region
    keys = [key for key in (usual.key, tensor.also) if key]
    for key in keys:
        yield Region(key, usual.shape, usual.offsets, usual.sizes)
    for key in keys:
        if not key.startswith("decoder.layers."):
            return
        layer = f"decoder.layers.{usual.offsets[0]}."
        place = usual.without_leading(layer + key.removeprefix("decoder.layers."))
        yield place
        experts = ".mlp.experts.experts."
        if experts in place.key:
            place = place.without_leading(
                place.key.replace(experts, f"{experts}{place.offsets[0]}.")
            )
            yield place
        if place.key.endswith("linear_fc1.weight"):
            half = "_v" if place.offsets[0] else "_w"
            yield Region(place.key + half, place.sizes, (0,) * len(place.sizes), place.sizes)
