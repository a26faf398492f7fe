# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What megatron-core's GPTModel really has and keeps, for test_plan.

python plan_worker.py FILE      FILE: {"counted" or "saved" or "peaks": {name: flags}} as JSON

Prints one line of JSON: of "counted", each pipeline stage's parameters on tensor-parallel rank 0, made on
the meta device; of "saved", the bytes that autograd keeps of a layer (those of three layers less those of
two) and those of its index; of "peaks", the most bytes that a microbatch's forward and backward hold at
once, parameters and their gradients left out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import cpu_shim
from tests.support.live_bytes import Peak

os.environ["TORCHDYNAMO_DISABLE"] = "1"


def build(setting, layers: int, stage: int = 0):
    """A pipeline stage of a model of local layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = setting.args
    model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=setting.groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=setting.ffn,
        normalization=args.normalization,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=args.swiglu and args.bias_swiglu_fusion,
        attention_dropout=0.0,
        hidden_dropout=args.hidden_dropout,
        perform_initialization=False,
        tensor_model_parallel_size=setting.tp,
        pipeline_model_parallel_size=setting.pp,
        pipeline_dtype=torch.float32,
        bf16=args.bf16,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        attention_backend=AttnBackend.mtraining,
    )
    config.mtraining = setting.mtraining
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        ),
        vocab_size=setting.vocab,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=stage == 0,
        post_process=stage == setting.pp - 1,
        share_embeddings_and_output_weights=setting.tied,
        position_embedding_type=args.position_embedding_type,
    )


def counted(setting) -> list[int]:
    from megatron.core import parallel_state

    found = []
    for stage in range(setting.pp):
        dist.init_process_group(
            "fake", rank=stage * setting.tp, world_size=setting.world, store=FakeStore()
        )
        parallel_state.initialize_model_parallel(
            setting.tp, setting.pp, create_gloo_process_groups=False
        )
        torch.cuda.current_device = lambda: torch.device("meta")
        model = build(setting, setting.args.num_layers, stage)
        torch.cuda.current_device = lambda: torch.device("cpu")
        found.append(sum(parameter.numel() for parameter in model.parameters()))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


def kept(setting, layers: int) -> tuple[int, int]:
    """Bytes of all storages that the forward saves, parameters left out; and of a layer's index."""
    from megatron_mtraining.megatron import core_attention

    model = build(setting, layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    indices = []

    def watched(*operands, **named):
        found = attend(*operands, **named)
        indices.append(found.index.nbytes)
        return found

    attend, core_attention.attend = core_attention.attend, watched
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = _losses(model, setting)
    core_attention.attend = attend
    assert losses.isfinite().all() and len(indices) == layers
    return sum(storage.nbytes() for storage in storages.values()), indices[0]


def gather_own(output, own, group=None, **_) -> None:
    """In place of a gather, which fake groups leave undone: this rank's part, for all ranks."""
    output.view(group.size(), *own.shape).copy_(own.expand(group.size(), *own.shape))


def peak(setting) -> int:
    from megatron.core.pipeline_parallel.schedules import custom_backward

    model = build(setting, setting.args.num_layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    with Peak() as watched:
        loss = _losses(model, setting).sum()
        custom_backward(loss, None)
    return watched.most


def _losses(model, setting):
    shape = (setting.args.micro_batch_size, setting.args.seq_length)
    tokens = torch.randint(setting.vocab, shape)
    positions = torch.arange(setting.args.seq_length).expand(shape)
    return model(tokens, positions, None, labels=tokens)


def main(file: Path) -> None:
    cpu_shim.install_torch()
    cpu_shim.install_core()
    import megatron_mtraining
    from megatron_mtraining.tools.plan.options import read
    from megatron_mtraining.tools.plan.setting import setting_of

    megatron_mtraining.register()
    cases = json.loads(file.read_text())
    found = {"counted": {}, "saved": {}, "peaks": {}}
    for name, flags in cases.get("counted", {}).items():
        found["counted"][name] = counted(setting_of(read(flags)[0]))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    mappings.dist_all_gather_func = gather_own
    for kind in ("saved", "peaks"):
        for name, flags in cases.get(kind, {}).items():
            setting = setting_of(read(flags)[0])
            dist.init_process_group("fake", rank=0, world_size=setting.tp, store=FakeStore())
            parallel_state.initialize_model_parallel(setting.tp, create_gloo_process_groups=False)
            if kind == "saved":
                more, index = kept(setting, 3)
                found[kind][name] = [more - kept(setting, 2)[0], index]
            else:
                found[kind][name] = peak(setting)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
