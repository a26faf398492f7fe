# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Output layer and cross entropy in chunks, and their kernels, against PyTorch's cross entropy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_mtraining.kernels.loss import cross_entropy_gradient, cross_entropy_rows
from megatron_mtraining.loss import linear_cross_entropy
from megatron_mtraining.megatron.main_grad import MainGrad
from tests.support.attention_cases import relative_error
from tests.support.ranks import run_ranks


def draw(tokens, words, dim, dtype, device="cpu", seed=0):
    """Hidden, weight, labels and gradients of losses, some of which are 0, as under a loss mask."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(words, dim, generator=generator, dtype=torch.float64) * 2 * dim**-0.5
    labels = torch.randint(words, (tokens,), generator=generator)
    grad = torch.randn(tokens, generator=generator, dtype=torch.float64)
    grad *= torch.rand(tokens, generator=generator) < 0.7
    hidden, weight = (t.to(dtype).to(device) for t in (hidden, weight))
    return hidden.requires_grad_(), weight.requires_grad_(), labels.to(device), grad.to(device)


def expected_of(hidden, weight, labels, grad, scale=1.0):
    """Losses and gradients in float64, of the operands as they are."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    losses = F.cross_entropy(leaves[0] @ leaves[1].T * scale, labels, reduction="none")
    return losses, *torch.autograd.grad(losses, leaves, grad)


def actual_of(hidden, weight, labels, grad, chunk, **more):
    losses = linear_cross_entropy(hidden, weight, labels, chunk, **more)
    return losses, *torch.autograd.grad(losses, (hidden, weight), grad.to(losses.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_rounds_nothing(dtype, autocast):
    """Losses and gradients, also of a backward that is called in its region, are those without it."""
    operands = draw(30, 37, 16, dtype)
    expected = actual_of(*operands, 7)
    with torch.autocast("cpu", autocast):
        found = actual_of(*operands, 7)
    for mine, theirs in zip(found, expected):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chunk", [1, 7, 30, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_losses_and_gradients(dtype, tolerance, chunk):
    operands = draw(30, 37, 16, dtype)
    actual, expected = actual_of(*operands, chunk, scale=0.5), expected_of(*operands, scale=0.5)
    assert [t.dtype for t in actual] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
    for a, e in zip(actual, expected):
        assert relative_error(a, e) < tolerance


def test_shapes_and_masks():
    hidden, weight, labels, _ = draw(24, 37, 16, torch.float32)
    losses = linear_cross_entropy(hidden.view(3, 8, 16), weight, labels.view(3, 8), 5)
    assert losses.shape == (3, 8)
    for part in torch.autograd.grad(losses, (hidden, weight), torch.zeros(3, 8)):
        assert not part.any()
    # No word: nothing but the normaliser, which ignores no token; a loss mask is there for that.
    outside = torch.where(labels < 20, labels, -100)
    losses = linear_cross_entropy(hidden, weight, outside, 5)
    logits = hidden @ weight.T
    shifted = logits.logsumexp(1) - logits.amax(1)
    torch.testing.assert_close(losses[labels >= 20], shifted[labels >= 20])
    assert linear_cross_entropy(hidden[:0], weight, labels[:0], 5).shape == (0,)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, outside, 5), losses)


def test_a_frozen_weight_or_input():
    hidden, weight, labels, grad = draw(24, 37, 16, torch.float64)
    _, grad_hidden, grad_weight = expected_of(hidden, weight, labels, grad)
    losses = linear_cross_entropy(hidden, weight.detach(), labels, 5)
    torch.testing.assert_close(torch.autograd.grad(losses, hidden, grad)[0], grad_hidden)
    losses = linear_cross_entropy(hidden.detach(), weight, labels, 5)
    torch.testing.assert_close(torch.autograd.grad(losses, weight, grad)[0], grad_weight)


def test_values_that_are_not_finite_show():
    hidden, weight, labels, _ = draw(24, 37, 16, torch.float32)
    with torch.no_grad():
        hidden[3], hidden[9, 0] = torch.nan, torch.inf
    losses = linear_cross_entropy(hidden, weight, labels, 5)
    assert torch.equal(losses.isnan().nonzero()[:, 0], torch.tensor([3, 9]))


