# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""One rank of test_recompute_model: GPTModel in Megatron's schedules, recomputed with and without
attention.

torchrun ... recompute_worker.py PIPELINE_STAGES VIRTUAL_STAGES       the other ranks: context-parallel
"""

from __future__ import annotations

import gc
import sys
import weakref

import torch
import torch.distributed as dist

from tests.support import cpu_shim

SEQUENCE, BATCH, VOCABULARY, BLOCK, MICROBATCHES = 256, 1, 96, 64, 4


CHUNK = 2
"""Layers of a chunk of the model; 0.16's uniform recomputation asks for a multiple of its layers."""


def full(method: str, layers: int) -> dict:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


CASES = {
    # how it is recomputed, and how many of a stage's n layers are
    "uniform, 1 layer": (full("uniform", 1), lambda n: n),
    "uniform, 2 layers": (full("uniform", 2), lambda n: n),
    "block, 1 layer": (full("block", 1), lambda n: 1),
    "block, 2 layers": (full("block", 2), lambda n: min(n, 2)),
    "selective": ({"recompute_granularity": "selective"}, lambda n: n),
}


def build(case: dict, again: bool, stages: int, virtual: int, cp_size: int) -> list:
    """This rank's chunks of the model, with the same weights each time."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mtraining import MTrainingConfig

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=CHUNK * stages * virtual,
        hidden_size=128,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=64,
        ffn_hidden_size=128,
        attention_dropout=0.0,
        hidden_dropout=0.1,  # so that random states matter
        use_cpu_initialization=True,
        context_parallel_size=cp_size,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        attention_backend=AttnBackend.mtraining,
        **case,
    )
    config.mtraining = MTrainingConfig.from_options(
        block_size=BLOCK,
        slash=2,
        vertical=8,
        window=0,
        sample_strata=16,
        recompute_attention=again,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for chunk in range(virtual):
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                position_embedding_type="rope",
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == stages - 1 and chunk == virtual - 1,
                share_embeddings_and_output_weights=False,
                **({"vp_stage": chunk} if virtual > 1 else {}),
            )
        )
    return chunks


def batches(rank: int, size: int):
    from megatron_mtraining.layout import stripe_batch

    generator = torch.manual_seed(3)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        batch = {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "position_ids": torch.arange(SEQUENCE).repeat(BATCH, 1),
        }
        yield stripe_batch(batch, rank, size, BLOCK)


def step(chunks: list, rank: int, size: int, forward_only: bool = False) -> dict:
    """Losses and gradients of one step of Megatron's schedule."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(iterator, model):
        batch = next(iterator)
        out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return out, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    data = [batches(rank, size) for _ in chunks]
    torch.manual_seed(9)
    for chunk in chunks:
        chunk.train(not forward_only)
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
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


def main(stages: int, virtual: int) -> None:
    cpu_shim.install_torch()
    cpu_shim.install_core()
    dist.init_process_group("gloo")
    size = dist.get_world_size() // stages
    from megatron.core import parallel_state

    import megatron_mtraining

    megatron_mtraining.register()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=size,
    )
    rank = parallel_state.get_context_parallel_rank()
    watch = Watch()
    gc.disable()
    for name, (case, recomputed) in CASES.items():
        chunks = build(case, True, stages, virtual, size)
        own = CHUNK * virtual * MICROBATCHES
        replays = sum(recomputed(len(chunk.decoder.layers)) for chunk in chunks) * MICROBATCHES
        expected = step(chunks, rank, size)
        assert watch.alive() == 0
        watch.kept.clear()
        # The pattern is searched once, even where attention is computed again.
        assert watch.take() == (own, own + replays, 0), name
        chunks = build(case, False, stages, virtual, size)
        found = step(chunks, rank, size)
        kept, alive = len(watch.kept), watch.alive()
        assert kept == replays and alive == 0, (name, kept, alive)
        assert watch.take() == (own, own, replays), name
        assert found.keys() == expected.keys() and len(found) > 10
        for part, value in found.items():
            assert torch.equal(value, expected[part]), f"{name}: {part}"
        step(chunks, rank, size, forward_only=True)
        assert not watch.kept and watch.take() == (own, own, 0), name
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"ok: {name}, loss {found['loss 0']:.6f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
