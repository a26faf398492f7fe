# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Bytes that layers and loss keep and need, on one GPU.

A width is elements of a token. With tensor parallelism ``q``, ``kv`` and the MLP's are of a rank; ``h`` is
whole, unless sequence parallelism cuts it by tokens.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.attention.backward_path import (
    ONE_PASS_HEAD_DIM,
    ONE_PASS_TOKENS,
    is_faster_in_one_pass,
)
from ...megatron.document_options import masks_documents
from .setting import Setting
from .weights import vocabulary_parameters

SUMMED_BLOCKS = 128
"""Query blocks, of all heads of a group, that a key block sums in registers: ``CHAIN`` halves of blocks in
:mod:`megatron_mtraining.kernels.attention.hopper.backward_key`."""


OF_ATTENTION = (
    "queries, keys, values", "rotated queries, keys", "attention output", "log-sum-exp",
    "blocks of the pruned backward", "rotary cosines, sines",
)  # fmt: skip
"""Of what a layer saves, what is let go before the gradient of its queries, keys and values is whole."""


class Layer:
    """One layer's activations, of one microbatch.

    Attributes:
        saved: bytes by name that autograd keeps from forward to backward.
        input: of these, the layer's own input.
        carried: of these, the bytes that a recomputed layer saves from its first pass for its second.
        index: the pattern; both passes use the same one.
        working: the most that is held in the layer's backward above ``saved``.
    """

    def __init__(self, setting: Setting):
        self.setting, args = setting, setting.args
        self.tokens, self.element, tp = setting.tokens, setting.element, setting.tp
        self.h = args.hidden_size
        self.own_h = self.h // tp if args.sequence_parallel else self.h
        self.q, self.kv = setting.q_width // tp, setting.kv_heads * setting.head_dim
        # Ranks that share a query group gather the columns of all ranks, and cut theirs out.
        self.gathered_qkv = setting.q_width + 2 * setting.kv_width if setting.groups < tp else 0
        self.ffn, self.heads = setting.ffn // tp, args.num_attention_heads // tp
        ours = setting.mtraining
        self.index = index_bytes(setting) if ours else 0
        self.saved = self._saved()
        self.input = self.saved["layer input"]
        again = not ours or ours.recompute_attention
        results = ("attention output", "log-sum-exp", "blocks of the pruned backward")
        self.carried = 0 if again else sum(self.saved[name] for name in results)
        self.working = self._working()

    def bytes_of(self, width: float, element: int | None = None) -> int:
        """Of ``width`` elements a token."""
        return int(self.tokens * width * (element or self.element))

    @property
    def total(self) -> int:
        return sum(self.saved.values())

    def _saved(self) -> dict[str, int]:
        args, size = self.setting.args, self.bytes_of
        rotary = args.position_embedding_type in ("rope", "yarn")
        saved = {
            "layer input": size(self.own_h),
            "attention norm": size(self.own_h),
            # Values are a view of it, which keeps all of it.
            "queries, keys, values": size(self.gathered_qkv or self.q + 2 * self.kv),
            "rotated queries, keys": size(self.q + self.kv) if rotary or args.qk_layernorm else 0,
            "attention output": size(self.q),
            "log-sum-exp": size(self.heads, 4),
            "blocks of the pruned backward": packed_bytes(self),
            "MLP input": size(self.own_h),
            "MLP norm": size(self.own_h),
            "MLP before activation": size(self.setting.gated * self.ffn),
            "MLP after activation": size(self.ffn),
        }
        statistics = 2 if args.normalization == "LayerNorm" else 1
        saved["norm statistics"] = size(2 * statistics * self.own_h / self.h, 4)
        if args.qk_layernorm:
            saved["norm statistics"] += size(
                statistics * (self.q + self.kv) / self.setting.head_dim, 4
            )
        if rotary and not args.apply_rope_fusion:  # cosines and sines, of queries' and keys' calls
            saved["rotary cosines, sines"] = self.bytes_of(4 * self.setting.head_dim) // (
                args.micro_batch_size
            )
        if args.swiglu and not args.bias_swiglu_fusion:
            saved["MLP gate"] = size(2 * self.ffn)  # activated, and what it is multiplied by
        if args.hidden_dropout:
            saved["dropout masks"] = size(2 * self.own_h, 1)
        return saved

    def _working(self) -> int:
        """The most of four moments: at the gradients of the MLP's second product, of its activation function,
        of its first product, and in attention. Of five where queries, keys and values were gathered: their
        gradient, a copy of it and this rank's part. What a moment comes after is let go."""
        saved, size, gated = self.saved, self.bytes_of, self.setting.gated
        fusion = self.setting.args.gradient_accumulation_fusion
        weight = 0 if fusion else self.h * self.ffn * self.element
        gathered = self.h if self.own_h != self.h else 0
        own, after = size(self.own_h), saved["MLP after activation"]
        mlp = sum(bytes_ for name, bytes_ in saved.items() if name.startswith("MLP"))
        inputs = saved["MLP input"] + saved["MLP norm"]
        moments = [
            own + size(gathered + self.ffn) + weight,
            own + size(self.ffn + gated * self.ffn) - after,
            own + size(gated * self.ffn + self.h + gathered) + inputs - mlp + gated * weight,
            own + size(self.q) + ring_bytes(self) - mlp,
        ]
        if self.gathered_qkv:
            width = 2 * self.gathered_qkv + self.gathered_qkv // self.setting.tp
            attention = sum(saved.get(name, 0) for name in OF_ATTENTION)
            moments.append(own + size(width) - mlp - attention)
        return max(moments)


