# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Small HybridModels of megatron-core (0.18 or later) without Transformer Engine, which its own specs need.

``--spec tests.support.hybrid_models hybrid_stack_spec`` gives pretrain_hybrid.py these layers."""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tests.support.gpt_models import VOCABULARY, config_of

PARTS = ("megatron.core.ssm.gated_delta_net.common", "megatron.core.ssm.gated_delta_net.gdn")
hybrid_block.TENorm = WrappedTorchNorm  # after the last layer, whatever the spec

attention = ModuleSpec(
    module=SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
    ),
)
mlp = partial(
    MLP.as_mlp_submodule,
    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
)
gated_net = ModuleSpec(
    module=GatedDeltaNet,
    submodules=GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    ),
)
GATED = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=4,
    linear_num_value_heads=8, deterministic_mode=True,
)  # fmt: skip
"""A TransformerConfig's, of gated delta nets on the CPU."""
torch.compiler.set_stance("force_eager")  # they are compiled where megatron-core is imported first
for module in (gated_delta_net, *map(sys.modules.get, PARTS)):
    if (
        module is not None
    ):  # flash-linear-attention, of which the deterministic layers use the norm alone
        module.HAVE_FLA = True
        module.l2norm = lambda x, dim=-1, eps=1e-6: x * (x.square().sum(dim, True) + eps).rsqrt()


def scan(zxbcdt, weight, bias, dt_bias, A, D, headdim, ngroups, **others):
    """mamba_ssm's ``mamba_split_conv1d_scan_combined``, as attention whose weights decay: token by token it
    takes minutes."""
    heads = len(A)
    inner = heads * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (weight.shape[1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    x, b, c = xbc.split([inner, ngroups * state, ngroups * state], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        each.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, 2)
        for each in (b, c)
    )
    dt = F.softplus(dt + dt_bias)
    log_decay = (dt * A).double().cumsum(1)
    between = log_decay[:, :, None] - log_decay[:, None]  # [b, query, key, heads]
    later = torch.ones(between.shape[1:3], dtype=torch.bool).triu(1)[..., None]
    weights = between.masked_fill(later, -torch.inf).exp() * torch.einsum("bthn,bshn->btsh", c, b)
    y = torch.einsum("btsh,bshp->bthp", weights.to(x.dtype), dt[..., None] * x) + D[:, None] * x
    return y.flatten(2) * F.silu(z)


mamba_mixer.HAVE_MAMBA_SSM = True
mamba_mixer.mamba_split_conv1d_scan_combined = scan
MAMBA = dict(mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=4, mamba_num_heads=8)


def token_mixing_layer(self_attention: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


hybrid_stack_spec = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=MambaMixer,
                    params={"rmsnorm": False},  # mamba_ssm's, too
                    submodules=MambaMixerSubmodules(
                        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                    ),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        gdn_layer=token_mixing_layer(gated_net),
        attention_layer=token_mixing_layer(attention),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    ),
)


def build(settings: dict | None, pattern: str, config: dict | None = None, **model):
    """A HybridModel with the same weights each time, on every rank; arguments as for
    :func:`.gpt_models.build`."""
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    layers = {"num_layers": len(pattern.replace("|", "")), "is_hybrid_model": True}
    usual = dict(
        hybrid_stack_spec=hybrid_stack_spec, vocab_size=VOCABULARY, max_sequence_length=1024,
        hybrid_layer_pattern=pattern, position_embedding_type="rope",
    )  # fmt: skip
    made = config_of(settings, layers | (config or {}))
    return HybridModel(config=made, **{**usual, **model})


def block_spec(kinds: str) -> TransformerBlockSubmodules:
    """Layers of a GPTModel with attention (``*``) or a gated delta net (``G``), and an MLP."""
    usual = get_gpt_layer_local_spec()
    gated = copy.copy(usual)
    gated.submodules = copy.copy(usual.submodules)
    gated.submodules.self_attention = gated_net
    layers = [gated if kind == "G" else usual for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
