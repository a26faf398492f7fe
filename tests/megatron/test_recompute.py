# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Attention's result is carried from the first pass of a checkpoint to its replay, and nowhere else."""

import gc
import weakref
from functools import partial

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import random

import megatron_mtraining.attention as plain
from megatron_mtraining import MTrainingConfig
from megatron_mtraining.megatron import recompute
from megatron_mtraining.megatron.density import take_density
from megatron_mtraining.megatron.run_state import RUN
from megatron_mtraining.megatron.wrapping import is_wrapped
from tests.support.megatron_cases import (
    BATCH,
    DIM,
    GROUPS,
    HEADS,
    SEQUENCE,
    make,
    make_config,
    operands,
)

SPARSE = dict(block_size=64, slash=2, vertical=8, window=0, sample_strata=32)


pytestmark = pytest.mark.usefixtures("cpu_random")


@pytest.fixture
def count(monkeypatch):
    """How often attention has chosen a pattern and run its ring, or has taken results instead."""
    counts = {"chosen": 0, "run": 0, "taken": 0}
    choose, ring = plain.search_pattern, plain.ring_attention

    def search_pattern(*args, **named):
        counts["chosen"] += 1
        return choose(*args, **named)

    def ring_attention(*args):
        counts["taken" if len(args) > 6 and args[6] is not None else "run"] += 1
        return ring(*args)

    monkeypatch.setattr(plain, "search_pattern", search_pattern)
    monkeypatch.setattr(plain, "ring_attention", ring_attention)
    return counts


class Layers(torch.nn.Module):
    """A few attentions, each fed by the one before; ``again`` recomputes all of them in replays."""

    def __init__(self, number: int, again: bool = False, settings: dict = SPARSE, **others):
        super().__init__()
        config = make_config(**others)
        config.mtraining = MTrainingConfig.from_options(**settings, recompute_attention=again)
        self.attentions = torch.nn.ModuleList(
            make(config, layer_number=1 + layer) for layer in range(number)
        )

    def forward(self, query, key, value, checkpoint=None, inner=None):
        def call(attention, *tensors):
            args = (partial(attention), *tensors)
            return inner(*args) if inner else args[0](*tensors)

        def region(query, key, value):
            for attention in self.attentions:
                out = call(attention, query, key, value)
                query = 0.5 * query + out.view_as(query).sin()
            return query

        return checkpoint(region, query, key, value) if checkpoint else region(query, key, value)


def megatron(function, *args):
    return tensor_parallel.checkpoint(function, False, *args)


def native(function, *args, reentrant=True):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)


def leaves():
    return [tensor.clone().requires_grad_() for tensor in operands()]


def gradients(out, tensors):
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def trained(layers, checkpoint, inner=None):
    tensors = leaves()
    return gradients(layers(*tensors, checkpoint=checkpoint, inner=inner), tensors)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("number", [1, 3], ids="{}-layers".format)
def test_a_replay_runs_no_attention_and_changes_no_bit(number, count):
    expected = trained(Layers(number), None)
    again = trained(Layers(number, again=True), megatron)
    # The pattern is not searched again, even where attention is computed again.
    assert count == {"chosen": 2 * number, "run": 3 * number, "taken": 0}
    carried = trained(Layers(number), megatron)
    assert count == {"chosen": 3 * number, "run": 4 * number, "taken": number}
    assert same(again, expected) and same(carried, expected)


