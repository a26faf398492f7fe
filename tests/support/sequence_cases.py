# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Training steps of small transformers models with sequence_parallel, beside those of one process."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, DynamicCache

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.cp_group import RankGroup
from megatron_mtraining.transformers import (
    configure,
    cut_batch,
    state_of,
    take_backward_means,
    take_means,
)
from tests.support.transformers_cases import small_model

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {
    # name, sizes, heads and KV heads
    "llama": ("llama", {}),
    "one KV head": ("llama", dict(num_key_value_heads=1)),
    "six heads, three KV heads": (
        "llama", dict(hidden_size=384, num_attention_heads=6, num_key_value_heads=3),
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(layer_types=[SLIDING, FULL], sliding_window=150, num_local_experts=2,
             num_experts_per_tok=2),
    ),
    "gpt-oss, six heads": (
        "gpt_oss",
        dict(layer_types=[SLIDING, FULL], sliding_window=150, num_local_experts=2,
             num_experts_per_tok=2, hidden_size=384, num_attention_heads=6, num_key_value_heads=3),
    ),
    "Gemma 3": (
        "gemma3_text",
        dict(layer_types=[SLIDING, FULL], sliding_window=150, query_pre_attn_scalar=50),
    ),
}  # fmt: skip
OPTIONS = dict(window=64, block_size=64, sample_strata=8)
SETTINGS = {
    "dense": dict(price=0.0),
    "fixed": dict(vertical=16, slash=4, sink=1, window=64, block_size=64),
    "price": dict(price=1.0, **OPTIONS),
    "target": dict(target_recall=0.8, target_scope="model", **OPTIONS),
    "targets of heads": dict(target_recall=0.8, target_scope="head", **OPTIONS),
    "pruned": dict(price=0.0, block_size=64, backward_threshold=3.0),
}
TOKENS = torch.randint(1, 97, (2, 384), generator=torch.Generator().manual_seed(1))


def batch_of(what: str) -> dict:
    tokens = TOKENS[:, :382] if what == "odd" else TOKENS
    tokens = tokens[:1] if what in ("packed", "one") else tokens
    labels = tokens.clone()
    labels[:, :150] = -100  # the first ranks have few labels, or none
    batch = dict(input_ids=tokens, labels=labels)
    if what == "packed":
        lengths = 130, 20, 234
        batch["position_ids"] = torch.cat([torch.arange(each) for each in lengths])[None]
    if what in ("padded", "padded after"):
        mask = torch.ones_like(tokens)
        mask[0, :70], mask[1, 330:] = int(what == "padded after"), 0
        batch |= dict(attention_mask=mask, labels=labels.masked_fill(mask == 0, -100))
    if what in ("numbered", "seq_idx"):
        numbers = torch.arange(1, 4).repeat_interleave(torch.tensor((130, 20, 234))).expand(2, -1)
        batch["attention_mask" if what == "numbered" else "seq_idx"] = numbers
    return batch


def model_of(kind: str, layers: int):
    name, sizes = KINDS[kind]
    return small_model(name, **{"num_hidden_layers": layers, **sizes})


def train(
    kind: str,
    settings: str | dict,
    what: str,
    steps=1,
    layers=1,
    reentrant=None,
    wrap=None,
    rows=slice(None),
    lora=0,
    group=None,
) -> dict:
    """What a rank of ``group`` finds in some steps, or one process if it is None: losses, the last gradients,
    means and prices.

    Args:
        reentrant: of gradient checkpointing; None for none.
        wrap: ``ddp`` or ``fsdp``, to average gradients by.
        rows: of the batch.
        lora: rank of PEFT's adapters, which alone are trained then.
    """  # fmt: skip
    model = model_of(kind, layers)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        adapters = LoraConfig(r=lora, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, adapters)
    config = SETTINGS[settings] if isinstance(settings, str) else settings
    configure(model, MTrainingConfig.from_options(**config), sequence_parallel=group)
    if reentrant is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    batch = {name: value[rows] for name, value in batch_of(what).items()} | dict(use_cache=False)
    wrapped = model
    if group is None:
        wrap = None
    else:
        batch = cut_batch(batch, group)
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    if wrap == "fsdp":
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = wrapped(**batch).loss
        loss.backward()
        losses.append(average(loss.detach(), group))
        for weight in filter(lambda each: each.requires_grad, model.parameters()):
            if weight.grad is None:  # of an expert that no token here is given to
                weight.grad = torch.zeros_like(weight)
            if wrap is None:
                average(weight.grad, group)
        optimizer.step()
    state_of(model).advance()
    backward = take_backward_means(model)
    return dict(
        loss=torch.stack(losses),
        gradients={
            name: weight.grad.full_tensor() if wrap == "fsdp" else weight.grad
            for name, weight in model.named_parameters() if weight.requires_grad
        },
        means=[*take_means(model), *backward], prices=state_of(model).steering.state(),
        history=state_of(model).steering.history(),
    )  # fmt: skip


def average(value, group):
    if group is not None:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def train_ranks(rank, world, cases):
    """The results of this rank in each case, arguments of :func:`train`."""
    return [train(*case, **more, group=dist.group.WORLD) for *case, more in cases]


