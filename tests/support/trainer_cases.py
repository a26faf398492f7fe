# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Trainers of small models, on the CPU."""

from __future__ import annotations

import torch

SEQ = 320


def arguments(kind, folder, **more):
    options = dict(max_steps=2, save_strategy="no", per_device_train_batch_size=2) | more
    return kind(
        output_dir=str(folder), logging_steps=1, report_to=[], use_cpu=True, seed=1, **options
    )


def trainer_of(model, folder, callbacks=(), **more):
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(1, 97, (8, SEQ), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = arguments(TrainingArguments, folder, **more)
    return Trainer(model, options, train_dataset=data, callbacks=[*callbacks])


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def tokenizer():
    from tests.support.inspect_cases import byte_tokenizer

    made = byte_tokenizer()
    made.pad_token = made.eos_token = made.convert_ids_to_tokens(0)
    return made
