# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""transformers' ``Trainer`` and TRL's ``SFTTrainer``, as docs/transformers.md shows them."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.transformers import configure, state_of, watch
from tests.support.transformers_cases import small_model

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

SEQ = 320
SETTINGS = MTrainingConfig.from_options(target_recall=0.6, block_size=64, window=64)


def arguments(kind, folder, **more):
    return kind(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, seed=1, **more,
    )  # fmt: skip


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_moves_prices_and_logs_the_pattern(tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(1, 97, (8, SEQ), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = small_model()
    configure(model, SETTINGS)
    start = state_of(model).steering.now()
    trainer = Trainer(model, arguments(TrainingArguments, tmp_path), train_dataset=data)
    watch(trainer)
    trainer.train()
    assert state_of(model).steering.step == 2
    assert state_of(model).steering.now() != start
    entries = logged(trainer)
    assert len(entries) == 2
    for entry in entries:
        assert 0 < entry["mtraining_density"] <= 1 and 0 < entry["mtraining_recall"] <= 1


def test_a_trainer_over_several_gpus_of_one_process_is_refused(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = small_model()
    configure(model, SETTINGS)
    trainer = Trainer(model, arguments(TrainingArguments, tmp_path), train_dataset=[])
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match="2 GPUs in one process .*torchrun"):
        watch(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("packing", (False, True), ids=("padded", "packed"))
def test_sft_trainer_pads_or_packs(packing, tmp_path, monkeypatch):
    """Padded batches reach attention without their padding, packed ones as documents."""
    pytest.importorskip("trl", reason="SFTTrainer is TRL's")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from megatron_mtraining.transformers import interface

    found = []
    original = interface.attend

    def spy(query, *args, documents, **kwargs):
        found.append((len(query), documents))
        return original(query, *args, documents=documents, **kwargs)

    monkeypatch.setattr(interface, "attend", spy)
    generator = torch.Generator().manual_seed(3)
    lengths = [300, 150, 90, 260, 310, 40, 120, 280]
    rows = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]
    model = small_model()
    configure(model, SETTINGS)
    options = dict(max_length=SEQ, packing=packing, bf16=False)
    trainer = SFTTrainer(
        model,
        arguments(SFTConfig, tmp_path, **options),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(),
    )
    watch(trainer)
    trainer.train()
    assert all(entry["mtraining_density"] > 0 for entry in logged(trainer))
    if packing:
        assert found and all(documents is not None for _, documents in found)
    else:
        assert {length for length, _ in found} <= set(lengths)
        assert len({length for length, _ in found}) > 2


def tokenizer():
    from tests.support.inspect_cases import byte_tokenizer

    made = byte_tokenizer()
    made.pad_token = made.eos_token = made.convert_ids_to_tokens(0)
    return made