def index_bytes(setting: Setting) -> int:
    """Of a layer's :class:`~megatron_mtraining.pattern.VerticalSlashIndex`."""
    args, config = setting.args, setting.mtraining
    heads = args.micro_batch_size * args.num_attention_heads // setting.tp
    blocks = args.seq_length // config.block_size
    stripes = -(-blocks // (2 * setting.cp)) * 2 * setting.cp
    lists = 3 * blocks + 4 * (blocks + 1) + 2 * stripes + 4 * (stripes + 1)
    return heads * (lists + 4 * setting.columns + 4 * (blocks + 1))


def ring_bytes(layer: Layer) -> int:
    """What attention's backward holds beside its saved operands, gradient of its output and index.

    As :mod:`megatron_mtraining.ring.attention` does it: the queries' gradient, and its float32 sum if there
    are several rounds or if it is computed in one pass (:func:`takes_one_pass`); gathered keys and values;
    the moving gradients of keys and values in float32; columns and their gradients. On one rank the Hopper
    kernels put float32 sums of the gradients of keys and values aside, if :data:`SUMMED_BLOCKS` are not
    enough. Other backends (Transformer Engine's ring) are taken to hold as much as a ring of single ranks in
    the model's dtype, which is not checked.
    """
    setting, size = layer.setting, layer.bytes_of
    if setting.mtraining is None:
        held = size(layer.q) + size(2 * layer.kv)
        return held + (size(4 * 2 * layer.kv) + size(layer.q, 4) if setting.cp > 1 else 0)
    several = setting.outer > 1
    gradient, sums = size(layer.q), size(layer.q, 4)
    gathered, own = 0, size(2 * layer.kv)
    if setting.cp > 1:
        gathered = setting.inner * own
        both = several and setting.inner > 1  # hops in nodes and between them
        moving = size(2 * layer.kv, 4) * (3 if both else 2)
    else:
        blocks = setting.args.seq_length // setting.mtraining.block_size
        aside = blocks * (layer.q // layer.kv) > SUMMED_BLOCKS and layer.element < 4
        moving = own + (size(2 * layer.kv, 4) if aside else 0)
    if takes_one_pass(
        layer
    ):  # keys of the next round arrive meanwhile; the gradient is made at the end
        held = sums + gathered
        held += max(moving + (gathered if several else 0), gradient + own)
    else:
        held = gradient + (sums if several else 0) + gathered + moving
    held += size(layer.heads, 4)  # row sums of output and its gradient
    held += column_bytes(layer) + pruning_bytes(layer)
    steps = setting.mtraining.steps
    if steps is None or not steps.ends_dense:
        return held
    dense = replace(setting, mtraining=setting.mtraining.dense())
    return max(held, ring_bytes(Layer(dense)))  # of both kinds of steps


def takes_one_pass(layer: Layer) -> bool:
    """Whether the backward is in one pass on some Hopper GPU, with ``MTRAINING_BACKWARD`` unset:
    :func:`megatron_mtraining.kernels.attention.backends.choose_backward`."""
    config, args = layer.setting.mtraining, layer.setting.args
    if config.backward_threshold or layer.element == 4:
        return False
    if layer.setting.head_dim > ONE_PASS_HEAD_DIM:
        return False
    dense = config.keeps_all(args.seq_length) and not masks_documents(args)
    length = args.seq_length // layer.setting.cp
    return any(is_faster_in_one_pass(dense, length, gpu) for gpu in ONE_PASS_TOKENS)


def packed_bytes(layer: Layer) -> int:
    """Of the marks of blocks (:class:`megatron_mtraining.ring.pruning.Marking`), which a pruned backward
    needs of its forward."""
    config = layer.setting.mtraining
    if not config or not config.backward_threshold:
        return 0
    heads, blocks, own = _blocks(layer)
    return heads * own * -(-blocks // 8)


def pruning_bytes(layer: Layer) -> int:
    """Of :class:`megatron_mtraining.ring.pruning.PrunedPattern`: the lists of blocks at the length they can
    have, prefix counts, and the attention that stays. For the density of packed documents also which blocks
    are kept, a byte each. The forward's marks are gone by then."""
    setting = layer.setting
    if not setting.mtraining.backward_threshold:
        return 0
    heads, blocks, own = _blocks(layer)
    counts = 4 * own * (setting.outer + setting.cp)
    causal = own * (blocks + 1) // 2  # about as many for every rank
    kept = own * blocks if masks_documents(setting.args) else 0
    return heads * (kept + 4 * causal + counts) + layer.bytes_of(layer.heads, 4)


def _blocks(layer: Layer) -> tuple[int, int, int]:
    """Heads of all batch entries on a GPU, blocks of the sequence, and of a rank's part."""
    args = layer.setting.args
    blocks = args.seq_length // layer.setting.mtraining.block_size
    return args.micro_batch_size * layer.heads, blocks, blocks // layer.setting.cp


def column_bytes(layer: Layer) -> int:
    """Of all heads' columns and their gradients in float32."""
    setting = layer.setting
    columns = setting.columns * setting.args.micro_batch_size
    return 2 * columns * layer.q * (layer.element + 4)


def loss_bytes(layer: Layer) -> int:
    """The most that the output layer and the loss hold, after the last layer."""
    setting, size = layer.setting, layer.bytes_of
    args, words = setting.args, setting.vocab // setting.tp
    # The final norm's input and output; gathered where tokens are cut.
    held = size(2 * layer.own_h) + (size(layer.h) if layer.own_h != layer.h else 0)
    if setting.loss_chunk:
        weight = vocabulary_parameters(setting) * layer.element
        if not args.gradient_accumulation_fusion:
            weight += vocabulary_parameters(setting) * 4
        chunk = min(setting.loss_chunk, setting.tokens)
        held += size(layer.h) + chunk * words * layer.element + weight
        return held + size(5, 4)
    # Logits, a float32 copy which becomes their softmax, and where torch.compile fuses, one more.
    copies = (4 if layer.element < 4 else 0) + (4 if args.cross_entropy_loss_fusion else 0)
    return held + setting.tokens * words * (layer.element + copies)
