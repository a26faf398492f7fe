# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""megatron-core's GPTModel and HybridModel with everything kept: losses and gradients of dense attention in
one process."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import __version__
from torch import Tensor

from megatron_mtraining.megatron.checks import is_from
from megatron_mtraining.megatron.layer_pattern import HYBRID
from megatron_mtraining.relayout import zigzag
from megatron_mtraining.visibility import VisibleRanges
from tests.support.gpt_models import build, draw_batch, start
from tests.support.ranks import run_ranks

SEQUENCE, BATCH, BLOCK = 768, 2, 64
NODES = {4: [2, 2]}
"""Hierarchical sizes of the runs that have some, by their ranks."""
LENGTHS = [[1, 130, 64, 573], [300, 468]]
"""Of packed documents, by batch entry. Dense attention is run on them one by one."""
PADDED, TOKENS = [24, 144, 72, 456, 48], [23, 144, 70, 441, 48]
"""Of packed sequences with their padding, multiples of ``2 cp`` and no whole blocks together; and without."""
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
YARN = dict(
    yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=128, yarn_beta_fast=32.0,
    yarn_beta_slow=1.0, yarn_mscale=1.0, yarn_mscale_all_dim=0.0,
    yarn_correction_range_round_to_int=True,
)  # fmt: skip
MTP = dict(mtp_num_layers=2, calculate_per_token_loss=True)
MTP_FULL = MTP if __version__.startswith("0.18.") else MTP | FULL
"""Megatron 0.18 itself cannot recompute these layers."""
WINDOWS = dict(window_size=(100, 0), window_attn_skip_freq=2)
"""Full attention in the second layer."""
OFFSETS = dict(softmax_type="learnable")
CASES = {
    # position embeddings, more of the config, and what is packed
    "rope": ("rope", {}, ""),
    "attention recomputed": ("rope", dict(recompute_granularity="selective"), ""),
    "everything recomputed": ("rope", FULL, ""),
    "yarn": ("yarn", YARN, ""),
    "learned positions": ("learned_absolute", {}, ""),
    "documents, everything recomputed": ("rope", FULL, "documents"),
    "documents, yarn": ("yarn", YARN, "documents"),
    "documents, learned positions": ("learned_absolute", {}, "documents"),
    "windows": ("rope", dict(window_size=(37, 0), window_attn_skip_freq=[0, 1]), ""),
    "documents, windows everywhere, recomputed": (
        "rope",
        FULL | dict(window_size=(64, 0)),
        "documents",
    ),
    "off-by-one, recomputed": ("rope", FULL | dict(softmax_type="off-by-one"), ""),
    "gpt-oss": ("yarn", YARN | WINDOWS | OFFSETS, ""),
    "Gemma 3": ("rope", FULL | WINDOWS | dict(kv_channels=256), "documents"),
    "sequences, windows and offsets": ("rope", FULL | WINDOWS | OFFSETS, "sequences"),
    "sequences": ("rope", {}, "sequences"),
    "sequences, learned positions": ("learned_absolute", FULL, "sequences"),
    "multi-token prediction, everything recomputed": ("yarn", YARN | MTP_FULL, ""),
    "documents, multi-token prediction": ("learned_absolute", MTP, "documents"),
    "sequences, multi-token prediction": ("rope", MTP, "sequences"),
}
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_router_load_balancing_type="none", add_bias_linear=False
)  # fmt: skip
if is_from(HYBRID):
    # HybridModels: patterns are not TransformerConfig's.
    from tests.support.hybrid_models import GATED, MAMBA

    RECURRENT = GATED | dict(
        experimental_attention_variant="gated_delta_net", linear_attention_freq=2
    )
    CASES |= {
        "hybrid": ("rope", dict(pattern="*--*-"), ""),
        "hybrid, yarn, everything recomputed": ("yarn", dict(pattern="-**-", **YARN, **FULL), ""),
        "hybrid, documents": ("rope", dict(pattern="*-*-"), "documents"),
        "hybrid of experts, sequences": (
            "rope",
            dict(pattern="*E-*E", **EXPERTS, **FULL),
            "sequences",
        ),
        "hybrid of gated delta nets": ("none", dict(pattern="G*-G*", **GATED), ""),
        "hybrid of Mamba layers": ("rope", dict(pattern="M*-M", **MAMBA, **FULL), ""),
        "gated delta nets, everything recomputed": ("rope", RECURRENT | FULL, ""),
        "Qwen3-Next": (
            "rope",
            RECURRENT | MTP | dict(kv_channels=256, attention_output_gate=True),
            "",
        ),
    }