def train_groups(rank, world, case):
    """Two groups, each with a row of the batch."""
    group, _ = dist.new_subgroups(world // 2)
    row = rank // (world // 2)
    return train(*case, wrap="ddp", rows=slice(row, row + 1), group=group)


def evaluate(group=None) -> dict:
    """Logits of a cut batch and of a prompt, and an answer, in evaluation mode."""
    model = model_of("gpt-oss", 2).eval()
    config = MTrainingConfig.from_options(**SETTINGS["fixed"])
    configure(model, config, dense_tail=40, sequence_parallel=group)
    batch = dict(batch_of("one"), use_cache=False)
    if group is not None:
        batch = cut_batch(batch, group)
    with torch.no_grad():
        out = model(**batch)
        logits = out.logits
        if group is not None:
            logits = torch.cat([*RankGroup(group).all_gather(logits)], 1)
        means = take_means(model, training=False)
        # prompts of their own length on each rank
        length = 300 + 20 * (0 if group is None else dist.get_rank(group))
        prompt = TOKENS[:1, :length]
        answer = model.generate(prompt, max_new_tokens=4, do_sample=False)[:, length:]
    return dict(
        loss=average(out.loss, group), logits=logits, answer=answer, density=means.density,
        length=length,
    )  # fmt: skip


def evaluate_ranks(rank, world):
    return evaluate(dist.group.WORLD)


def run_page(rank, world, code, model):
    """Run a page's lines for ``torchrun`` in a group that is there already, on the CPU. Returns the model's
    parameters and prices."""
    for shown, here in (
        ('dist.init_process_group("nccl")', ""), ("torch.cuda.set_device(dist.get_node_local_rank())", ""),
        (".cuda()", ""), ("Qwen2.5-0.5B", model),
    ):  # fmt: skip
        assert code.count(shown) == 1, shown
        code = code.replace(shown, here)
    names = dict(
        globals(), AutoModelForCausalLM=AutoModelForCausalLM, batches=[batch_of("one")] * 2
    )
    exec(code, names)
    model = names["model"]
    state_of(model).advance()
    return [weight.detach() for weight in model.parameters()], state_of(model).steering.state()


def _refused(call) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing"


def refusals_of_a_ring(rank, world):
    """What forwards are told with a dense tail, and with padding before the tokens."""
    model = model_of("six heads, three KV heads", 1).eval()
    config = MTrainingConfig.from_options(**SETTINGS["fixed"])
    configure(model, config, dense_tail=40, sequence_parallel=dist.group.WORLD)
    batches = [cut_batch(batch_of(what), dist.group.WORLD) for what in ("one", "padded")]
    return [_refused(partial(model, **batch)) for batch in batches]


def refusals(rank, world):
    """By name of the case, what this rank is told."""
    group = dist.group.WORLD

    def forward(settings="dense", train=True, change=None, **more):
        model = model_of("llama", 1).train(train)
        config = MTrainingConfig.from_options(**SETTINGS[settings])
        configure(model, config, sequence_parallel=group)
        cut = cut_batch(batch_of("one"), group) | more
        if change is not None:
            change(cut)
        return lambda: model(**cut)

    def shorten(cut):
        for name in ("input_ids", "position_ids", "labels", "shift_labels"):
            cut[name] = cut[name][:, : 192 - 10 * rank]

    def without_positions(cut):
        del cut["position_ids"]

    def without_positions_on_one(cut):
        if rank:
            without_positions(cut)

    def skip(cut):
        cut["position_ids"] = cut["position_ids"] + 5 * (rank == 1)

    def go_on():
        forward(use_cache=True, past_key_values=filled_cache())()

    def filled_cache():
        cache = DynamicCache()
        keys = torch.zeros(1, 2, 8, 64)
        cache.update(keys, keys, 0)
        return cache

    def configured(model, ranks=group):
        return lambda: configure(model, MTrainingConfig(), sequence_parallel=ranks)

    other = dict(batch_of("one"))
    other["input_ids"] = other["input_ids"] + rank % 2
    linear = small_model(
        "qwen3_5_text", layer_types=["linear_attention", FULL], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    ends = torch.tensor([0, 384], dtype=torch.int32)
    cases = {
        "group": configured(model_of("llama", 1), 2),
        "linear attention": configured(linear),
        "rope": configured(small_model("llama", rope_parameters=rope)),
        "tokens counted": configured(small_model("llama", attn_temperature_tuning=True)),
        "settings": forward("fixed" if rank else "dense"),
        "lengths": forward(change=shorten),
        "no positions": forward(change=without_positions),
        "no positions on one rank": forward(change=without_positions_on_one),
        "positions that skip": forward(change=skip),
        "ends": forward(cu_seq_lens_q=ends, cu_seq_lens_k=ends),
        "cache": go_on,
        "another batch": lambda: cut_batch(other, group),
        "another length": lambda: cut_batch(dict(input_ids=TOKENS[:, : 300 + rank]), group),
        "not of tokens": lambda: cut_batch(dict(input_ids=TOKENS, cu_seq_lens_q=ends), group),
        "no tokens": lambda: cut_batch(dict(labels=TOKENS), group),
        "too few": lambda: cut_batch(dict(input_ids=TOKENS, labels=TOKENS[:, 1:]), group),
    }
    return {name: _refused(call) for name, call in cases.items()}
