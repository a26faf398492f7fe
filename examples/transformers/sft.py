# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Fine-tune a chat model on conversations by TRL, packed, with a loss for what the assistant says."""

from __future__ import annotations

import os
import sys

import torch
from shared import (
    check_devices,
    checkpoint_of,
    config_of,
    keep_bf16_between_layers,
    load_model,
    micro_batches,
    parser_of,
    rows_of,
    save,
    settings_of,
    start,
    tokenizer_of,
    training,
)
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template

from megatron_mtraining import ConfigError
from megatron_mtraining.transformers import configure


def options_parser():
    parser = parser_of(__doc__, "conversations, in the column 'messages'")
    parser.add_argument(
        "--lora",
        type=int,
        default=16,
        metavar="R",
        help="rank of LoRA's adapters; 0 trains all weights",
    )
    return parser


def adapters(rank: int):
    if not rank:
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("--lora needs peft: pip install peft, or give --lora 0") from None
    return LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )


def check_template(tokenizer, model: str) -> None:
    """The loss is for tokens that the chat template has between its marks of generation."""
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {model} has no chat template: give a chat model")
    try:
        get_training_chat_template(tokenizer)
    except ValueError:
        raise ConfigError(
            f"the chat template of {model} has no {{% generation %}} around what the assistant says, and TRL "
            "knows no such form of it: add it to the template (README.md)"
        ) from None


def train(options) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.lora < 0:
        raise ConfigError(f"--lora is {options.lora}: give a rank, or 0")
    if options.lora and options.rope_factor is not None:
        raise ConfigError(
            "--rope-factor is given with --lora, whose adapters do not keep the model's positions: extend "
            "the model by finetune.py first, or give --lora 0"
        )
    settings, checkpoint, config = settings_of(options), checkpoint_of(options), config_of(options)
    peft_config, saved = adapters(options.lora), config.dtype or torch.float32
    tokenizer = tokenizer_of(options.model)
    check_template(tokenizer, options.model)
    # TRL cuts conversations that are longer than a sequence, and divides none over two.
    arguments = SFTConfig(
        **training(options, micro_batches(options, world)),
        max_length=options.length, packing=True, assistant_only_loss=True,
    )  # fmt: skip
    check_devices(arguments)
    with arguments.main_process_first(desc="reading the data"):
        conversations = rows_of(options.data, "messages")
    # Without a gradient, the model's own weights need not be float32.
    is_frozen = peft_config is not None and torch.cuda.is_available()
    dtype = torch.bfloat16 if is_frozen else torch.float32
    model = load_model(options, config, "mtraining", dtype)
    keep_bf16_between_layers(model)
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=conversations,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    configure(trainer.model, settings)
    trainer.train(resume_from_checkpoint=checkpoint)
    save(trainer, saved if peft_config is None else None)


def main(words=None) -> None:
    start(options_parser(), words, train)


if __name__ == "__main__":
    main(sys.argv[1:])
