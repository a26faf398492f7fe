# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Train all weights of a causal language model on texts, packed to sequences of one length."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from shared import (
    check_devices,
    checkpoint_of,
    config_of,
    keep_bf16_between_layers,
    load_model,
    micro_batches,
    parser_of,
    positive,
    rows_of,
    save,
    settings_of,
    start,
    tokenizer_of,
    training,
)
from torch.autograd.graph import save_on_cpu
from transformers import Trainer, TrainingArguments
from transformers.utils import is_liger_kernel_available

from megatron_mtraining import ConfigError
from megatron_mtraining.transformers import configure
from megatron_mtraining.transformers.trainers import check_versions

IGNORED = -100


def options_parser():
    parser = parser_of(__doc__, "texts, in the column 'text'; a .txt is one")
    parser.add_argument(
        "--dense", action="store_true", help="dense attention (sdpa), to compare with"
    )
    parser.add_argument(
        "--sequence-ranks", type=positive, metavar="N",
        help="ranks of torchrun that share each sequence; with --dense 1 (default: all)",
        default=None,
    )  # fmt: skip
    parser.add_argument(
        "--offload", action="store_true",
        help="keep what layers leave for the backward in the host's memory",
    )  # fmt: skip
    return parser


class Packed(torch.utils.data.Dataset):
    """Documents one after the other, cut to sequences of a length. What is left at the end is dropped.

    Positions start again where a document does, which keeps documents apart in attention.
    """

    def __init__(self, documents, length: int):
        self.documents, self.length = documents, length
        self.ends = np.cumsum(documents["length"], dtype=np.int64)

    def __len__(self):
        return int(self.ends[-1]) // self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        begin, end = i * self.length, (i + 1) * self.length
        first, last = np.searchsorted(self.ends, (begin, end - 1), side="right")
        found, positions = [], []
        for number in range(first, last + 1):
            there = 0 if number == 0 else int(self.ends[number - 1])
            part = slice(max(begin - there, 0), end - there)
            whole = np.asarray(self.documents[number]["input_ids"], dtype=np.int64)
            found.append(torch.from_numpy(whole[part].copy()))
            positions.append(torch.arange(len(found[-1])))
        input_ids, position_ids = torch.cat(found), torch.cat(positions)
        # A document says nothing about the first token of the next.
        labels = input_ids.masked_fill(position_ids == 0, IGNORED)
        return dict(input_ids=input_ids, labels=labels, position_ids=position_ids)


def packed(options, arguments, tokenizer) -> Packed:
    end = tokenizer.eos_token_id

    def tokenize(texts):
        found = tokenizer(texts["text"], return_attention_mask=False, verbose=False)["input_ids"]
        if end is not None:
            found = [ids if ids and ids[-1] == end else [*ids, end] for ids in found]
        return dict(input_ids=found, length=[len(ids) for ids in found])

    with arguments.main_process_first(desc="tokenizing"):  # the others read what it has written
        documents = rows_of(options.data, "text")
        documents = documents.map(tokenize, batched=True, batch_size=100, remove_columns="text")
    made = Packed(documents.with_format("numpy"), options.length)
    if not len(made):
        raise ConfigError(
            f"{options.data} has {made.ends[-1]} tokens, fewer than the {options.length} of --length"
        )
    return made


class TextTrainer(Trainer):
    """Logs tokens per second since the last log, over all GPUs, besides what ``Trainer`` logs.

    Attributes:
        offloads: whether what layers leave for the backward is kept in the host's memory.
    """

    since: tuple[int, float] | None = None
    offloads = False

    def compute_loss(self, *args, **kwargs):
        with save_on_cpu(pin_memory=True) if self.offloads else nullcontext():
            return super().compute_loss(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        if self.since is None:
            self.since = self.state.global_step, time.perf_counter()
        return super().training_step(*args, **kwargs)

    def log(self, logs, start_time=None):
        now = self.state.global_step, time.perf_counter()
        if "loss" in logs and self.since is not None and now[0] > self.since[0]:
            of_step = self.get_total_train_batch_size(self.args) * self.train_dataset.length
            steps, seconds = (b - a for a, b in zip(self.since, now))
            logs["tokens_per_second"] = round(steps * of_step / seconds, 1)
            self.since = now
        super().log(logs, start_time)


def sharing(world: int, ranks: int) -> dict:
    """Arguments for several ranks: weights are divided over all, and a group of ranks shares a sequence."""
    if world == 1:
        return {}
    check_versions()
    from accelerate import ParallelismConfig

    plan = dict(
        version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",  # the model says what its layers are
        state_dict_type="FULL_STATE_DICT",  # or from_pretrained could not read what is saved
        cpu_ram_efficient_loading=True,  # the first rank alone reads the weights
    )
    mesh = ParallelismConfig(cp_size=ranks, dp_shard_size=world // ranks)
    return dict(parallelism_config=mesh, fsdp=True, fsdp_config=plan)


def check_checkpoint(folder: str | None, world: int) -> None:
    """One GPU and several have different files in a checkpoint."""
    if folder is not None and (Path(folder) / "pytorch_model_fsdp.bin").exists() != (world > 1):
        before = "one GPU" if world > 1 else "several GPUs"
        raise ConfigError(
            f"{folder} is of a run on {before}: go on as it began, or start from its weights: give it as the "
            "model, and another --output"
        )


def train(options) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = options.sequence_ranks or (1 if options.dense else world)
    if world % ranks:
        raise ConfigError(
            f"--sequence-ranks is {ranks}, which does not divide the {world} ranks of torchrun"
        )
    if options.dense and ranks > 1:
        raise ConfigError("--dense trains on whole sequences: leave --sequence-ranks out")
    settings, checkpoint, config = settings_of(options), checkpoint_of(options), config_of(options)
    check_checkpoint(checkpoint, world)
    saved = config.dtype or torch.float32
    tokenizer = tokenizer_of(options.model)
    has_gpu = torch.cuda.is_available()
    # Logits of all tokens would take more memory than all else in a long sequence.
    has_liger = has_gpu and is_liger_kernel_available()
    loss_only = dict(fused_linear_cross_entropy=True, cross_entropy=False, rope=False, rms_norm=False,
                     swiglu=False, geglu=False)  # fmt: skip
    arguments = TrainingArguments(
        **training(options, micro_batches(options, world // ranks)), **sharing(world, ranks),
        use_liger_kernel=has_liger, liger_kernel_config=loss_only if has_liger else None,
    )  # fmt: skip
    check_devices(arguments)
    if has_gpu and not has_liger and arguments.process_index == 0:
        print("liger-kernel is not installed: the loss needs the logits of all tokens at once")
    sequences = packed(options, arguments, tokenizer)
    model = load_model(options, config, "sdpa" if options.dense else "mtraining", torch.float32)
    if world == 1:
        keep_bf16_between_layers(model)
    trainer = TextTrainer(model, arguments, train_dataset=sequences, processing_class=tokenizer)
    trainer.offloads = options.offload
    if not options.dense:
        configure(trainer.model, settings, sequence_parallel=trainer if ranks > 1 else None)
    trainer.train(resume_from_checkpoint=checkpoint)
    save(trainer, saved)


def main(words=None) -> None:
    start(options_parser(), words, train)


if __name__ == "__main__":
    main(sys.argv[1:])
