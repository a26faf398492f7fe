# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One rank of test_gpt_model: GPTModel of megatron-core, dense in one process against ours.

torchrun ... gpt_worker.py FILE        one process: writes the dense results to FILE, too
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support import cpu_shim

SEQUENCE, BATCH, VOCABULARY, BLOCK = 768, 2, 96, 64
NODES = {4: [2, 2]}
"""Hierarchical sizes of the runs that have some, by their ranks."""

CASES = {
    "rope": {},
    "rope, everything recomputed": {
        "config": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "rope, attention recomputed": {"config": {"recompute_granularity": "selective"}},
    "yarn": {
        "position_embedding_type": "yarn",
        "yarn": {
            "yarn_rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 128,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "yarn_mscale": 1.0,
            "yarn_mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": True,
        },
    },
    "learned positions": {"position_embedding_type": "learned_absolute"},
}
LENGTHS = [[1, 130, 64, 573], [300, 468]]
"""Of packed documents, by batch entry. Dense attention is run on them one by one."""
for _name in ("rope, everything recomputed", "yarn", "learned positions"):
    CASES[f"documents, {_name}"] = {**CASES[_name], "documents": True}


def start(cp_size: int):
    """This process as a rank of Megatron's with the plug-in, on the CPU; Megatron's ``parallel_state``."""
    import megatron_mtraining

    cpu_shim.install_torch()
    cpu_shim.install_core()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    megatron_mtraining.register()
    return parallel_state


def build(case: dict, ours: bool, cp_size: int):
    """The same weights each time, on every rank."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mtraining import MTrainingConfig

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=64,
        ffn_hidden_size=128,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        context_parallel_size=cp_size,
        hierarchical_context_parallel_sizes=NODES.get(cp_size),
        attention_backend=AttnBackend.mtraining if ours else AttnBackend.auto,
        **case.get("config", {}),
    )
    for name, value in case.get("yarn", {}).items():
        setattr(config, name, value)
    if ours:
        config.mtraining = MTrainingConfig.from_options(
            block_size=BLOCK, slash=SEQUENCE, vertical=0
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type=case.get("position_embedding_type", "rope"),
    )


def draw_batch(documents: bool) -> dict:
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.manual_seed(3))
    ids = torch.arange(SEQUENCE).repeat(BATCH, 1)
    if documents:
        ids = torch.stack([torch.cat([torch.arange(n) for n in own]) for own in LENGTHS])
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "position_ids": ids}


def one_by_one(batch: dict) -> list[dict]:
    """A batch of each document."""
    found = []
    for entry, lengths in enumerate(LENGTHS):
        parts = {name: value[entry : entry + 1].split(lengths, 1) for name, value in batch.items()}
        found += [{name: part[i] for name, part in parts.items()} for i in range(len(lengths))]
    return found


def train_once(model, rank: int, size: int, documents: bool = False, packed: bool = True) -> dict:
    """Loss and gradients of one batch, summed over the context-parallel ranks."""
    from megatron.core.pipeline_parallel.schedules import custom_backward

    from megatron_mtraining.megatron.batch import slice_batch

    batch = draw_batch(documents)
    if documents and not packed:
        batches = one_by_one(batch)
    else:
        node = NODES.get(size, [None])[0]
        batches = [slice_batch(batch, rank, size, BLOCK, node, documents=documents)]
    loss = 0.0
    for batch in batches:
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = loss + losses.sum() / (BATCH * SEQUENCE)
    custom_backward(loss, None)  # as training does; torch's own would leave the CPU shim
    result = {name: param.grad.clone() for name, param in model.named_parameters()}
    result["loss"] = loss.detach().clone()
    for value in result.values():
        dist.all_reduce(value)
    return result


def check_other_models_are_untouched(case: dict, expected: dict) -> None:
    """A dense model built and run in a process where ours was."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    model = build(case, ours=False, cp_size=1)
    core = model.decoder.layers[0].self_attention.core_attention
    assert type(core) is DotProductAttention, type(core)
    if hasattr(model, "rotary_pos_emb"):
        assert type(model.rotary_pos_emb).__name__ in ("RotaryEmbedding", "YarnRotaryEmbedding")
        assert isinstance(model.rotary_pos_emb, RotaryEmbedding)
    documents = case.get("documents", False)
    for name, value in train_once(model, 0, 1, documents, packed=False).items():
        assert torch.equal(value, expected[name]), name


def main(file: Path) -> None:
    cpu_shim.install_torch()
    cpu_shim.install_core()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=size)
    if size == 1:  # before the plug-in is registered
        dense = {
            name: train_once(
                build(case, False, 1), 0, 1, case.get("documents", False), packed=False
            )
            for name, case in CASES.items()
        }
        torch.save(dense, file)
    expected = torch.load(file)

    import megatron_mtraining
    from megatron_mtraining.megatron import MTrainingAttention
    from megatron_mtraining.megatron.density import take_density

    megatron_mtraining.register()
    for name, case in CASES.items():
        model = build(case, ours=True, cp_size=size)
        for layer in model.decoder.layers:
            assert type(layer.self_attention.core_attention) is MTrainingAttention
        ours = train_once(model, rank, size, case.get("documents", False))
        assert ours.keys() == expected[name].keys()
        for part, value in ours.items():
            wanted = expected[name][part]
            assert wanted.abs().max() > 0 or part.endswith("bias"), part
            torch.testing.assert_close(
                value, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, n=name, p=part: f"{n}: {p}: {m}"
            )
        density = take_density()
        assert abs(density.density.mean - 1) < 1e-6, density
        if size == 1:
            check_other_models_are_untouched(case, expected[name])
        if rank == 0:
            print(f"ok: {name}, {size} ranks, loss {ours['loss']:.6f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
