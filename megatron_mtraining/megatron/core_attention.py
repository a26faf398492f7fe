# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Megatron's core attention, sparse: what a layer calls between its QKV and output projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from ..advice import Caps
from ..attention import attend
from ..config import ConfigError, Policy, head_policies
from ..cp_group import CPGroup, cp_group_of
from ..pattern import Steering
from ..pattern.windows import exact, sliding_window, window_density
from ..visibility import VisibleRanges
from . import recompute
from .arguments import settings
from .backend import is_active, training_arguments
from .balance.observer import Call
from .checks import check_settings, inner_group_size, is_p2p, show
from .density import DensityMeter
from .hosts import advise_on_hosts, check_hosts
from .inputs import check_mask
from .layer_kinds import add_softmax_offset, sharded_softmax_offset, window_layers, window_of
from .layer_pattern import attention_layers
from .packed_documents import documents_for_layer
from .run_state import RUN
from .step_times import time_step


class MTrainingAttention(MegatronModule):
    """Dynamic sparse ring attention in place of ``DotProductAttention``.

    Put into layer specs when the config chooses attention backend ``mtraining``, or by hand as
    ``SelfAttentionSubmodules(core_attention=MTrainingAttention, ...)``; then batches and position
    embeddings must be striped by the caller (see :mod:`megatron_mtraining.layout`). Its parameters are
    those of ``DotProductAttention``, with the same keys in checkpoints: none, or ``softmax_offset``. A layer
    with a sliding window attends to all of its keys.

    Args:
        config: a TransformerConfig; :func:`~megatron_mtraining.megatron.settings` says where the
            backend's own settings come from.
        layer_number, attn_mask_type, attention_type, cp_comm_type: as Megatron gives them; the
            mask must be causal, attention self-attention.
        mtp_depth: of multi-token prediction, from 1, whose layers are numbered after the decoder's; None in
            the decoder.
        attention_dropout: must be 0; None takes it from the config.
        softmax_scale: 1 / sqrt(head dim) if None. ``apply_query_key_layer_scaling`` changes
            nothing: Megatron divides the scores by the layer number and multiplies them again
            inside the softmax, for fp16's sake, and scores are float32 here.
        pg_collection: its ``cp`` is the ring's group; without one, Megatron's global group.

    Raises:
        ConfigError: a setting that is not supported; names it, its value and what to do.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        mtp_depth: int | None = None,
        **unknown,
    ):
        super().__init__(config=config)
        window_number = layer_number  # Megatron's own, which windows go by
        if mtp_depth is not None:
            layer_number = config.num_layers + mtp_depth
        place = f"attention of layer {layer_number}"
        if unknown:
            # k_channels and v_channels: multi-latent attention's two head dimensions.
            raise ConfigError(
                f"the {place} is given {', '.join(sorted(unknown))}: attention backend mtraining "
                "does not support it (multi-latent attention, for example)"
            )
        check_settings(config, command_line=False)
        if attention_dropout:
            raise ConfigError(f"the {place} has dropout {attention_dropout}: use 0")
        if attention_type != "self":
            raise ConfigError(
                f"the {place} is {attention_type} attention: attention backend mtraining supports "
                "self-attention only"
            )
        _check_mask_type(attn_mask_type, place)
        if not is_p2p(cp_comm_type):
            raise ConfigError(
                f"the {place} has cp_comm_type {cp_comm_type}, which it would ignore: use p2p or leave it out"
            )
        if type(layer_number) is not int or layer_number < 1:
            raise ConfigError(f"layer_number is {layer_number!r}: give a whole number from 1 on")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.mtraining = settings(config)
        # An evaluation prepares nothing for a pruned backward.
        of_evaluation = replace(self.mtraining, backward_threshold=0.0)
        self._settings = {
            (training, dense): each.dense() if dense else each
            for training, each in ((True, self.mtraining), (False, of_evaluation))
            for dense in (False, True)
        }
        group = (
            parallel_state.get_context_parallel_group(check_initialized=False)
            if pg_collection is None
            else pg_collection.cp
        )
        self.cp_group = group if group is not None and group.size() > 1 else None
        size = 1 if group is None else group.size()
        planned = getattr(config, "context_parallel_size", 1)
        if planned > 1 and planned != size:
            # It would attend to a part of the sequence as if it were all of it.
            raise ConfigError(
                f"config.context_parallel_size is {planned}, but the {place} has a context-parallel group of "
                f"{size}: make them equal, or initialize Megatron's parallel state first"
            )
        gathered = self.mtraining.gathered_ranks
        self.cp_inner = inner_group_size(config, size, gathered, command_line=False)
        sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
        _check_hosts(cp_group_of(self.cp_group, self.cp_inner), sizes, place)
        self.steering = self._steering(place)
        self.first_head = 0
        self.tp_group = getattr(pg_collection, "tp", None)
        if self.tp_group is None:
            self.tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        self.head_policies = self._own_policies(place)
        self.window = window_of(config, window_number)
        own = () if self.window is None else (layer_number - 1,)
        self.steering.leave_out((*window_layers(config), *own))
        add_softmax_offset(self, self._own_heads())
        self.density = DensityMeter(layer_number - 1, self.first_head)
        policies = self.head_policies or (self.mtraining.policy,) * self._own_heads()
        self.caps = Caps.of(policies, self.mtraining)
        self.saves = recompute.what_to_save(self)
        self.observer = None
        if self.window is None:
            self.observer = RUN.balance.observer(self.mtraining, self.head_policies, place)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            query: ``[s/cp, b, heads, d]``, bf16, fp16 or fp32, in the striped layout.
            key, value: ``[s/cp, b, query groups, d]``, any strides.
            attention_mask: None, or without context parallelism bool ``[b or 1, 1, s, s]``, True where a key
                is hidden: must hide what causal attention within documents does not see.
            attn_mask_type: causal, or None for the one given at construction.
            attention_bias: must be None.
            packed_seq_params: None, or packed documents (:func:`~.packed_documents.packed_seq_params_of`).

        Returns:
            ``[s/cp, b, heads * d]``, contiguous, of the query's dtype.

        Raises:
            ConfigError: something given is not supported.
            RuntimeError: a replay under activation recomputation that does not run the attentions
                of its first pass, or that the layer's observer refuses.
        """
        place = f"attention of layer {self.layer_number}"
        if attention_bias is not None:
            raise ConfigError(f"the {place} is given an attention_bias, which is not supported")
        visible = documents = documents_for_layer(packed_seq_params, place)
        if attn_mask_type is not None:
            _check_mask_type(attn_mask_type, place)
        if attention_mask is not None:
            ranks = cp_group_of(self.cp_group, self.cp_inner).world
            check_mask(attention_mask, query, documents, ranks, place)
        replay = recompute.saved_call(self, query)
        if self.training:
            time_step()
        given = replay or recompute.Replay()
        call = given.call
        if replay is None and self.observer is not None and self.training:
            call = self.observer.begin()
        dense = self.steering.is_dense or (not self.training and self.mtraining.dense_evaluation)
        config = self._settings[self.training, dense]
        searches = not dense and replay is None and self.window is None
        try:
            if self.window is not None:
                config = exact(config)
                visible = self._within_window(query, documents)
            elif self.training and not RUN.has_run_dense:
                self._run_dense_ahead(query, key, value, documents)
            run = partial(
                attend, query, key, value, config=config,
                cp_group=self.cp_group, cp_inner=self.cp_inner, softmax_scale=self.softmax_scale,
                softmax_offset=self.softmax_offset,
                documents=visible, pattern=given.pattern, saved=given.saved,
                observe_backward=self._observe_backward(),
                **(self._search_overrides(query, call) if searches else {}),
            )  # fmt: skip
            result = run() if call is None else call.timed(run, query.is_cuda)
        except ValueError as error:  # a ConfigError too
            raise ConfigError(f"the {place} cannot run: {error}{_hint(query, key)}") from error
        recompute.save(self, result, call)
        if self.training and replay is None:
            if visible is not None and self.window is not None:
                density = window_density(visible, documents, config.block_size)
                self.density.add_window(density, query.shape[2])
            else:
                self._count(result.index, call)
        return result.out.flatten(2)

    def _within_window(self, query: Tensor, documents: VisibleRanges | None) -> VisibleRanges:
        length, batch = query.shape[:2]
        length *= cp_group_of(self.cp_group, self.cp_inner).world
        return sliding_window(self.window, batch, length, query.device, documents)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """As that of ``DotProductAttention``."""
        if not isinstance(self.softmax_offset, torch.nn.Parameter):
            return {}
        return sharded_softmax_offset(self, prefix, sharded_offsets, metadata)

    def _run_dense_ahead(
        self, query: Tensor, key: Tensor, value: Tensor, documents: VisibleRanges | None
    ) -> None:
        """In the first step of a schedule that ends dense, run dense attention once, forward and backward:
        its kernels are compiled and its buffers allocated now, not after most of the run."""
        RUN.has_run_dense = True
        steps = self.mtraining.steps
        if steps is None or not steps.ends_dense or not query.is_cuda or self.steering.is_dense:
            return
        with torch.enable_grad():
            operands = [each.detach().requires_grad_() for each in (query, key, value)]
            result = attend(
                *operands, config=self._settings[True, True], cp_group=self.cp_group,
                cp_inner=self.cp_inner, softmax_scale=self.softmax_scale, documents=documents,
            )  # fmt: skip
            torch.autograd.grad(result.out, operands, torch.zeros_like(result.out))

    def _observe_backward(self) -> Callable[[Tensor, Tensor], None] | None:
        """Who is told what a pruned backward leaves out, in the steps that are logged: it costs a sum in the
        backward, and the one-pass backward has none (:func:`~..kernels.attention.choose_backward`)."""
        return self.density.add_backward if self.training and RUN.step_is_logged() else None

    def _steering(self, place: str) -> Steering:
        """The run's, which all layers on all ranks share."""
        args, heads = training_arguments(), self.config.num_attention_heads
        if is_active(args):
            scope = getattr(self.mtraining.policy, "target_scope", None)
            if scope == "head" and heads != args.num_attention_heads:
                raise ConfigError(
                    f"the {place} has {heads} heads, but --num-attention-heads is "
                    f"{args.num_attention_heads}: where layers differ, heads cannot have prices of their "
                    "own; use --mtraining-target-scope model"
                )
            stages = getattr(args, "pipeline_model_parallel_size", 1)
            if stages > 1 and scope is not None and self.mtraining != settings():
                # Other pipeline stages would not join this target's all-reduce: a deadlock.
                raise ConfigError(
                    f"the {place} has settings and a target of its own (config.mtraining), and there are "
                    f"{stages} pipeline stages: give the target on the command line, and the layer's "
                    "settings in a file (--mtraining-settings)"
                )
            return RUN.steering_of_run(self.mtraining)
        layers = self.layer_number
        if getattr(self.config, "num_layers", None):
            layers = attention_layers(self.config)
        return RUN.steering_of(self.mtraining, layers, heads)

    def _own_heads(self) -> int:
        """Heads of this tensor-parallel rank."""
        size = 1 if self.tp_group is None else self.tp_group.size()
        return self.config.num_attention_heads // size

    def _own_policies(self, place: str) -> tuple[Policy, ...] | None:
        """Policies of the heads that this tensor-parallel rank has, from ``first_head`` on; None if all have
        the run's."""
        layers = getattr(self.config, "num_layers", None)
        count = self.config.num_attention_heads
        try:
            policies = head_policies(self.mtraining, self.layer_number - 1, layers, count)
        except ConfigError as error:
            raise ConfigError(f"the {place} does not fit: {error}") from None
        own = self._own_heads()
        self.first_head = 0 if self.tp_group is None else self.tp_group.rank() * own
        return None if policies is None else policies[self.first_head : self.first_head + own]

    def _search_overrides(self, query: Tensor, call: Call | None) -> dict:
        """What the pattern search of this step takes beside the settings."""
        layer, heads = self.layer_number - 1, query.shape[2]
        price = self.steering.price(query.device, layer, self.first_head, heads)
        if call is not None:
            price = call.price(price)
        return dict(head_policies=self.head_policies, price=price)

    def _count(self, index, call: Call | None) -> None:
        density, recall, exposed = index.density(), index.recall, index.exposed
        self.density.add(density, recall, exposed)
        if self.caps is not None and recall is not None and RUN.step_is_logged():
            self.density.add_capped(self.caps.reached(index))
        lost = None if recall is None else 1 - recall
        if call is not None:
            lost = call.observe(density, recall)
        if lost is not None:
            layer = self.layer_number - 1
            copies = 1 if self.cp_group is None else self.cp_group.size()
            policies = self.head_policies
            self.steering.observe(lost, layer, self.first_head, exposed, policies, copies)


def _check_hosts(cp: CPGroup, sizes, place: str) -> None:
    """Sizes that are given mean hosts; other inner groups may span them."""
    try:
        check_hosts(cp) if sizes else advise_on_hosts(cp)
    except ValueError as error:
        given = f", with --hierarchical-context-parallel-sizes {show(sizes)}" if sizes else ""
        raise ConfigError(f"the {place} has no ring{given}: {error}") from None


def _check_mask_type(mask_type: AttnMaskType, place: str) -> None:
    if mask_type is not AttnMaskType.causal:
        raise ConfigError(
            f"the {place} has mask type {getattr(mask_type, 'name', mask_type)}: attention backend "
            "mtraining supports AttnMaskType.causal only"
        )


def _hint(query: Tensor, key: Tensor) -> str:
    """What operands that are not whole sequences come from."""
    if query.dim() == 4 and query.shape[:2] == key.shape[:2]:
        return ""
    return "; inference with a key-value cache is not supported"
