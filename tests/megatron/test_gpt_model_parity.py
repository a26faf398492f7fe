# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""megatron-core's GPTModel with everything kept: losses and gradients of dense attention in one process."""

import pytest
import torch
import torch.distributed as dist

from tests.support.gpt_models import build, draw_batch, start
from tests.support.ranks import run_ranks

SEQUENCE, BATCH, BLOCK = 768, 2, 64
NODES = {4: [2, 2]}
"""Hierarchical sizes of the runs that have some, by their ranks."""
LENGTHS = [[1, 130, 64, 573], [300, 468]]
"""Of packed documents, by batch entry. Dense attention is run on them one by one."""
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
YARN = dict(
    yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=128, yarn_beta_fast=32.0,
    yarn_beta_slow=1.0, yarn_mscale=1.0, yarn_mscale_all_dim=0.0,
    yarn_correction_range_round_to_int=True,
)  # fmt: skip
CASES = {
    # position embeddings, more of the config, and whether documents are packed
    "rope": ("rope", {}, False),
    "attention recomputed": ("rope", dict(recompute_granularity="selective"), False),
    "everything recomputed": ("rope", FULL, False),
    "yarn": ("yarn", YARN, False),
    "learned positions": ("learned_absolute", {}, False),
    "documents, everything recomputed": ("rope", FULL, True),
    "documents, yarn": ("yarn", YARN, True),
    "documents, learned positions": ("learned_absolute", {}, True),
}


def model_of(case: str, ours: bool, size: int):
    kind, more, _ = CASES[case]
    config = dict(
        num_attention_heads=4, num_query_groups=2, context_parallel_size=size,
        hierarchical_context_parallel_sizes=NODES.get(size), **more,
    )  # fmt: skip
    settings = dict(block_size=BLOCK, slash=SEQUENCE, vertical=0) if ours else None
    return build(settings, config, position_embedding_type=kind, max_sequence_length=SEQUENCE)


def batches_of(documents: bool, one_by_one: bool) -> list[dict]:
    """The whole batch, or a batch of each document."""
    batch = draw_batch(BATCH, SEQUENCE)
    if not documents:
        return [batch]
    batch["position_ids"] = torch.stack([torch.cat(list(map(torch.arange, n))) for n in LENGTHS])
    if not one_by_one:
        return [batch]
    found = []
    for entry, lengths in enumerate(LENGTHS):
        parts = {name: value[entry : entry + 1].split(lengths, 1) for name, value in batch.items()}
        found += [{name: part[i] for name, part in parts.items()} for i in range(len(lengths))]
    return found


def train_once(case: str, model, rank: int = 0, size: int = 1, ours: bool = False) -> dict:
    """Loss and gradients of one batch, summed over the context-parallel ranks."""
    from megatron.core.pipeline_parallel.schedules import custom_backward

    from megatron_mtraining.megatron.batch import slice_batch

    documents, node = CASES[case][2], NODES.get(size, [None])[0]
    loss = 0.0
    for batch in batches_of(documents, one_by_one=not ours):
        if ours:
            batch = slice_batch(batch, rank, size, BLOCK, node, documents=documents)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = loss + losses.sum() / (BATCH * SEQUENCE)
    custom_backward(loss, None)  # as training does; torch's own would leave the CPU shim
    result = {name: param.grad.clone() for name, param in model.named_parameters()}
    result["loss"] = loss.detach().clone()
    for value in result.values():
        dist.all_reduce(value)
    return result


def check_other_models_are_untouched(case: str, expected: dict) -> None:
    """A dense model built and run in a process where ours was."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    model = model_of(case, False, 1)
    core = model.decoder.layers[0].self_attention.core_attention
    assert type(core) is DotProductAttention, type(core)
    rotary = type(getattr(model, "rotary_pos_emb", None)).__name__
    assert rotary in ("RotaryEmbedding", "YarnRotaryEmbedding", "NoneType")
    for name, value in train_once(case, model).items():
        assert torch.equal(value, expected[name]), name


def parity(rank: int, size: int, file) -> None:
    """Check every case against the dense results; one process writes them to ``file`` first."""
    start(register=False, context_parallel_size=size)
    if size == 1:
        torch.save({name: train_once(name, model_of(name, False, 1)) for name in CASES}, file)
    expected = torch.load(file)

    import megatron_mtraining
    from megatron_mtraining.megatron import MTrainingAttention
    from megatron_mtraining.megatron.density import take_density

    megatron_mtraining.register()
    for case in CASES:
        model = model_of(case, True, size)
        for layer in model.decoder.layers:
            assert type(layer.self_attention.core_attention) is MTrainingAttention
        ours = train_once(case, model, rank, size, ours=True)
        assert ours.keys() == expected[case].keys()
        for part, value in ours.items():
            wanted = expected[case][part]
            assert wanted.abs().max() > 0 or part.endswith("bias"), part
            torch.testing.assert_close(
                value, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, at=(case, part): f"{at}: {m}"
            )
        assert take_density().density.mean == pytest.approx(1, abs=1e-6)
        if size == 1:
            check_other_models_are_untouched(case, expected[case])


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The file of the dense results, which a run of one process writes."""
    file = tmp_path_factory.mktemp("gpt") / "dense.pt"
    run_ranks(1, parity, file)
    return file


@pytest.mark.parametrize(
    "size", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]
)  # fmt: skip
def test_losses_and_gradients_are_those_of_dense_attention(size, dense):
    if size > 1:
        run_ranks(size, parity, dense)