def with_offsets(model):
    """A model whose heads have other softmax offsets, if they have any."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("softmax_offset"):
                parameter += torch.tensor([-2.0, 0.0, 3.0, 6.0])
    return model


def model_of(case: str, ours: bool, size: int):
    kind, more, packed = CASES[case]
    more = dict(more)
    pattern = more.pop("pattern", None)
    config = dict(
        num_attention_heads=4, num_query_groups=2, context_parallel_size=size,
        hierarchical_context_parallel_sizes=NODES.get(size), **more,
    )  # fmt: skip
    length = sum(PADDED) if packed == "sequences" else SEQUENCE
    settings = dict(block_size=BLOCK, slash=length, vertical=0) if ours else None
    given = dict(position_embedding_type=kind, max_sequence_length=SEQUENCE)
    if pattern is None and "linear_attention_freq" not in more:
        return with_offsets(build(settings, config, **given))
    from tests.support import hybrid_models

    if pattern is None:
        spec = hybrid_models.block_spec("G*")
        return build(settings, config, transformer_layer_spec=spec, **given)
    return hybrid_models.build(settings, pattern, config, **given)


def numbers(case: str) -> list[int]:
    """Of the layers that have attention."""
    more = CASES[case][1]
    decoder = "G*" if "linear_attention_freq" in more else more.get("pattern", "**")
    pattern = decoder + "*" * more.get("mtp_num_layers", 0)
    return [number for number, kind in enumerate(pattern, 1) if kind == "*"]


def whole_batch(packed: str) -> dict:
    sequences = packed == "sequences"
    batch = draw_batch(*((1, sum(PADDED)) if sequences else (BATCH, SEQUENCE)))
    batch["loss_mask"] = torch.ones(batch["tokens"].shape)
    if packed:
        lengths = [PADDED] if sequences else LENGTHS
        batch["position_ids"] = torch.stack(
            [torch.cat(list(map(torch.arange, n))) for n in lengths]
        )
    if sequences:
        batch["loss_mask"] = torch.cat([torch.arange(n) < own for n, own in zip(PADDED, TOKENS)])[
            None
        ].float()
    for entry, lengths in enumerate([PADDED] if sequences else LENGTHS if packed else []):
        batch["loss_mask"][entry] *= torch.cat([_counts_stay(n) for n in lengths])
    if not sequences:
        batch["loss_mask"] *= _counts_stay(SEQUENCE)
    return batch


def _counts_stay(length: int) -> Tensor:
    """A loss mask of a sequence of which no rank has fewer tokens after two shifts by one: multi-token
    prediction scales losses by the number on a rank."""
    position = torch.arange(length)
    starts = [position % max(length // (2 * size), 1) < 2 for size in (1, 2, 3, 4)]
    return ~torch.stack([position < 2, *starts]).any(0)


def one_by_one(batch: dict, packed: str) -> list[dict]:
    """A batch of each document; of each sequence without its padding."""
    found = []
    for entry, lengths in enumerate([PADDED] if packed == "sequences" else LENGTHS):
        parts = {name: value[entry : entry + 1].split(lengths, 1) for name, value in batch.items()}
        found += [{name: part[i] for name, part in parts.items()} for i in range(len(lengths))]
    if packed == "documents":
        return found
    return [{name: value[:, :n] for name, value in own.items()} for own, n in zip(found, TOKENS)]


def of_rank(batch: dict, packed: str, rank: int, size: int) -> dict:
    """A rank's part of a batch, as Megatron cuts it: whole, or sequence by sequence."""
    lengths = PADDED if packed == "sequences" else [SEQUENCE]
    return {
        name: torch.cat([zigzag(each, rank, size) for each in value.split(lengths, 1)], 1)
        for name, value in batch.items()
    }


def params_of(batch: dict, packed: str):
    """``packed_seq_params`` of the whole batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_mtraining.megatron.packed_documents import packed_seq_params_of

    if packed == "documents":
        return packed_seq_params_of(VisibleRanges.from_position_ids(batch["position_ids"]))
    if not packed:
        return None
    ends, padded = (torch.tensor([0, *n]).cumsum(0).int() for n in (TOKENS, PADDED))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=max(PADDED), max_seqlen_kv=max(PADDED),
    )  # fmt: skip


def train_once(case: str, model, rank: int = 0, size: int = 1, ours: bool = False) -> dict:
    """Loss and gradients of one batch, summed over the context-parallel ranks."""
    from megatron.core.pipeline_parallel.schedules import custom_backward
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    packed = CASES[case][2]
    batch = whole_batch(packed)
    count, params, loss = batch["loss_mask"].sum(), None, 0.0
    MTPLossAutoScaler.set_loss_scale(1 / count)
    if ours:
        batches, params = [of_rank(batch, packed, rank, size)], params_of(batch, packed)
    else:
        batches = one_by_one(batch, packed) if packed else [batch]
    for batch in batches:
        losses = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
            packed_seq_params=params, loss_mask=batch["loss_mask"],
        )  # fmt: skip
        loss = loss + (losses * batch["loss_mask"]).sum() / count
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
    found = [each for each in model.modules() if isinstance(each, DotProductAttention)]
    assert len(found) == len(numbers(case))
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
        if size == 3 and {"linear_num_key_heads", "mamba_num_heads"} & CASES[case][1].keys():
            continue  # it does not divide these heads
        model = model_of(case, True, size)
        ours = [each for each in model.modules() if type(each) is MTrainingAttention]
        assert [each.layer_number for each in ours] == numbers(case)
        ours = train_once(case, model, rank, size, ours=True)
        assert ours.keys() == expected[case].keys()
        for part, value in ours.items():
            wanted = expected[case][part]
            assert wanted.abs().max() > 0 or part.endswith("bias"), part
            torch.testing.assert_close(
                value, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, at=(case, part): f"{at}: {m}"
            )
        found = take_density()
        if "everywhere" in case:
            assert found is None
            continue
        windows = "window_size" in CASES[case][1]
        ran = (found.ran.any(1).nonzero().flatten() + 1).tolist()
        assert len(ran) == 1 if windows else ran == numbers(case)
        assert (found.window is None) == (not windows)
        assert found.density.mean == pytest.approx(1, abs=1e-6)
        if size == 1:
            check_other_models_are_untouched(case, expected[case])


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The file of the dense results, which a run of one process writes."""
    file = tmp_path_factory.mktemp("gpt") / "dense.pt"
    run_ranks(1, parity, file)
    return file


@pytest.mark.parametrize(
    "size",
    [
        1,
        2,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_dense_attention(size, dense):
    if size > 1:
        run_ranks(size, parity, dense)