@pytest.mark.parametrize("wrong", ["labels", "weight", "dtype", "chunk"])
def test_operands_that_do_not_fit(wrong):
    hidden, weight, labels, _ = draw(24, 37, 16, torch.float32)
    if wrong == "dtype":
        weight = weight.bfloat16()
    labels = labels[:5] if wrong == "labels" else labels
    weight = weight[:, :5] if wrong == "weight" else weight
    with pytest.raises(ValueError, match=r"hidden \(24, 16\) torch.float32, weight"):
        linear_cross_entropy(hidden, weight, labels, 0 if wrong == "chunk" else 4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16, None])
def test_main_grad(main, fused):
    """Of Megatron's data-parallel wrapper: added to, and autograd's own is only a placeholder then."""
    hidden, weight, labels, grad = draw(50, 37, 16, torch.bfloat16)
    expected = expected_of(hidden, weight, labels, grad)[2]
    if main is not None:
        weight.main_grad = torch.ones_like(weight, dtype=main)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
    buffer = MainGrad(weight) if fused else None
    losses = linear_cross_entropy(hidden, weight, labels, 8, gradient_buffer=buffer)
    losses.backward(grad.float())
    if fused and main is not None:
        assert weight.grad_added_to_main_grad and not weight.grad.any()
        assert relative_error(weight.main_grad - 1.0, expected) < (
            1e-2 if main.itemsize == 4 else 2e-2
        )
    else:
        assert main is None or (weight.main_grad == 1).all()
        assert relative_error(weight.grad, expected) < 8e-3


def test_main_grad_of_megatron_fsdp():
    """A buffer that is made in the backward, and overwritten: its content is of another step."""
    hidden, weight, labels, grad = draw(50, 37, 16, torch.float32)
    weight.__fsdp_param__ = True
    weight.get_main_grad = lambda: torch.full_like(weight, 99)
    losses = linear_cross_entropy(hidden, weight, labels, 8, gradient_buffer=MainGrad(weight))
    assert torch.autograd.grad(losses, (hidden, weight), grad.float(), allow_unused=True)[1] is None
    assert relative_error(weight.main_grad, expected_of(hidden, weight, labels, grad)[2]) < 1e-6


def test_a_long_sum_is_not_rounded_with_each_chunk():
    """In bf16, 500 equal parts would stop to grow half-way."""
    hidden, weight, labels, _ = draw(1, 37, 16, torch.bfloat16)
    many = hidden.detach().repeat(500, 1).requires_grad_()
    operands = many, weight, labels.repeat(500), torch.ones(500)
    assert relative_error(actual_of(*operands, 1)[2], expected_of(*operands)[2]) < 8e-3


def vocabulary_parallel(rank, world, chunk, dtype):
    hidden, weight, labels, grad = draw(45, 36, 16, dtype)
    part = weight.detach().chunk(world)[rank].clone().requires_grad_()
    losses, grad_hidden, grad_part = actual_of(
        hidden, part, labels, grad, chunk, tp_group=dist.group.WORLD
    )
    dist.all_reduce(grad_hidden)
    return losses.detach(), grad_hidden, grad_part


def test_a_vocabulary_over_ranks():
    world = 2
    results = run_ranks(world, vocabulary_parallel, 7, torch.float64)
    losses, grad_hidden, grad_weight = expected_of(*draw(45, 36, 16, torch.float64))
    for rank, (actual, actual_hidden, part) in enumerate(results):
        torch.testing.assert_close(actual, losses)
        torch.testing.assert_close(actual_hidden, grad_hidden)
        torch.testing.assert_close(part, grad_weight.chunk(world)[rank])


