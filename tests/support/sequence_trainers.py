# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Runs of ``Trainer`` whose ranks have parts of the sequences, on the CPU."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.transformers import configure, state_of
from tests.support.sequence_cases import SETTINGS, TOKENS
from tests.support.transformers_cases import small_model


class Texts(torch.utils.data.Dataset):
    """Sequences whose labels are unevenly distributed over ranks."""

    def __init__(self, lengths):
        self.lengths = lengths  # of packed sequences; None for no positions

    def __len__(self):
        return 4

    def __getitem__(self, i):
        tokens = TOKENS[i % 2].roll(7 * i)
        found = dict(input_ids=tokens, labels=tokens.clone())
        found["labels"][: 90 * i] = -100
        if self.lengths:
            found["position_ids"] = torch.cat([torch.arange(each) for each in self.lengths])
        return found


def allow_cpu() -> None:
    """Have accelerate share sequences with gloo's ranks on the CPU, as it does not by itself."""
    state = accelerate_state.PartialState
    state._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    state.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    state.wait_for_everyone = lambda self: dist.barrier()


def trainer_of(folder, model, world: int = 1, **more) -> Trainer:
    if world > 1:
        allow_cpu()
        layer = f"{type(model).__name__.removesuffix('ForCausalLM')}DecoderLayer"
        plan = dict(
            version=2,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_layer_cls_to_wrap=[layer],
        )
        plan["state_dict_type"] = "FULL_STATE_DICT"
        more |= dict(
            parallelism_config=ParallelismConfig(cp_size=world), fsdp=True, fsdp_config=plan
        )
    texts = Texts(more.pop("lengths", None))
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=1,
        report_to=[], learning_rate=1e-3, seed=5, use_cpu=True, **more,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=texts, eval_dataset=texts)


def train(folder, settings: str, world: int = 1, resume=None, **more) -> dict:
    """What the log of a run has, its prices, and what an evaluation after it finds."""
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
    model = small_model("llama", num_hidden_layers=2)
    model.set_attn_implementation("mtraining")
    trainer = trainer_of(folder, model, world, **more)
    config = MTrainingConfig.from_options(**SETTINGS[settings])
    configure(trainer.model, config, sequence_parallel=trainer if world > 1 else None)
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "mtraining_density", "mtraining_recall")
    log = [[each[name] for name in names] for each in trainer.state.log_history if "loss" in each]
    batch = {name: value[None] for name, value in trainer.eval_dataset[3].items()}
    with torch.no_grad():  # as TRL evaluates: whole sequences, and no number of labels
        of_batch = trainer.compute_loss(trainer.model.eval(), batch)
    return dict(
        log=torch.tensor(log), prices=torch.tensor(state_of(model).steering.state() or 0.0),
        of_batch=of_batch, evaluated=torch.tensor(trainer.evaluate()["eval_loss"]),
        generated=trainer.model.eval().generate(TOKENS[:1], max_new_tokens=2, do_sample=False),
    )  # fmt: skip


def train_zero(rank, world, folder, attention: str) -> list[list[float]]:
    """Losses and gradient norms of a run of DeepSpeed's ZeRO 3 and its loader of cut batches."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from deepspeed import comm

    ranks = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ |= {name: str(value) for name, value in ranks.items()}
    comm.init_distributed("gloo", auto_mpi_discovery=False)  # accelerate does so on GPUs
    model = small_model("llama", num_hidden_layers=2)
    model.set_attn_implementation(attention)
    handler = DeepSpeedSequenceParallelConfig(
        sp_attn_implementation="sdpa", sp_seq_length_is_variable=True
    )
    by_itself = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    plan = dict.fromkeys(by_itself, "auto") | dict(zero_optimization=dict(stage=3))
    trainer = trainer_of(
        folder, model, lengths=[384], max_steps=2, deepspeed=plan | dict(zero_allow_untested_optimizer=True),
        parallelism_config=ParallelismConfig(
            sp_size=world, sp_backend="deepspeed", sp_handler=handler
        ),
    )  # fmt: skip
    if attention == "mtraining":
        for settings in ("price", "dense"):
            config = MTrainingConfig.from_options(**SETTINGS[settings])
            configure(trainer.model, config, sequence_parallel=trainer)
    trainer.train()
    return [
        [each["loss"], each["grad_norm"]] for each in trainer.state.log_history if "loss" in each
    ]


def train_ranks(rank, world, cases):
    return [train(*case, world=world, **more) for *case, more in cases]


def told_of_predictions(rank, world, folder):
    trainer = trainer_of(folder, small_model("llama"), world, max_steps=1)
    configure(trainer.model, sequence_parallel=trainer)
    trainer.train()
    try:
        trainer.predict(trainer.eval_dataset)
    except ConfigError as error:
        return str(error)


def told_of_a_loss(rank, world, folder):
    """What trainers are told whose loss is not the model's."""
    told = []
    for changes in (dict(label_smoothing_factor=0.1), {}):
        model = small_model("llama")
        trainer = trainer_of(folder, model, world, **changes)
        trainer.compute_loss_func = None if changes else print
        try:
            configure(trainer.model, sequence_parallel=trainer)
        except ConfigError as error:
            told.append(str(error))
    return told


def told_at_the_start(rank, world, folder):
    """What a run is told whose model attends to the tokens of its own rank."""
    model = small_model("llama")
    model.set_attn_implementation("mtraining")
    try:
        trainer_of(folder, model, world, max_steps=1).train()
    except ConfigError as error:
        return str(error)
