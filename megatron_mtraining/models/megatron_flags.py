# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A GPTModel as pretrain_gpt.py builds it from flags: by Megatron-LM's own parser and model builder."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import torch

from ..errors import ConfigError
from ..megatron.cpu import ARGUMENTS
from ..requirements import first_line
from .types import ModelOptions

RUN = "--micro-batch-size 1 --seq-length 1 --tokenizer-type NullTokenizer".split()
"""What Megatron-LM's validation asks of a run beside its model."""
DTYPES = {torch.float32: [], torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}


def megatron_training() -> str | None:
    """The version of the Megatron-LM whose ``megatron.training`` can be imported, or None."""
    try:
        importlib.import_module("megatron.training.arguments")
    except ImportError:
        return None
    return importlib.import_module("megatron.core").__version__


def build_from_flags(
    flags: list[str], options: ModelOptions, prepare: Callable[[object], None] | None
):
    """A GPTModel with an output layer, on the device, its weights not initialised.

    Args:
        flags: Megatron-LM's command-line flags for the model.
        prepare: called with the TransformerConfig before the model is built.

    Raises:
        ConfigError: this Megatron-LM does not know a flag, or cannot build the model.
    """
    from megatron.training import arguments, global_vars

    cpu = [word for item in ARGUMENTS.items() for word in item if word is not None]
    words = [sys.argv[0], *flags, *RUN, *DTYPES[options.dtype], *cpu]
    said = io.StringIO()
    root = str(Path(arguments.__file__).parents[2])  # of the checkout, which has gpt_builders.py
    try:
        with (
            redirect_stdout(said),
            redirect_stderr(said),
            mock.patch.object(sys, "argv", words),
            mock.patch.object(sys, "path", [*sys.path, root]),
        ):
            args = arguments.parse_args()
            arguments.validate_args(args)
            config = arguments.core_transformer_config_from_args(args)
            config.perform_initialization = False
            if prepare is not None:
                prepare(config)
            with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
                model = _build(args, config)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = (said.getvalue().strip() if isinstance(error, SystemExit) else "") or first_line(
            error
        )
        raise ConfigError(
            f"Megatron-LM {megatron_training()} does not build a model of the flags of {options.label}: "
            f"{reason.splitlines()[-1]}"
        ) from error
    return model.to(options.device).eval()


def _build(args, config):
    """What pretrain_gpt.py does, in 0.19 and later and before."""
    try:
        from megatron.training.argument_utils import gpt_config_from_args
        from megatron.training.models.gpt import GPTModelBuilder
    except ImportError:
        builder = importlib.import_module("gpt_builders").gpt_builder
        return builder(args, pre_process=True, post_process=True, config=config)
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(gpt_config_from_args(args, config)).build_model(groups, True, True)
