# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""GPTModel in Megatron's schedules: attention runs once, losses and gradients are those of the
opt-out bit for bit."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.relayout import zigzag
from tests.support.gpt_models import build, draw_batch, run_schedule, start
from tests.support.ranks import run_ranks

SHAPE, BLOCK, MICROBATCHES = (1, 256), 64, 4
CHUNK = 2
"""Layers of a chunk of the model; 0.16's uniform recomputation asks for a multiple of its layers."""


def full(method: str, layers: int) -> dict:
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    return dict(zip(names, ("full", method, layers)))


CASES = {
    # how it is recomputed, and how many of a stage's n layers are
    "uniform, 1 layer": (full("uniform", 1), lambda n: n),
    "uniform, 2 layers": (full("uniform", 2), lambda n: n),
    "block, 1 layer": (full("block", 1), lambda n: 1),
    "selective": ({"recompute_granularity": "selective"}, lambda n: n),
}


def chunks_of(case: dict, again: bool, stages: int, virtual: int, cp_size: int) -> list:
    """This rank's chunks of the model."""
    from megatron.core import parallel_state

    config = dict(
        num_layers=CHUNK * stages * virtual, num_query_groups=1,
        hidden_dropout=0.1,  # so that random states matter
        context_parallel_size=cp_size, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32, deallocate_pipeline_outputs=True, **case,
    )  # fmt: skip
    settings = dict(
        block_size=BLOCK, slash=2, vertical=8, window=0, sample_strata=16, recompute_attention=again
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return [
        build(
            settings, config, pre_process=stage == 0 and chunk == 0,
            post_process=stage == stages - 1 and chunk == virtual - 1,
            share_embeddings_and_output_weights=False,
            **({"vp_stage": chunk} if virtual > 1 else {}),
        )
        for chunk in range(virtual)
    ]  # fmt: skip


def step(chunks: list, rank: int, size: int, forward_only: bool = False) -> dict:
    """Losses and gradients of one step."""
    whole = (draw_batch(*SHAPE, seed) for seed in range(MICROBATCHES))
    batches = [{name: zigzag(value, rank, size) for name, value in each.items()} for each in whole]
    torch.manual_seed(9)
    for chunk in chunks:
        chunk.train(not forward_only)

    def loss_of(losses, batch):
        return losses.mean(), {"loss": losses.detach().mean()}

    reduced = run_schedule(chunks, batches, loss_of, SHAPE, forward_only)
    result = {f"loss {i}": one["loss"] for i, one in enumerate(reduced)}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            if param.grad is not None:
                result[f"{number} {name}"] = param.grad
    return result


class Watch:
    """Counts of what attention does, and weak references to what is kept of it."""

    def __init__(self):
        import megatron_mtraining.attention as plain
        from megatron_mtraining.megatron import recompute

        self.chosen = self.run = self.taken = self.posts = 0
        self.kept: list = []
        choose, ring, kept = plain.search_pattern, plain.ring_attention, recompute._Saved
        batch_isend_irecv = dist.batch_isend_irecv

        def search_pattern(*args, **named):
            self.chosen += 1
            return choose(*args, **named)

        def ring_attention(*args):
            taken = len(args) > 6 and args[6] is not None
            self.taken += taken
            self.run += not taken
            before = self.posts
            out = ring(*args)
            assert not taken or self.posts == before, "nothing is sent in a replay"
            return out

        def keep(attention, replay, *more):
            self.kept.append(weakref.ref(replay.pattern or replay.saved.out))
            return kept(attention, replay, *more)

        def post(*args, **kwargs):
            self.posts += 1
            return batch_isend_irecv(*args, **kwargs)

        plain.search_pattern, plain.ring_attention = search_pattern, ring_attention
        recompute._Saved = keep
        dist.batch_isend_irecv = post

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.kept)

    def take(self) -> tuple[int, int, int]:
        found = self.chosen, self.run, self.taken
        self.chosen = self.run = self.taken = 0
        self.kept.clear()
        return found


def recomputed(rank: int, world: int, stages: int, virtual: int) -> None:
    """Ranks that are not pipeline stages are context-parallel."""
    size = world // stages
    state = start(
        pipeline_model_parallel_size=stages, context_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
    )  # fmt: skip
    cp_rank = state.get_context_parallel_rank()
    watch = Watch()
    gc.disable()
    for name, (case, layers) in CASES.items():
        chunks = chunks_of(case, True, stages, virtual, size)
        own = CHUNK * virtual * MICROBATCHES
        replays = sum(layers(len(chunk.decoder.layers)) for chunk in chunks) * MICROBATCHES
        expected = step(chunks, cp_rank, size)
        assert watch.alive() == 0
        # The pattern is searched once, even where attention is computed again.
        assert watch.take() == (own, own + replays, 0), name
        chunks = chunks_of(case, False, stages, virtual, size)
        found = step(chunks, cp_rank, size)
        kept, alive = len(watch.kept), watch.alive()
        assert kept == replays and alive == 0, (name, kept, alive)
        assert watch.take() == (own, own, replays), name
        assert found.keys() == expected.keys() and len(found) > 10
        for part, value in found.items():
            assert torch.equal(value, expected[part]), f"{name}: {part}"
        step(chunks, cp_rank, size, forward_only=True)
        assert not watch.kept and watch.take() == (own, own, 0), name


@pytest.mark.parametrize(
    "processes, stages, chunks",
    [(1, 1, 1), pytest.param(4, 2, 2, marks=pytest.mark.slow)],
)
def test_attention_runs_once_and_no_bit_changes(processes, stages, chunks):
    """In one process, and with context parallelism in an interleaved pipeline."""
    run_ranks(processes, recomputed, stages, chunks)
