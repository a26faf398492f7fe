# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What finetune.py and sft.py have in common: options, the data's rows, and a model with enough positions."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from megatron_mtraining import ConfigError, MTrainingConfig

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
ON_HUB = r"\w[\w.-]*(/\w[\w.-]*)?"
"""Names of data sets on the Hugging Face Hub, with their owner or without."""
UNITS = {"": 1, "K": 1024, "M": 1024**2}


def tokens(words: str) -> int:
    """A number of tokens: 131072, 128K or 1M."""
    found = re.fullmatch(r"([1-9]\d*)([KM]?)", words.upper())
    if not found:
        raise argparse.ArgumentTypeError(
            f"{words!r} is no number of tokens such as 32768, 128K or 1M"
        )
    return int(found[1]) * UNITS[found[2]]


def positive(words: str) -> int:
    if not words.isdigit() or int(words) < 1:
        raise argparse.ArgumentTypeError(f"{words!r} is no number above 0")
    return int(words)


def parser_of(description: str, data: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    # Without a default there is nothing to show: argparse would print "None".
    add, hidden = parser.add_argument, argparse.SUPPRESS
    add("model", help="folder, or name on the Hugging Face Hub")
    add("data", help=f"{data}: .jsonl, .parquet, a folder, or the name of a dataset on the Hub")
    add(
        "--output",
        required=True,
        default=hidden,
        help="folder of checkpoints and the trained model",
    )
    add(
        "--length",
        type=tokens,
        default="32K",
        help="tokens of a sequence, such as 32768, 128K or 1M",
    )
    add(
        "--rope-factor",
        type=float,
        default=hidden,
        help="extend the model's positions by YaRN, such as 4",
    )
    add(
        "--target-recall",
        type=float,
        default=0.95,
        help="attention mass that each head should keep",
    )
    add("--steps", type=positive, default=1000, help="optimizer steps")
    add(
        "--batch",
        type=positive,
        default=hidden,
        help="sequences of a step (default: one of each group)",
    )
    add("--learning-rate", type=float, default=1e-5, help="the highest, after the warm-up")
    add("--save-steps", type=positive, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    add(
        "--report-to",
        choices=("none", "tensorboard", "wandb"),
        default="none",
        help="also log there",
    )
    parser.set_defaults(rope_factor=None, batch=None)
    return parser


def start(parser: argparse.ArgumentParser, words, train) -> None:
    """Run ``train(options)``; what is wrong with them ends it as argparse ends a run."""
    options = parser.parse_args(words)
    try:
        train(options)
    except ConfigError as error:
        parser.error(str(error))


def settings_of(options: argparse.Namespace) -> MTrainingConfig:
    try:
        return MTrainingConfig.from_options(target_recall=options.target_recall)
    except ConfigError as error:  # names Megatron's option
        raise ConfigError(str(error).replace("--mtraining-", "--")) from error


def checkpoint_of(options: argparse.Namespace) -> str | None:
    """The checkpoint to go on from. A run never goes over another's checkpoints."""
    folder = options.output
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if options.resume and last is None:
        raise ConfigError(f"there is no checkpoint in {folder}: leave --resume out")
    if last is not None and not options.resume:
        raise ConfigError(f"there is {last}: give --resume to go on from it, or another --output")
    return last


def micro_batches(options: argparse.Namespace, groups: int) -> int:
    """Sequences that each group of ranks trains on in a step, one after the other."""
    batch = options.batch or groups
    if batch % groups:
        raise ConfigError(f"--batch is {batch}: give a multiple of the {groups} groups of ranks")
    return batch // groups


def training(options: argparse.Namespace, accumulated: int) -> dict:
    """Arguments of either trainer."""
    has_gpu = torch.cuda.is_available()
    names = TrainingArguments.__dataclass_fields__  # transformers renames it
    recomputation = "activation_checkpointing"
    if recomputation not in names:
        recomputation = "gradient_checkpointing"
    return {recomputation: True, f"{recomputation}_kwargs": dict(use_reentrant=False)} | dict(
        output_dir=options.output, max_steps=options.steps, learning_rate=options.learning_rate,
        per_device_train_batch_size=1, gradient_accumulation_steps=accumulated,
        lr_scheduler_type="cosine", warmup_steps=min(100, options.steps // 10),
        # Weights are float32, or small steps would be lost to rounding; layers compute in bf16.
        bf16=has_gpu, use_cpu=not has_gpu,
        logging_steps=1, report_to=[] if options.report_to == "none" else [options.report_to],
        save_strategy="steps", save_steps=options.save_steps, save_total_limit=2,
        ddp_timeout=6 * 3600,  # the first rank tokenizes, and the others wait
    )  # fmt: skip


def check_devices(arguments) -> None:
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"this process sees {arguments.n_gpu} GPUs: start one process for each by torchrun "
            "--nproc-per-node, or set CUDA_VISIBLE_DEVICES=0"
        )


def rows_of(data: str, column: str) -> Dataset:
    """The rows of a data set that have something in a column.

    Raises:
        ConfigError: there is no such data set; it cannot be read; it has no such rows.
    """
    check_data(data)
    try:
        found = _read(data)
    except (OSError, ValueError, DatasetsError) as error:
        raise ConfigError(
            f"{data} cannot be read as a data set: {_first_line(error.__cause__ or error)}"
        ) from error
    if column not in found.column_names:
        raise ConfigError(f"{data} has no column {column!r}, but {', '.join(found.column_names)}")
    kept = found.select_columns(column).filter(_is_there, input_columns=column, batched=True)
    if not len(kept):
        raise ConfigError(f"{data} has no row with something in {column!r}")
    return kept


def check_data(data: str) -> None:
    """What can be said of a data set without reading it."""
    place = Path(data)
    if place.is_file():
        if _kind(place) is None:
            raise ConfigError(f"{data} ends in none of {', '.join(FORMATS)}")
        if not place.stat().st_size:
            raise ConfigError(f"{data} is empty")
    elif not place.is_dir() and (_kind(place) or not re.fullmatch(ON_HUB, data)):
        raise ConfigError(f"there is no {data}")


def _read(data: str) -> Dataset:
    place = Path(data)
    if place.is_file():
        return _files([place], _kind(place))
    if (place / "state.json").is_file():  # by save_to_disk
        return load_from_disk(data)
    if texts := sorted(place.rglob("*.txt")):
        return _files(texts, "text")
    return load_dataset(data, split="train")


def _files(paths: list[Path], kind: str) -> Dataset:
    # A text is one document, not one for each of its lines.
    more = dict(sample_by="document") if kind == "text" else {}
    return load_dataset(kind, data_files=[str(path) for path in paths], split="train", **more)


def _kind(path: Path) -> str | None:
    """What reads a file, by its name without the end of a compressed one."""
    ends = [end for end in path.suffixes if end not in COMPRESSED]
    return FORMATS.get(ends[-1]) if ends else None


def _is_there(values: list) -> list[bool]:
    return [bool(each) for each in values]


def tokenizer_of(model: str):
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model} has no tokenizer that can be read: {_first_line(error)}"
        ) from error


