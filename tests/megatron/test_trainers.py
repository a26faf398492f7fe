# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Batches of trainers that are built on Megatron, by their own functions: log-probabilities and gradients of
dense attention row by row. What the functions need besides (Ray, for one) is left out.

    VERL_PATH=... NEMO_RL_PATH=... MEGATRON_BRIDGE_PATH=... pytest tests/megatron/test_trainers.py
"""

from __future__ import annotations

import ast
import math
import os
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_mtraining.relayout import zigzag
from tests.support.gpt_models import VOCABULARY, build, start
from tests.support.ranks import run_ranks

LENGTHS = [23, 144, 70, 441, 48]
MOST, BLOCK = 512, 64
MULTIPLE = 4
"""To which rows are padded, twice the context-parallel ranks."""


def functions_of(variable: str, file: str, names: list[str], **known):
    """Functions of a file of a trainer's checkout, without the file's imports."""
    path = Path(os.environ[variable]) / file
    found = [
        node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") in names
    ]
    assert len(found) == len(names), f"{path} has no {names}"
    future = ast.parse("from __future__ import annotations").body
    module = types.ModuleType(file)
    vars(module).update(torch=torch, math=math, Any=object, Optional=object, **known)
    exec(compile(ast.Module(future + found, []), str(path), "exec"), vars(module))
    return module


def rows() -> list[torch.Tensor]:
    generator = torch.manual_seed(11)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def weighted(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """A loss that gives each row a weight of its own, as advantages do, of ``[n - 1]`` each."""
    return sum((number + 1) * each.sum() for number, each in enumerate(log_probs)) / sum(LENGTHS)


def log_probs_of(logits, labels):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def pack(pieces: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
    """Padded rows, each cut over ranks."""
    return torch.cat([zigzag(each[None], rank, size)[0] for each in pieces])


def unpack(local, ends, rank, size, group):
    """The rows ``[n - 1]`` of all parts ``[T / cp]`` of a packed sequence; with gradients of the own part."""
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local.detach(), group=group)
    parts[rank] = local
    found = []
    for begin, end, length in zip(ends, ends[1:], LENGTHS):
        own = [part[begin // size : end // size].chunk(2) for part in parts]
        whole = torch.cat([first for first, _ in own] + [last for _, last in reversed(own)])
        found.append(whole[: length - 1])
    return found


def verl(model, rank, size, group):
    """Its usual forward: rows padded on both sides, logits, and a batch of log-probabilities."""
    from megatron.core import parallel_state as mpu

    names = ["preprocess_packed_seqs", "postprocess_packed_seqs"]
    ours = functions_of(
        "VERL_PATH", "verl/models/mcore/util.py", names, mpu=mpu, PackedSeqParams=PackedSeqParams
    )
    ids, labels = (torch.zeros(len(LENGTHS), MOST, dtype=torch.long) for _ in range(2))
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for number, tokens in enumerate(rows()):
        at = slice(7 * number, 7 * number + len(tokens))
        ids[number, at], labels[number, at], mask[number, at] = tokens, tokens.roll(-1), True
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    packed, params = ours.preprocess_packed_seqs(ids, mask)
    packed_labels, _ = ours.preprocess_packed_seqs(labels, mask)
    logits = model(
        input_ids=packed, attention_mask=None, position_ids=positions, packed_seq_params=params
    )
    found = log_probs_of(logits, packed_labels)
    batch = ours.postprocess_packed_seqs(found, params, mask, *ids.shape)
    return [own[kept][:-1] for own, kept in zip(batch, mask)]


def own_forward(model, rank, size, group):
    """As verl's and Bridge's forwards that compute losses of their own from the decoder's result."""
    lengths = [-(-n // MULTIPLE) * MULTIPLE for n in LENGTHS]
    padded = [torch.nn.functional.pad(t, (0, n - len(t))) for t, n in zip(rows(), lengths)]
    ids = pack(padded, size, rank)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )  # fmt: skip
    hidden, rotary = model._preprocess(
        input_ids=ids[None], position_ids=torch.zeros(1, len(ids)).long(), packed_seq_params=params
    )[:2]
    hidden = model.decoder(
        hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=params
    )
    logits = hidden[:, 0] @ model.output_layer.weight.t()
    labels = pack([each.roll(-1) for each in padded], size, rank)
    return unpack(log_probs_of(logits, labels), ends.tolist(), rank, size, group)


def nemo_rl(model, rank, size, group):
    folder = "nemo_rl/models/megatron/"
    known = vars(functions_of("NEMO_RL_PATH", folder + "common.py", ["_round_up_to_multiple"]))
    ours = functions_of(
        "NEMO_RL_PATH", folder + "data.py", ["_pack_sequences_for_megatron"],
        PackedSeqParams=PackedSeqParams, _round_up_to_multiple=known["_round_up_to_multiple"],
        _get_tokens_on_this_cp_rank=lambda t, rank, size, seq_dim: zigzag(t[None], rank, size)[0],
    )  # fmt: skip
    ids = torch.nn.utils.rnn.pad_sequence(rows(), batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([t.roll(-1) for t in rows()], batch_first=True)
    packed = [
        ours._pack_sequences_for_megatron(each, LENGTHS, MULTIPLE, 2 * MULTIPLE, None, rank, size)
        for each in (ids, labels)
    ]
    (_, own, params, _, ends), (_, own_labels, *_) = packed
    logits = model(own, None, None, packed_seq_params=params)
    found = log_probs_of(logits, own_labels)[0]
    return unpack(found, ends.tolist(), rank, size, group)


def bridge(model, rank, size, group):
    """Its training step: losses of the model for labels."""
    folder = "src/megatron/bridge/"
    names = ["_ceil_to_multiple", "_validate_sequence_row_tensor"]
    names += ["build_mcore_thd_sequence_batch_from_rows"]
    data = functions_of(
        "MEGATRON_BRIDGE_PATH", folder + "data/packing/in_batch.py", names, IGNORE_INDEX=-100
    )
    names = ["_squeeze_metadata", "_as_python_int", "get_packed_seq_params"]
    ours = functions_of(
        "MEGATRON_BRIDGE_PATH", folder + "training/utils/packed_seq_utils.py", names,
        PackedSeqParams=PackedSeqParams,
    )  # fmt: skip
    given = [
        dict(input_ids=t, labels=t.roll(-1), position_ids=torch.arange(len(t))) for t in rows()
    ]
    batch = data.build_mcore_thd_sequence_batch_from_rows(
        given, ignore_index=0, pad_to_multiple_of=MULTIPLE
    )
    params = ours.get_packed_seq_params(batch)
    lengths = batch["cu_seqlens_q_padded"].diff().tolist()
    names = ("input_ids", "position_ids", "labels")
    own = [pack(list(batch[name][0].split(lengths)), size, rank)[None] for name in names]
    losses = model(own[0], own[1], None, labels=own[2], packed_seq_params=params)
    return unpack(-losses[0], batch["cu_seqlens_q_padded"].tolist(), rank, size, group)


TRAINERS = {
    "own_forward": None, "verl": "VERL_PATH", "nemo_rl": "NEMO_RL_PATH",
    "bridge": "MEGATRON_BRIDGE_PATH",
}  # fmt: skip

NEW = ("nemo_rl", "bridge")
"""Those that need a Megatron-Core of their time."""


def model_of(settings, size: int):
    config = dict(num_attention_heads=4, num_query_groups=2, context_parallel_size=size)
    return build(settings, config, max_sequence_length=sum(LENGTHS) + MOST)


def results(model, log_probs) -> dict:
    from megatron.core.pipeline_parallel.schedules import custom_backward

    loss = weighted(log_probs)
    custom_backward(loss, None)
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    for value in found.values():
        dist.all_reduce(value)
    return {**found, "log_probs": torch.cat(log_probs).detach()}


def dense(rank, size) -> dict:
    start(register=False)
    model = model_of(None, 1)
    found = []
    for tokens in rows():
        logits = model(tokens[None], torch.arange(len(tokens))[None], None)[0]
        found.append(log_probs_of(logits, tokens.roll(-1))[:-1])
    return results(model, found)


def train(rank, size, name) -> dict:
    parallel = start(context_parallel_size=size)
    model = model_of(dict(block_size=BLOCK, slash=768, vertical=0), size)
    group = parallel.get_context_parallel_group()
    return results(model, globals()[name](model, rank, size, group))


@pytest.fixture(scope="module")
def expected():
    return run_ranks(1, dense)[0]


@pytest.mark.parametrize("name", TRAINERS)
def test_rows_have_the_log_probabilities_and_gradients_of_dense_attention(name, expected):
    variable = TRAINERS[name]
    if variable and variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    if name in NEW and "total_tokens" not in vars(PackedSeqParams)["__dataclass_fields__"]:
        pytest.skip("this Megatron-Core is older than what the trainer needs")
    for found in run_ranks(2, train, name):
        assert found.keys() == expected.keys()
        for part, value in found.items():
            wanted = expected[part]
            assert wanted.abs().max() > 0 or part.endswith("bias"), part
            message = lambda m, at=part: f"{name}, {at}: {m}"  # noqa: E731
            torch.testing.assert_close(value, wanted, atol=1e-5, rtol=1e-5, msg=message)
