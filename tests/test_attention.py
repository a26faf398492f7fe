# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What :func:`attend` is given: refused in one line where it does not fit, and never attended to somehow."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import AttentionResult, attend
from megatron_mtraining.config import ConfigError, FixedPolicy, XAttentionPolicy
from megatron_mtraining.visibility import VisibleRanges

TOKENS, HEADS = 256, 4
PRICED = MTrainingConfig.from_options(block_size=64, window=64, sample_strata=8)
ONE = FixedPolicy(20, 4)
NO_HEADS = torch.ones(TOKENS, 1, 0, 64)
WRONG = {
    "policies of fewer heads": (dict(head_policies=[ONE] * 3), "3 head_policies, but 4 heads"),
    "policies of more heads": (dict(head_policies=[ONE] * 5), "5 head_policies, but 4 heads"),
    "policies of no heads": (dict(head_policies=[]), "0 head_policies, but 4 heads"),
    "no policy": (dict(head_policies=[ONE, None, ONE, ONE]), "policy of head 1 is None"),
    "price of nothing": (dict(price=torch.tensor(float("nan"))), "price is nan"),
    "negative price": (dict(price=torch.tensor(-1.0)), "price is -1"),
    "prices of fewer heads": (dict(price=torch.ones(3)), r"shape \[3\]"),
    "price of a float": (dict(price=0.3), "price is 0.3"),
    "infinite scale": (dict(softmax_scale=float("inf")), "softmax_scale is inf"),
    "scale beyond float32": (dict(softmax_scale=1e300), "softmax_scale is 1e"),
    "no settings": (dict(config=None), "config is a NoneType"),
    "no tensor": (dict(key=[1]), "key is a list"),
    "no heads": (dict(query=torch.ones(TOKENS, 1, 0, 64)), "empty"),
    "no heads of keys": (dict(key=NO_HEADS, value=NO_HEADS), "empty"),
    "no dimensions": (dict(query=torch.tensor(1.0)), r"expected query \[s, b, h, d\]"),
    "sparse operand": (dict(query=torch.ones(TOKENS, 1, HEADS, 64).to_sparse()), "torch.sparse_coo"),
    "operand without values": (dict(key=torch.ones(TOKENS, 1, 2, 64, device="meta")), "key is on device"),
    "price without values": (dict(price=torch.ones(4, device="meta")), "price is on device meta"),
    "sparse price": (dict(price=torch.ones(4).to_sparse()), "price is torch.sparse_coo"),
    "price with a gradient": (dict(price=torch.ones(4, requires_grad=True)), "detach"),
    "scale of a text": (dict(softmax_scale="1"), "softmax_scale is '1'"),
    "scale of a tensor": (dict(softmax_scale=torch.tensor(0.1)), "softmax_scale is tensor"),
    "offset of a number": (dict(softmax_offset=1.0), "softmax_offset is 1.0"),
    "offsets of fewer heads": (dict(softmax_offset=torch.ones(3)), r"softmax_offset has shape \[3\]"),
    "no documents": (dict(documents=[100, 156]), "documents are a list"),
    "number of policies": (dict(head_policies=4), "head_policies are a int"),
    "policy by name": (dict(head_policies=["price"] * 4), "policy of head 0 is 'price'"),
    "policy of no fit": (
        dict(head_policies=[ONE, ONE, XAttentionPolicy(48), ONE]),
        "policy of head 2 does not fit: --mtraining-block-stride is 48",
    ),
    "no group": (dict(cp_group=[0]), "process group is a list"),
    "name of a group": (dict(cp_group="cp"), "process group is a str"),
    "inner group of one rank": (dict(cp_inner=2), "inner groups of 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    wrong, named = WRONG[case]
    key = torch.randn(TOKENS, 1, 2, 64)
    given = dict(query=torch.randn(TOKENS, 1, HEADS, 64), key=key, value=key, config=PRICED) | wrong
    with pytest.raises(ValueError, match=named):
        attend(given.pop("query"), given.pop("key"), given.pop("value"), **given)


def operands(heads=HEADS, dtype=torch.float32):
    query = torch.randn(TOKENS, 1, heads, 64, dtype=dtype)
    key, value = torch.randn(2, TOKENS, 1, 2, 64, dtype=dtype)
    return query, key, value


NO_RESULT = {
    "a text": (lambda first: "x", "saved is a str"),
    "a plain tuple": (lambda first: tuple(first), "saved is a tuple"),
    "no pattern": (lambda first: first._replace(index="x"), "give the AttentionResult"),
    "no out": (lambda first: first._replace(out=None), "saved.out is a NoneType"),
    "no lse": (lambda first: first._replace(lse=None), "saved.lse is a NoneType"),
    "another out": (lambda first: first._replace(out=first.out[:128]), r"saved.out is \[128, 1, 4, 64"),
    "another lse": (lambda first: first._replace(lse=first.lse.half()), "saved.lse is .*float16"),
    "another scale": (
        lambda first: first._replace(softmax_scale=0.3), "in the first pass it was 0.3: give the same",
    ),
    "swapped": (lambda first: AttentionResult(first.lse, first.out, first.index), "saved.out is"),
    "out elsewhere": (lambda first: first._replace(out=first.out.to("meta")), "saved.out is on device"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_RESULT)
def test_what_is_no_saved_result_is_refused(case):
    """A result of another shape would be given back as it is."""
    make, named = NO_RESULT[case]
    given = operands()
    first = attend(*given, config=PRICED)
    with pytest.raises(ValueError, match=named):
        attend(*given, config=PRICED, saved=make(first))


def test_a_pruned_replay_needs_the_blocks_of_its_first_pass():
    given = operands()
    pruned = replace(PRICED, backward_threshold=2.0)
    first = attend(*given, config=pruned)
    assert first.packed.shape == (1, HEADS, TOKENS // 64, 1)
    with pytest.raises(ValueError, match="--mtraining-backward-threshold is 2, but the first pass"):
        attend(*given, config=pruned, saved=first._replace(packed=None))
    wrong = (
        first.packed[:, :1],
        first.packed.int(),
        torch.zeros(1, HEADS, TOKENS // 64, 2, dtype=torch.uint8),
    )
    for packed in wrong:
        with pytest.raises(ValueError, match="saved.packed is .* but with this config"):
            attend(*given, config=pruned, saved=first._replace(packed=packed))
    again = attend(*given, config=pruned, saved=first)
    assert torch.equal(again.packed, first.packed) and torch.equal(again.out, first.out)
    # Without pruning nobody reads them.
    assert attend(*given, config=PRICED).packed is None
    attend(*given, config=PRICED, saved=first)


def test_a_pattern_alone_is_attended_to_again():
    given = operands(dtype=torch.float64)
    first = attend(*given, config=PRICED)
    again = attend(*given, config=PRICED, pattern=first.index)
    assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
    assert again.index is first.index


def test_a_replay_is_of_the_same_blocks_and_documents():
    given = operands()
    index = attend(*given, config=PRICED).index
    other = MTrainingConfig.from_options(block_size=128, sample_strata=8)
    with pytest.raises(ValueError, match="for blocks of 64, but config has 128"):
        attend(*given, config=other, pattern=index)
    with pytest.raises(ValueError, match="pattern was selected without"):
        documents = VisibleRanges.from_lengths([100, 156], TOKENS)
        attend(*given, config=PRICED, pattern=index, documents=documents)
    first = attend(*given, config=PRICED, documents=documents)
    others, equal = (VisibleRanges.from_lengths([n, TOKENS - n], TOKENS) for n in (99, 100))
    for again in (dict(pattern=first.index), dict(saved=first)):
        attend(*given, config=PRICED, documents=equal, **again)
        with pytest.raises(ValueError, match="pattern was selected with others"):
            attend(*given, config=PRICED, documents=others, **again)


@pytest.mark.parametrize(
    "config", [MTrainingConfig.from_options(price=0.0), replace(PRICED, policy=ONE)]
)
def test_a_price_in_place_of_none_is_refused(config):
    with pytest.raises(ValueError, match="price is given, but the policy of config is"):
        attend(*operands(), config=config, price=torch.tensor(0.5))


def test_a_schedule_needs_the_price_of_the_step():
    config = MTrainingConfig.from_options(schedule="0:0.5,0.9:0", block_size=64, sample_strata=8)
    with pytest.raises(ConfigError, match="settings have a schedule, but price is None"):
        attend(*operands(), config=config)
    found = attend(*operands(), config=config, price=torch.tensor(0.3)).index
    same = replace(config, policy=replace(config.policy, schedule=None, price=0.3))
    assert found.density().equal(attend(*operands(), config=same).index.density())
    attend(*operands(), config=config, pattern=found)  # a replay searches nothing


@contextmanager
def autocast(*dtypes):
    """Regions of autocast one within the other; None is one without."""
    with ExitStack() as within:
        for dtype in dtypes:
            within.enter_context(torch.autocast("cpu", dtype, enabled=dtype is not None))
        yield


BF16, FP16 = torch.bfloat16, torch.float16
REGIONS = {  # of the forward, and of the backward
    "forward": ([BF16], []),
    "backward": ([], [BF16]),
    "both": ([BF16], [BF16]),
    "float16": ([FP16], [FP16]),
    "nested": ([BF16, None, FP16], [FP16, BF16]),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_autocast_rounds_no_scores(threshold, region, checkpointed):
    """Whoever trains under autocast gets what these operands have without it."""
    given = [each.requires_grad_() for each in operands()]
    config = replace(PRICED, backward_threshold=threshold)

    def run(*tensors):
        return attend(*tensors, config=config)[:2]

    expected = run(*given)
    gradients = torch.autograd.grad(expected[0].sum(), given)
    forward, backward = REGIONS[region]
    with autocast(*forward):
        found = checkpoint(run, *given, use_reentrant=False) if checkpointed else run(*given)
    with autocast(*backward):
        found_gradients = torch.autograd.grad(found[0].sum(), given)
    for mine, theirs in zip((*found, *found_gradients), (*expected, *gradients), strict=True):
        assert torch.equal(mine, theirs)


def test_a_buffer_of_starts_may_be_filled_again_before_the_backward():
    starts = VisibleRanges.from_lengths([100, TOKENS - 100], TOKENS).start
    torch.manual_seed(2)
    operands = [torch.randn(TOKENS, 1, heads, 64) for heads in (HEADS, 2, 2)]
    gradients = []
    for filled in (False, True):
        buffer = starts.clone()
        leaves = [each.clone().requires_grad_() for each in operands]
        out = attend(*leaves, config=PRICED, documents=VisibleRanges(buffer)).out
        if filled:
            buffer.zero_()
        gradients.append(torch.autograd.grad(out.sum(), leaves))
    assert all(torch.equal(*both) for both in zip(*gradients))


@pytest.mark.gpu
def test_a_scale_may_be_a_whole_number():
    """Triton compiles other kernels for integers than for real numbers, and 1 and 1.0 are one key."""
    given = [each.cuda() for each in operands(dtype=torch.bfloat16)]
    real = {
        scale: attend(*given, config=PRICED, softmax_scale=float(scale)).out for scale in (1, 2)
    }
    for scale in (1, 2, 1):
        assert torch.equal(attend(*given, config=PRICED, softmax_scale=scale).out, real[scale])


class NoGradient(torch.autograd.Function):
    """Has no gradient to give to what it is applied to."""

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def test_no_gradient_of_out_is_one_of_zeros():
    query, key = torch.randn(TOKENS, 1, HEADS, 64), torch.randn(TOKENS, 1, 2, 64)
    leaves = [each.requires_grad_() for each in (query, key, key.clone().detach())]
    out = attend(*leaves, config=PRICED).out
    gradients = torch.autograd.grad(NoGradient.apply(out).sum(), leaves)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_the_backward_makes_no_gradients_of_what_has_none():
    """On a GPU, zeros of the size of lse are a launch."""
    query = torch.randn(TOKENS, 1, HEADS, 64, requires_grad=True)
    key = torch.randn(TOKENS, 1, 2, 64)
    result = attend(query, key, key, config=PRICED)
    assert not result.lse.requires_grad
    with torch.profiler.profile() as profiler:
        result.out.sum().backward()
    made = {event.key for event in profiler.key_averages()}
    assert "_RingAttentionBackward" in made and "aten::zeros" not in made