@pytest.fixture
def device(monkeypatch):
    """Where the Triton kernels run: a GPU, or the CPU under the interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [1, 37, 4096, 9001])
def test_kernels_against_their_references(device, monkeypatch, words, dtype):
    torch.manual_seed(1)
    rows, first, scale = 5, 1000, 0.25
    logits = (torch.randn(rows, words) * 12).to(dtype)
    logits[1] = -torch.inf
    logits[2, : words // 2] = -torch.inf
    labels = torch.tensor([first, first + words - 1, first + words // 2, first - 1, first + words])
    grad = torch.randn(rows)
    results = []
    for where in (device, "cpu"):
        if results:  # the references run on CPU tensors unless the interpreter is on
            monkeypatch.setenv("TRITON_INTERPRET", "0")
        mine = logits.clone().to(where)
        outs = torch.empty(3, rows, device=where)
        cross_entropy_rows(mine, labels.to(where), first, scale, *outs)
        lse = torch.where(outs[0].isinf(), 1.0, outs[0] + outs[1].log() + 1)  # of more ranks
        cross_entropy_gradient(mine, labels.to(where), lse, grad.to(where), first, scale)
        results.append((outs.cpu(), mine.cpu()))
    (outs, gradient), (reference_outs, reference_gradient) = results
    torch.testing.assert_close(outs, reference_outs, rtol=1e-5, atol=1e-6)
    assert gradient.dtype == dtype
    precise = dict(rtol=1e-5, atol=1e-7) if dtype == torch.float32 else {}
    torch.testing.assert_close(gradient, reference_gradient, **precise)
    assert reference_gradient[3].any() and outs[2, 3:].tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1000, 4096])
def test_gpu_in_bfloat16(chunk):
    """At a moderate size, against float64; memory is that of a chunk's logits, not of all."""
    tokens, words, dim = 8192, 32000, 512
    operands = draw(tokens, words, dim, torch.bfloat16, "cuda")
    expected = expected_of(*operands)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    actual = actual_of(*operands, chunk)
    held = torch.cuda.max_memory_allocated() - before
    assert held < chunk * words * 2 + words * dim * 8 + 64e6
    assert actual[0].dtype == torch.float32
    for value, right in zip(actual, expected):
        assert relative_error(value, right) < 1e-2
    weight = operands[1]
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    losses = linear_cross_entropy(*operands[:3], chunk, gradient_buffer=MainGrad(weight))
    losses.backward(operands[3].float())
    assert relative_error(weight.main_grad - 1, expected[2]) < 1e-2


FP8 = torch.float8_e5m2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(labels=torch.arange(8) + 0.7), "labels are of torch.float32"),
        (dict(labels=torch.arange(8) > 3), "labels are of torch.bool"),
        (dict(hidden=torch.ones(8, 16, dtype=torch.int64)), "hidden is of torch.int64"),
        (dict(weight=None), "weight is a NoneType"),
        (dict(chunk=2.5), "chunk is 2.5"),
        (dict(chunk=True), "chunk is True"),
        (dict(scale=float("nan")), "scale is nan"),
        (dict(scale="2"), "scale is '2'"),
        (dict(scale=1e300), "scale is 1e[+]300"),
        (dict(scale=10**400), "scale is 1000"),
        (dict(weight=torch.ones(20, 16, device="meta")), "weight is on device meta"),
        (dict(hidden=torch.ones(8, 16).to_sparse()), "hidden is torch.sparse_coo"),
        (dict(labels=torch.arange(8).to_sparse()), "labels is torch.sparse_coo"),
        (dict(weight=torch.ones(0, 16)), "empty"),
        (dict(hidden=torch.ones(8, 0), weight=torch.ones(20, 0)), "empty"),
        (
            dict(hidden=torch.ones(8, 16).to(FP8), weight=torch.ones(20, 16).to(FP8)),
            "hidden is of torch.float8",
        ),
        (dict(tp_group="tp"), "process group is a str"),
        (dict(gradient_buffer="x"), "gradient_buffer is a str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operands_of_other_types_are_refused(wrong, named):
    """Labels with fractions would be cut to other tokens in silence."""
    given = dict(
        hidden=torch.ones(8, 16), weight=torch.ones(20, 16), labels=torch.arange(8), chunk=4
    )
    with pytest.raises(ValueError, match=named):
        linear_cross_entropy(**{**given, **wrong})


def test_a_gradient_buffer_of_another_shape_is_refused():
    """Two rows of a bfloat16 buffer would both get the gradient."""

    class Buffer:
        def buffer(self):
            return torch.zeros(2, 20, 16, dtype=torch.bfloat16)

        def placeholder(self):
            return None

    weight = torch.ones(20, 16, requires_grad=True)
    losses = linear_cross_entropy(
        torch.ones(8, 16), weight, torch.arange(8), 4, gradient_buffer=Buffer()
    )
    with pytest.raises(ValueError, match=r"buffer is of shape \(2, 20, 16\)"):
        losses.sum().backward()
