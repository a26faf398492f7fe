# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One rank of test_megatron_model: a GPTModel of megatron-core, loaded from converted checkpoints.

torchrun ... convert_worker.py TP PP FOLDER...     each with meg/, tokens.pt and logits.pt in it
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_mtraining.megatron.missing_names import define_missing_names
from tests.support import cpu_shim

YARN = {"rotary_scaling_factor", "mscale", "mscale_all_dim"}


def build(args, tp: int, pp: int):
    """The model of a checkpoint's arguments, as Megatron-LM builds it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = {}
    if args.num_experts:
        experts = dict(
            num_moe_experts=args.num_experts,
            moe_router_topk=args.moe_router_topk,
            moe_ffn_hidden_size=args.moe_ffn_hidden_size,
            moe_router_pre_softmax=args.moe_router_pre_softmax,
            moe_token_dispatcher_type="allgather",
        )
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=args.swiglu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    if args.position_embedding_type == "yarn":
        for name, value in vars(args).items():
            if name in YARN or name.startswith("yarn_"):
                setattr(config, name if name.startswith("yarn_") else f"yarn_{name}", value)
    if experts:
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
    ).eval()


def load(model, folder: str) -> None:
    """Load a checkpoint as Megatron-LM's load_checkpoint does."""
    from megatron.core import dist_checkpointing

    for weight in model.parameters():
        torch.nn.init.constant_(weight, float("nan"))
    wanted = {"model": model.sharded_state_dict(metadata={"singleton_local_shards": False})}
    loaded = dist_checkpointing.load(wanted, folder)
    model.load_state_dict(loaded["model"], strict=True)


@torch.no_grad()
def logits_of(model, tokens):
    """Logits of the whole vocabulary on the last pipeline stage; None on the others."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    rank, tp = dist.get_rank(), model.config.tensor_model_parallel_size
    if not model.pre_process:
        hidden = torch.empty(length, len(tokens), model.config.hidden_size)
        dist.recv(hidden, rank - tp)
        model.set_input_tensor(hidden)
    out = model(tokens, torch.arange(length)[None], mask)
    if model.post_process:
        return out
    dist.send(out.contiguous(), rank + tp)
    return None


def main(tp: int, pp: int, folders: list[Path]) -> None:
    cpu_shim.install_torch()
    cpu_shim.install_core()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    define_missing_names()
    parallel_state.initialize_model_parallel(tp, pp)
    cpu_shim.install_zigzag()
    for folder in folders:
        release = str(folder / "meg" / "release")
        model_parallel_cuda_manual_seed(3)
        model = build(dist_checkpointing.load_common_state_dict(release)["args"], tp, pp)
        load(model, release)
        found = logits_of(model, torch.load(folder / "tokens.pt"))
        if found is not None:
            expected = torch.load(folder / "logits.pt")
            vocab = expected.shape[-1]
            torch.testing.assert_close(found[..., :vocab], expected, atol=1e-4, rtol=1e-4)
            assert not found[..., vocab:].any()  # rows of padding are zero
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok: {folder.name}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
