# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Steps of a transformers model whose sequences are shared by GPUs: target recall beside dense attention.

    torchrun --nproc-per-node 2 -m benchmarks.model.sequences --model coder.gguf --text FILE --lengths 128K
    torchrun --nproc-per-node 2 -m benchmarks.model.sequences --shape qwen3-8b --layers 2 --lengths 1M

Every case trains on the same windows of the text from the same weights (random ones and tokens for a shape),
with FSDP 2, float32 weights and bf16 products, AdamW, Liger-Kernel's loss in chunks, and checkpointed layers
that keep what attention found, for dense attention too; with ``--offload`` activations are in the host's
memory. Dense attention is PyTorch's (cuDNN's kernel, or FlashAttention's), between the same all-to-alls. YaRN
beyond the model's positions. Appends rows to ``results/sequences.jsonl``: seconds of each step, tokens a
second and GPU, peak memory, loss, density and recall.
"""

from __future__ import annotations

import copy
import gc
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.models.tokenizer import open_transformers_tokenizer
from megatron_mtraining.tools.common.sizes import tokens_of
from megatron_mtraining.tools.plan import shapes
from megatron_mtraining.transformers import configure, cut_batch, take_means
from megatron_mtraining.transformers.sequence import SequenceParallel

from ..lib import record
from .continuing import stretch

DENSE = "ulysses_sdpa"
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
SHAPES = {"qwen3-8b": ("qwen3", 40960), "qwen2.5-0.5b": ("qwen2", 32768)}
"""The type and the positions of shapes that ``mtraining plan`` knows."""
OTHER_SHAPES = {
    "tiny": dict(
        model_type="qwen2", hidden_size=256, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, num_hidden_layers=2, max_position_embeddings=512,
    ),
    # An even number of ranks cannot share its heads: they are a ring.
    "smollm2-135m": dict(
        model_type="llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, num_hidden_layers=30, max_position_embeddings=8192,
        rope_theta=1e5, tie_word_embeddings=True,
    ),
}  # fmt: skip


def sizes_of(shape: str) -> dict:
    """The configuration of a shape."""
    if shape in OTHER_SHAPES:
        return dict(OTHER_SHAPES[shape])
    kind, positions = SHAPES[shape]
    more = dict(model_type=kind, max_position_embeddings=positions, rope_theta=1e6)
    return {**shapes.config_of(shape), **more}


def dense(parallel, module, query, key, value, attention_mask, scaling=None, dropout=0.0, **more):
    """PyTorch's causal attention to all tokens of this rank's heads."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    query, key, value = parallel.to_heads(query, key, value)
    kernels = KERNELS if query.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    return parallel.to_tokens(out.transpose(1, 2), out.shape[2]), None


def keep_attention(context, operation, *args, **kwargs):
    kept = operation in ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def model_of(options) -> PreTrainedModel:
    """With float32 weights; random ones of a shape are the same on all ranks."""
    if options.shape:
        sizes = sizes_of(options.shape)
        sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        torch.manual_seed(1)
        with torch.device(options.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        where, how = options.model, {}
        if options.model.is_file():
            where, how = options.model.parent, dict(gguf_file=options.model.name)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **how)
    return model


def tokens_from(options, count: int) -> torch.Tensor:
    if options.shape:
        most = sizes_of(options.shape)["vocab_size"]
        return torch.randint(most, (count,), generator=torch.Generator().manual_seed(1))
    if options.text.suffix == ".pt":
        return torch.load(options.text).long()
    tokenizer = open_transformers_tokenizer(options.model)
    found = tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor(found)


def run(options, model: PreTrainedModel, tokens, length: int, setting: str, steps: int) -> dict:
    """One case; rank 0's row."""
    group, device = dist.group.WORLD, torch.device(options.device)
    config = copy.deepcopy(model.config)
    stretch(config, length)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    if device.type == "cuda":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    model = model.to(device).train()
    if setting == "dense":
        parallel = SequenceParallel(group, model.config.num_attention_heads)
        if parallel.ring is not None:
            raise SystemExit("dense attention needs ranks that share the heads evenly")
        ALL_ATTENTION_FUNCTIONS.register(DENSE, partial(dense, parallel))
        model.set_attn_implementation(DENSE)
        contexts = partial(create_selective_checkpoint_contexts, keep_attention)
        model.gradient_checkpointing_enable(dict(use_reentrant=False, context_fn=contexts))
    else:
        words = dict(word.split("=") for word in setting.split(","))
        given = {name: int(v) if v.isdigit() else float(v) for name, v in words.items()}
        config = MTrainingConfig.from_options(**given)
        configure(model, config, sequence_parallel=group)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    kept = dict(mesh=mesh)
    if device.type == "cuda":
        kept["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, **kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
    losses, seconds, densities, recalls = [], [], [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        first = step * length % max(1, len(tokens) - length)
        window = tokens[None, first : first + length]
        batch = cut_batch(dict(input_ids=window, labels=window), group)
        batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        with save_on_cpu(pin_memory=True) if options.offload else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        if setting != "dense":
            means = take_means(model)
            densities.append(means.density.nanmean().item())
            recalls.append(means.recall.nanmean().item())
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    last = seconds[-1] if len(seconds) < 3 else sorted(seconds[1:])[(len(seconds) - 1) // 2]
    return dict(
        model=options.shape or options.model.name, layers=model.config.num_hidden_layers,
        setting=setting, length=length, gpus=dist.get_world_size(), steps=steps,
        seconds=[round(each, 4) for each in seconds], step_s=round(last, 4),
        tokens_per_s_gpu=round(length / last / dist.get_world_size(), 1),
        memory_gib=round(memory, 2), offload=options.offload, losses=losses,
        densities=densities, recalls=recalls,
    )  # fmt: skip


def synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = record.parser(__doc__, "sequences.jsonl")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--text", type=Path, help="a text file, or its tokens in a .pt file")
    parser.add_argument("--shape", choices=[*SHAPES, *OTHER_SHAPES])
    parser.add_argument("--layers", type=int, help="of the shape, in place of all")
    parser.add_argument("--lengths", nargs="+", type=tokens_of, required=True, help="such as 128K")
    parser.add_argument("--steps", nargs="+", type=int, default=[6], help="for each length")
    settings = ["dense", "target_recall=0.95"]
    parser.add_argument("--settings", nargs="+", default=settings)
    parser.add_argument("--offload", action="store_true", help="keep activations on the host")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    lengths = options.lengths
    steps = options.steps * len(lengths) if len(options.steps) == 1 else options.steps
    source = model_of(options)
    tokens = tokens_from(options, max(lengths) * 2 + 1)
    for length, count in zip(lengths, steps):
        for setting in options.settings:
            row = run(options, copy.deepcopy(source), tokens, length, setting, count)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                row["liger"] = record.installed("liger-kernel")
                row["transformers"] = record.installed("transformers")
                print(row, flush=True)
                record.append(options.output, [row])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
