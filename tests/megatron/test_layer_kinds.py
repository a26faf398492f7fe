# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Layers with sliding windows and softmax offsets: which they are, what is counted of them, checkpoints.
Losses and gradients are in ``test_gpt_model_parity``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.megatron.density import take_density
from megatron_mtraining.megatron.layer_kinds import window_layers, window_of
from megatron_mtraining.megatron.packed_documents import packed_seq_params_of
from megatron_mtraining.megatron.run_state import RUN
from megatron_mtraining.megatron.windows import has_window
from megatron_mtraining.visibility import VisibleRanges
from tests.support.gpt_models import start
from tests.support.megatron_cases import BATCH, HEADS, SEQUENCE, make, make_config, operands
from tests.support.ranks import run_ranks

SPARSE = dict(block_size=64, window=64, sample_strata=8, sample_rows=2)


@pytest.mark.parametrize(
    "size, frequency, expected",
    [
        ((128, 0), 2, [129, None, 129, None]),
        ([128, 0], 4, [129, 129, 129, None]),
        ((0, 0), [1, 0, 0, 1], [1, None, None, 1]),
        ((5, 0), None, [6] * 4),
        ((-1, 0), None, [None] * 4),
        (None, 2, [None] * 4),
    ],
)
def test_which_layers_have_a_window(size, frequency, expected):
    config = make_config(num_layers=4, window_size=size, window_attn_skip_freq=frequency)
    assert [window_of(config, number) for number in range(1, 5)] == expected
    assert window_layers(config) == [i for i, window in enumerate(expected) if window]
    assert [layer for layer in range(4) if has_window(config, layer)] == window_layers(config)


def windowed(query, key, value, window, lengths):
    """Dense attention within a window and documents, ``[s, b, h * d]``."""
    query, key, value = (x.permute(1, 2, 0, 3).double() for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    position = torch.arange(SEQUENCE)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    sees = (number[:, None] == number).tril() & (position[:, None] - position < window)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    out = scores.masked_fill(~sees, -math.inf).softmax(-1) @ value
    return out.permute(2, 0, 1, 3).flatten(2), sees


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [[SEQUENCE], [50, SEQUENCE - 50]])
def test_a_window_is_exact_whatever_the_settings(lengths, training):
    """And counts in its own density alone."""
    take_density()
    config = make_config(
        window_size=(32, 0), num_layers=3, window_attn_skip_freq=[0, 0, 1],
        mtraining=MTrainingConfig.from_options(**SPARSE, target_recall=0.5, backward_threshold=50.0),
    )  # fmt: skip
    attention = make(config).train(training)
    given = operands()
    params = None
    if len(lengths) > 1:
        params = packed_seq_params_of(VisibleRanges.from_lengths([lengths] * BATCH, SEQUENCE))
    out = attention(*given, packed_seq_params=params)
    expected, sees = windowed(*given, 33, lengths)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert attention.steering._seen is None and attention.observer is None
    (meter,) = (each for each in RUN.meters if each is attention.density)
    forward, backward, density, capped = meter.take()
    assert forward is None and backward is None and capped is None
    if not training:
        assert density is None
        return
    every = sum(n * (n + 1) / 2 for n in lengths)
    torch.testing.assert_close(density, torch.full((1, HEADS), int(sees.sum()) / every))


def test_what_is_computed_counts_windows():
    take_density()
    config = make_config(num_layers=2, window_size=(15, 0), window_attn_skip_freq=2)
    layers = [make(config, layer_number=number) for number in (1, 2)]
    for layer in layers:
        layer(*operands())
    density = take_density()
    assert density.density.mean == 1 and density.window_heads == 0.5
    pairs = sum(min(i + 1, 16) for i in range(SEQUENCE))
    assert density.window == pytest.approx(pairs / (SEQUENCE * (SEQUENCE + 1) / 2))
    assert density.computed == pytest.approx((1 + density.window) / 2)
    assert f"density of sliding windows {density.window:.4f}" in density.line(1)


def test_prices_of_layers_with_windows_do_not_count():
    config = make_config(
        num_layers=2, window_size=(32, 0), window_attn_skip_freq=[1, 0],
        mtraining=MTrainingConfig.from_options(**SPARSE, target_recall=0.9, price=1.0),
    )  # fmt: skip
    steering = make(config, layer_number=1).steering
    steering.restore([[0.1] * HEADS, [0.7] * HEADS])
    assert steering.now() == pytest.approx(0.7)
    steering.price(torch.device("cpu"), 1, 0, HEADS)
    assert steering.typical().item() == pytest.approx(0.7)


def test_offsets_are_those_of_megatron():
    assert make().softmax_offset is None
    off_by_one = make(make_config(softmax_type="off-by-one"))
    assert torch.equal(off_by_one.softmax_offset, torch.zeros(HEADS))
    assert not list(off_by_one.parameters()) and not off_by_one.state_dict()
    assert off_by_one.sharded_state_dict() == {}
    learnable = make(make_config(softmax_type="learnable", params_dtype=torch.bfloat16))
    assert list(learnable.state_dict()) == ["softmax_offset"]
    assert learnable.softmax_offset.dtype == torch.bfloat16


def sharded(rank, world):
    """What checkpoints have of the parameter, of ours and of Megatron's."""
    parallel_state = start(tensor_model_parallel_size=world)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    config = make_config(softmax_type="learnable", tensor_model_parallel_size=world)
    of_layer = 3, AttnMaskType.causal, "self"
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found = []
    for module in (make(config), DotProductAttention(config, *of_layer)):
        place = "decoder.layers.self_attention.core_attention.", ((0, 2, 4),), metadata
        state = module.sharded_state_dict(*place)
        assert list(state) == [place[0] + "softmax_offset"]
        (tensor,) = state.values()
        assert tensor.data is module.softmax_offset
        found.append(
            (tensor.key, tensor.dtype, tensor.local_shape, tensor.global_shape, tensor.global_offset,
             tensor.axis_fragmentations, tensor.replica_id, tensor.prepend_axis_num)
        )  # fmt: skip
    dist.barrier()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_have_offsets_as_megatron_does(world):
    for rank, (ours, theirs) in enumerate(run_ranks(world, sharded)):
        assert ours == theirs
        assert ours[3] == (4, HEADS) and ours[4] == (2, rank * HEADS // world)
