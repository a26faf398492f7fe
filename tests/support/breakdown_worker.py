# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The rank of test_instrument: GPTModel trained for some steps, the last two under the profiler.

torchrun ... breakdown_worker.py FOLDER

Writes a trace and the losses of each case to FOLDER/CASE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.model import instrument
from tests.support import cpu_shim

SEQUENCE, VOCABULARY, LAYERS, CHUNK = 128, 56, 2, 48
STEPS, TRACED = 4, 2
RECOMPUTE = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)  # fmt: skip
CASES = {
    "dense": {},
    "dense, not traced": dict(traced=False),
    "dense, our loss": dict(chunk=CHUNK),
    "dense, recomputed": dict(config=RECOMPUTE),
    "dense, recomputed, output kept": dict(kept=True, config=RECOMPUTE),
    "ours, recomputed": dict(ours=True, chunk=CHUNK, config=RECOMPUTE),
}


def build(ours: bool, chunk: int, config: dict):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_mtraining import MTrainingConfig

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    backend = AttnBackend.mtraining if ours else AttnBackend.auto
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=128, num_attention_heads=2, kv_channels=64, ffn_hidden_size=64,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        attention_backend=backend, **config,
    )  # fmt: skip
    config.mtraining = MTrainingConfig.from_options(
        block_size=64, slash=SEQUENCE, vertical=0, loss_chunk=chunk
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


class Optimizer:
    """Steepest descent."""

    def __init__(self, model):
        self.model = model

    def zero_grad(self):
        pass

    @torch.no_grad()
    def step(self):
        for param in self.model.parameters():
            param.sub_(param.main_grad, alpha=0.1)


def train_step(forward_step_func, data_iterator, model, optimizer):
    """As much of Megatron-LM's as is wrapped."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, num_microbatches=1,
        seq_length=SEQUENCE, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    return reduced[0]["loss"]


def forward_step(data_iterator, model):
    tokens = next(data_iterator)
    ids = torch.arange(SEQUENCE)[None]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    losses = model(tokens, ids, mask, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


def run(
    folder: Path, ours: bool = False, chunk: int = 0, config=None, traced: bool = True, kept: bool = False
) -> None:  # fmt: skip
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    before, attention = GPTModel.__init__, DotProductAttention.forward
    if kept:
        DotProductAttention.forward = instrument.kept(attention)
    if chunk and not ours:
        instrument.chunk_loss(chunk)
    model = build(ours, chunk, config or {})
    GPTModel.__init__ = before
    draw = torch.Generator().manual_seed(3)
    data = iter([torch.randint(VOCABULARY, (1, SEQUENCE), generator=draw) for _ in range(STEPS)])
    profiling = instrument.Profiling(folder, TRACED, lambda: STEPS)
    step = profiling.around(train_step) if traced else train_step
    optimizer = Optimizer(model)
    losses = [step(forward_step, data, [model], optimizer) for _ in range(STEPS)]
    folder.mkdir(exist_ok=True)
    torch.save(losses, folder / "losses.pt")
    DotProductAttention.forward = attention


def main(folder: Path) -> None:
    cpu_shim.install_torch()
    cpu_shim.install_core()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state

    import megatron_mtraining

    megatron_mtraining.register()
    parallel_state.initialize_model_parallel()
    for name, case in CASES.items():
        run(folder / name, **case)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