def config_of(options: argparse.Namespace):
    """The model's configuration, with positions for the length.

    Raises:
        ConfigError: there is no such model; it has too few positions.
    """
    try:
        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{options.model} is no model that can be read: {_first_line(error)}"
        ) from error
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or options.length
    factor = options.rope_factor
    if factor is not None:
        rope = dict(getattr(text, "rope_parameters", None) or {})
        if not factor > 1:
            raise ConfigError(f"--rope-factor is {factor:g}: give a factor above 1")
        if rope.get("rope_type", "scaled by layer") != "default":
            kind = rope.get("rope_type", "none, or one of each kind of layer")
            raise ConfigError(
                f"--rope-factor is given, but {options.model} has rope_type {kind}: leave it out"
            )
        before, positions = positions, int(factor * positions)
        rope |= dict(rope_type="yarn", factor=factor, original_max_position_embeddings=before)
        text.rope_parameters, text.max_position_embeddings = rope, positions
    if options.length > positions:
        least = -(-options.length * (factor or 1) // positions)
        raise ConfigError(
            f"--length is {options.length}, but {options.model} has {positions} positions: give "
            f"--rope-factor {least:g} to extend them, or a shorter length"
        )
    return config


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_model(options: argparse.Namespace, config, attention: str, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(
        options.model, config=config, attn_implementation=attention, dtype=dtype
    )


def save(trainer, dtype: torch.dtype | None = None) -> None:
    """Save what was trained, with the tokenizer, as it is served: of the dtype that it came with, while
    checkpoints have float32, and with a KV cache, which the trainer has switched off."""
    model = trainer.model
    model.config.use_cache = True
    if dtype is not None:
        model.to(dtype)
    trainer.save_model()


def keep_bf16_between_layers(model) -> None:
    """Have layers pass on bf16 values under autocast, as they do under FSDP 2. Embeddings of float32 weights
    would else make them float32, and twice as large in memory."""

    def to_bf16(module, args, out):
        return out.to(torch.bfloat16) if torch.is_autocast_enabled(out.device.type) else out

    model.get_input_embeddings().register_forward_hook(to_bf16)
