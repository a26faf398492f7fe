# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""transformers' ``Trainer`` and TRL's ``SFTTrainer``, as docs/transformers.md shows them."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.transformers import configure, state_of
from tests.support.trainer_cases import SEQ, arguments, logged, tokenizer, trainer_of
from tests.support.transformers_cases import small_model

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

SETTINGS = MTrainingConfig.from_options(target_recall=0.6, block_size=64, window=64)


def prices(trainer):
    return torch.tensor(state_of(trainer.model).steering.state())


def test_trainer_moves_prices_keeps_them_and_logs_the_pattern(tmp_path):
    """No call beside configure; a run that was interrupted goes on from the checkpoint's prices."""

    def run(folder, steps, resume=None, target=SETTINGS):
        model = small_model(num_hidden_layers=1)
        # A trainer may come before the settings.
        options = dict(save_strategy="steps", save_steps=1, per_device_train_batch_size=1)
        trainer = trainer_of(model, folder, max_steps=steps, learning_rate=0.0, **options)
        configure(model, target)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole", 2)
    assert state_of(whole.model).steering.step == 2
    entries = logged(whole)
    assert len(entries) == 2
    for entry in entries:
        assert 0 < entry["mtraining_density"] <= 1 and 0 < entry["mtraining_recall"] <= 1
    assert prices(whole).ne(0.25).all()
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    resumed = run(tmp_path / "resumed", 2, checkpoint)
    torch.testing.assert_close(prices(resumed), prices(whole))
    assert state_of(resumed.model).steering.step == 2

    run(tmp_path / "fixed", 1, target=MTrainingConfig.from_options(price=0.0))
    with pytest.warns(UserWarning, match="checkpoint has no prices.* start from 0.25"):
        run(tmp_path / "moved", 2, str(tmp_path / "fixed" / "checkpoint-1"))


@pytest.mark.parametrize("scope", ["head", "model"])
def test_prices_go_on_from_a_checkpoint_as_without_a_stop(scope, tmp_path):
    """Also from the first steps, in which prices move fast. All but the weights is as in the first run."""
    from transformers import TrainerCallback

    settings = MTrainingConfig.from_options(
        target_recall=0.95, target_scope=scope, price=20.0, block_size=64, window=64
    )

    def run(folder, resume=None):
        found = {}

        class Prices(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                pattern = state_of(trainer.model)
                of_layers = [pattern.price(layer, torch.device("cpu")) for layer in range(2)]
                found[state.global_step] = torch.stack(of_layers).tolist()

        model = small_model(num_hidden_layers=2)
        options = dict(save_strategy="steps", save_steps=1, per_device_train_batch_size=1)
        trainer = trainer_of(
            model, folder, max_steps=8, learning_rate=1e-3, callbacks=[Prices()], **options
        )
        configure(model, settings)
        trainer.train(resume_from_checkpoint=resume)
        return found

    whole = run(tmp_path / "whole")
    assert len({str(each) for each in whole.values()}) == 8, "they move in each step"
    for done in (1, 3, 6):
        resumed = run(tmp_path / "resumed", str(tmp_path / "whole" / f"checkpoint-{done}"))
        assert list(resumed) == list(range(done + 1, 9))
        for step, found in resumed.items():
            assert found == whole[step], (done, step)


def test_the_log_has_times_caps_and_the_backward_and_warns_once(tmp_path, recwarn):
    """Times and caps of all logged steps but the first of the process, which compiles."""
    settings = MTrainingConfig.from_options(
        price=0.01, slash_cap=1, block_size=64, window=64, backward_threshold=0.5
    )
    trainer = trainer_of(small_model(num_hidden_layers=1), tmp_path, max_steps=3, learning_rate=0.0)
    configure(trainer.model, settings)
    trainer.train()
    first, *others = logged(trainer)
    assert not any(name.endswith(("_ms", "capped")) for name in first)
    for entry in others:
        assert entry["mtraining_search_ms"] > 0 and entry["mtraining_attention_ms"] > 0
        assert "mtraining_exposed_communication_ms" not in entry
        assert 0 < entry["mtraining_capped"] <= 1 and 0 < entry["mtraining_backward_density"] <= 1
    told = [str(each.message) for each in recwarn if "as a cap lets them" in str(each.message)]
    assert len(told) == 1


def test_a_trainer_without_settings_is_left_alone(tmp_path):
    from megatron_mtraining.transformers.callback import PatternCallback

    trainer = trainer_of(small_model(num_hidden_layers=1), tmp_path, max_steps=1)
    assert isinstance(trainer.callback_handler.callbacks[0], PatternCallback)
    trainer.train()
    assert not any("mtraining" in name for entry in logged(trainer) for name in entry)
    trainer._save_checkpoint(
        trainer.model, trial=None
    )  # of Trainer: needs what callbacks have stored


def test_a_trainer_over_several_gpus_of_one_process_is_refused(tmp_path, monkeypatch):
    from transformers import TrainingArguments

    model = small_model()
    configure(model, SETTINGS)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ConfigError, match="2 GPUs in one process .*torchrun"):
        trainer_of(model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("packing", (False, True), ids=("padded", "packed"))
def test_sft_trainer_pads_or_packs(packing, tmp_path, monkeypatch):
    """Padded batches reach attention without their padding, packed ones as documents."""
    pytest.importorskip("trl", reason="SFTTrainer is TRL's")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from megatron_mtraining.transformers import checkpointing

    found = []
    original = checkpointing.attend

    def spy(query, *args, documents, **kwargs):
        found.append((len(query), documents))
        return original(query, *args, documents=documents, **kwargs)

    monkeypatch.setattr(checkpointing, "attend", spy)
    generator = torch.Generator().manual_seed(3)
    lengths = [300, 150, 90, 260, 310, 40, 120, 280]
    rows = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]
    small_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    by_name = dict(attn_implementation="mtraining", dtype="float32")
    options = dict(max_length=SEQ, packing=packing, bf16=False, model_init_kwargs=by_name)
    trainer = SFTTrainer(
        str(tmp_path / "model"),
        arguments(SFTConfig, tmp_path / "out", **options),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(),
    )
    configure(trainer.model, SETTINGS)
    trainer.train()
    assert state_of(trainer.model).steering.step == 2
    assert all(entry["mtraining_density"] > 0 for entry in logged(trainer))
    if packing:
        assert found and all(documents is not None for _, documents in found)
    else:
        assert {length for length, _ in found} <= set(lengths)
        assert len({length for length, _ in found}) > 2