def test_a_replay_of_a_pruned_backward_changes_no_bit(count):
    length = 6 * SPARSE["block_size"]
    torch.manual_seed(11)
    tensors = [torch.randn(length, BATCH, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    dense = dict(SPARSE, slash=length)
    pruned = dict(dense, backward_threshold=4.0)

    def run(checkpoint, settings, again=False):
        torch.manual_seed(11)
        given = [tensor.clone().requires_grad_() for tensor in tensors]
        layers = Layers(2, again=again, settings=settings)
        return gradients(layers(*given, checkpoint=checkpoint), given)

    expected = run(None, pruned)
    assert same(run(megatron, pruned, again=True), expected)
    assert same(run(megatron, pruned), expected) and count["taken"] == 2
    assert not torch.allclose(run(None, dense)[2], expected[2], rtol=1e-3), "nothing is left out"


def test_the_memory_it_takes_is_as_documented(monkeypatch):
    kept = []
    original = recompute._Saved
    monkeypatch.setattr(
        recompute, "_Saved", lambda *all: kept.append(all[1].saved) or original(*all)
    )
    Layers(1)(*leaves(), checkpoint=megatron)
    ((out, lse, index, packed, _),) = kept
    assert packed is None
    heads = BATCH * HEADS
    assert out.dtype == lse.dtype == torch.float32
    assert out.nbytes == SEQUENCE * heads * DIM * 4
    assert lse.nbytes == SEQUENCE * heads * 4
    # Three prefix counts have one entry more than there are blocks.
    index_bytes = 17 * SEQUENCE / SPARSE["block_size"] + 4 * SPARSE["vertical"] + 12
    assert 0 < index.nbytes <= heads * index_bytes
    blocks = SEQUENCE // SPARSE["block_size"]
    Layers(1, settings=dict(SPARSE, backward_threshold=1.0))(*leaves(), checkpoint=megatron)
    assert kept[-1].packed.nbytes == heads * blocks * -(-blocks // 8)


@pytest.mark.gpu
def test_a_replay_on_a_gpu(count):
    def run(again):
        layers, tensors = Layers(2, again=again), leaves()
        tensors = [t.detach().cuda().bfloat16().requires_grad_() for t in tensors]
        before = torch.cuda.memory_allocated()
        out = layers(*tensors, checkpoint=megatron)
        memory = torch.cuda.memory_allocated() - before
        return gradients(out, tensors), memory

    run(True)  # compiles
    (expected, less), (found, more) = run(True), run(False)
    assert same(found, expected) and count["taken"] == 2
    out_and_lse = SEQUENCE * BATCH * HEADS * (2 * DIM + 4)
    assert 2 * out_and_lse <= more - less < 3 * out_and_lse


@pytest.mark.parametrize("number", [1, 2], ids="{}-layers".format)
def test_a_checkpoint_within_a_checkpoint(number, count):
    """What the outer replay takes is kept for the inner replays."""
    expected = trained(Layers(number), None)
    count.update(chosen=0, run=0, taken=0)
    assert same(trained(Layers(number), megatron, inner=megatron), expected)
    assert count == {"chosen": number, "run": number, "taken": 2 * number}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_several_in_flight_in_any_order(order, count):
    """As pipeline schedules do: forwards ahead of backwards, which come in an order of their own."""

    def run(layers):
        inputs = [[(1 + 0.1 * i) * t.detach() for t in leaves()] for i in range(3)]
        inputs = [[t.requires_grad_() for t in tensors] for tensors in inputs]
        outs = [layers(*inputs[0], checkpoint=megatron), layers(*inputs[1], checkpoint=megatron)]
        results = {}
        if order[0] != 2:  # a backward between forwards
            results[order[0]] = gradients(outs[order[0]], inputs[order[0]])
        outs.append(layers(*inputs[2], checkpoint=megatron))
        for i in order:
            if i not in results:
                results[i] = gradients(outs[i], inputs[i])
        return [part for i in range(3) for part in results[i]]

    expected = run(Layers(2, again=True))
    count.update(chosen=0, run=0, taken=0)
    assert same(run(Layers(2)), expected)
    assert count == {"chosen": 6, "run": 6, "taken": 6}


@pytest.fixture
def results(monkeypatch):
    """Weak references to the results of attention that were kept."""
    references = []
    original = recompute._Saved

    def kept(attention, replay, *others):
        result = replay.saved
        references.extend(map(weakref.ref, (result.out, result.lse, result.index)))
        return original(attention, replay, *others)

    monkeypatch.setattr(recompute, "_Saved", kept)
    gc.disable()  # what is not needed is freed at once, without the collector of cycles
    yield references
    gc.enable()


def alive(references) -> int:
    return sum(reference() is not None for reference in references)


def test_kept_until_the_backward_and_not_longer(results):
    layers, tensors = Layers(2), leaves()
    out = layers(*tensors, checkpoint=megatron)
    assert len(results) == alive(results) == 6
    gradients(out, tensors)
    assert out.grad_fn is not None, "the graph is still there"
    assert alive(results) == 0


def test_freed_with_a_graph_that_is_never_replayed(results):
    layers = Layers(2)
    out = layers(*leaves(), checkpoint=megatron)
    assert alive(results) == 6
    del out
    assert alive(results) == 0
    # No input needs gradients: there is no graph at all.
    layers(*operands(), checkpoint=megatron)
    assert alive(results) == 0


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_nothing_is_kept_without_gradients(training, results, count):
    layers = Layers(2).train(training)
    with torch.no_grad():
        layers(*leaves(), checkpoint=megatron, inner=megatron)
    layers(*leaves())
    assert not results and count["run"] == 4
    assert recompute._current.get() == (None, None)


def test_nothing_is_left_by_an_exception(results):
    layers = Layers(2)

    class Stop(Exception):
        pass

    def stopping(query, key, value):
        layers.attentions[0](query, key, value)
        raise Stop

    try:
        megatron(stopping, *leaves())
    except Stop:
        pass
    assert len(results) == 3 and alive(results) == 0
    assert recompute._current.get() == (None, None)


def test_a_second_backward_through_the_same_graph_computes_again(count):
    layers, tensors = Layers(1), leaves()
    out = layers(*tensors, checkpoint=megatron).square().sum()
    out.backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in tensors]
    assert count == {"chosen": 1, "run": 1, "taken": 1}
    out.backward()
    assert count == {"chosen": 2, "run": 2, "taken": 1}
    assert same([tensor.grad for tensor in tensors], [2 * grad for grad in once])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_other_checkpoints_in_a_wrapper_like_transformer_engine_s(reentrant, count):
    """Its default is reentrant, as Megatron's own; the other kind has gradients in the first pass
    too, and attention is computed in both."""
    wrapped = recompute.wrap_checkpoint(partial(native, reentrant=reentrant))
    expected = trained(Layers(2), None)
    count.update(chosen=0, run=0, taken=0)
    assert same(trained(Layers(2), wrapped), expected)
    runs = 2 if reentrant else 4
    assert count == {"chosen": runs, "run": runs, "taken": 4 - runs}


def test_a_module_is_given_as_it_is():
    """Transformer Engine looks into modules."""
    given = []
    checkpoint = recompute.wrap_checkpoint(lambda function, *args, **kwargs: given.append(function))
    module = torch.nn.Linear(1, 1)
    checkpoint(module)
    checkpoint(max)
    with torch.no_grad():
        checkpoint(max)
    assert (
        given[0] is module
        and isinstance(given[1], recompute._CheckpointedFunction)
        and given[2] is max
    )


def test_other_runs_are_handed_over(monkeypatch):
    monkeypatch.setattr(RUN, "has_attention", False)
    checkpoint = recompute.wrap_checkpoint(lambda *args, **kwargs: (args, kwargs))
    assert checkpoint(max, False, 1, x=2) == ((max, False, 1), {"x": 2})
    assert checkpoint(function=max) == ((), {"function": max})
    Layers(1)
    assert checkpoint(max) != ((max,), {})
    assert checkpoint(function=max) == ((), {"function": max})


def test_megatron_s_functions_are_wrapped():
    assert is_wrapped(random.checkpoint) and is_wrapped(tensor_parallel.checkpoint)
    assert is_wrapped(transformer_engine.te_checkpoint)


def test_functions_without_our_attention_are_as_before():
    def run(checkpoint):
        torch.manual_seed(3)
        tensors = leaves()[:1]
        return gradients(checkpoint(lambda x: torch.dropout(x, 0.5, True).exp(), *tensors), tensors)

    Layers(1)
    unwrapped = random.checkpoint.__wrapped__
    assert same(run(megatron), run(lambda function, *args: unwrapped(function, False, *args)))


def test_density_counts_the_first_pass_alone():
    layers = Layers(2)
    take_density()
    layers(*operands())
    expected = take_density()
    trained(layers, megatron, inner=megatron)
    assert [attention.density.forward.count for attention in layers.attentions] == [
        2,
        2,
    ]  # batch entries
    found = take_density()
    assert found == expected and torch.equal(found.heads, expected.heads)
    eval_only = Layers(1).eval()
    trained(eval_only, megatron)
    assert take_density() is None


@pytest.mark.parametrize("offloaded", [["core_attn"], ["core_attn", "attn_proj"]], ids="+".join)
def test_not_carried_where_offloading_empties_the_output(offloaded, count):
    layers = Layers(1, fine_grained_activation_offloading=True, offload_modules=offloaded)
    trained(layers, megatron)
    assert count["taken"] == (0 if "attn_proj" in offloaded else 1)


def first_pass_then(replay):
    """A checkpointed function of two layers that is ``replay(layers, query, key, value)`` then."""
    layers, calls = Layers(2), []

    def region(query, key, value):
        calls.append(torch.is_grad_enabled())
        if calls == [False]:
            first, second = layers.attentions
            return first(query, key, value) + second(query, key, value)
        return replay(layers.attentions, query, key, value)

    return megatron(region, *leaves())


def once_more(attentions, *tensors):
    return sum(attention(*tensors) for attention in (*attentions, attentions[0]))


def with_fewer_queries(attentions, query, key, value):
    return attentions[0](query[:64], key[:64], value[:64])


MISMATCHES = {
    "more": (once_more, "layer 1 is run more often in the replay"),
    "fewer": (lambda attentions, *t: attentions[0](*t), "layer 2 is not run in the replay"),
    "none": (lambda attentions, *t: sum(t[0].split(1, -1)).flatten(2), "layer 1, 2 is not run"),
    "order": (
        lambda attentions, *t: attentions[1](*t) + attentions[0](*t),
        "layer 2 runs in the second pass where the first pass ran the attention of layer 1",
    ),
    "shape": (with_fewer_queries, r"layer 1 has queries \[64, .* but \[128, .* in the first pass"),
    "dtype": (
        lambda attentions, *t: attentions[0](*(tensor.bfloat16() for tensor in t)),
        "layer 1 has queries .*bfloat16.* but .*float32",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_replay_of_something_else_is_refused(name):
    replay, message = MISMATCHES[name]
    out = first_pass_then(replay)
    with pytest.raises(RuntimeError, match=message) as raised:
        out.sum().backward()
    assert "--mtraining-recompute-attention" in str(raised.value)
    assert recompute._current.get() == (None, None)


def test_an_output_whose_memory_was_released_is_refused(monkeypatch):
    ring = plain.ring_attention

    def ring_attention(*args):  # in the layout of the kernels, unlike their CPU reference's
        found = ring(*args)
        return found._replace(out=found.out.contiguous())

    monkeypatch.setattr(plain, "ring_attention", ring_attention)
    out = megatron(Layers(1).attentions[0].forward, *leaves())
    doubled = out * 2  # keeps no operand
    out.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="layer 1 was emptied before the replay"):
        doubled.sum().backward()


def test_where_attention_is_computed_again_a_mismatch_is_no_error(count):
    """The pattern is searched again, then: it is the way out of the errors above."""
    layers = Layers(2, again=True)
    passes = []

    def region(query, key, value):
        passes.append(1)
        first, second = layers.attentions[:: 1 if len(passes) == 1 else -1]
        return first(query, key, value) + second(query, key, value)

    tensors = leaves()
    gradients(megatron(region, *tensors), tensors)
    assert len(passes) == 2 and count == {"chosen": 4, "run": 4, "taken": 0}
