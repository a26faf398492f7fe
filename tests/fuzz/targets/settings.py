# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Options, words of the command line, and settings files."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path

from megatron_mtraining import ConfigError, MTrainingConfig
from megatron_mtraining.config import settings_file
from megatron_mtraining.megatron import options as command_line_options

from .common import Fault, Refused

LAYERS, HEADS, SEQUENCE = 4, 4, 4096


def options(values: dict, place: Path) -> None:
    """Flat options, as ``MTrainingConfig.from_options`` takes them."""
    config = MTrainingConfig.from_options(**values)
    if MTrainingConfig.from_options(**config.options()) != config:
        raise Fault("options() is not the inverse of from_options()")
    MTrainingConfig.for_sequence(SEQUENCE, **values)


def command_line(words: list[str], place: Path) -> None:
    """Words of Megatron's command line."""
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py")
    command_line_options.add_arguments(parser)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            args = parser.parse_args(words)
    except SystemExit as end:
        if end.code == 0:  # --help
            return
        last = errors.getvalue().splitlines()[-1]
        if end.code != 2 or not last.startswith("pretrain_gpt.py: error: "):
            raise Fault(f"exit status {end.code}: {last!r}") from None
        raise Refused(last) from None
    args.seq_length = SEQUENCE
    command_line_options.config_from_args(args)


def _settings(data: bytes, file: Path) -> None:
    file.write_bytes(data)
    args = argparse.Namespace(seq_length=SEQUENCE, mtraining_settings=str(file))
    try:
        config = command_line_options.config_from_args(args)
        settings_file.check_settings_file(config, LAYERS, HEADS)
        for layer in range(LAYERS):
            policies = settings_file.head_policies(config, layer, LAYERS, HEADS)
            if policies is not None and len(policies) != HEADS:
                raise Fault(f"layer {layer} has {len(policies)} policies")
    except ConfigError as error:
        # Values of the whole run are refused by the name of their option, as on the command line.
        if str(file) not in str(error) and "--mtraining-" not in str(error):
            raise Fault(f"neither file nor option is named: {error}") from None
        raise


def settings_json(data: bytes, place: Path) -> None:
    _settings(data, place / "settings.json")


def settings_yaml(data: bytes, place: Path) -> None:
    _settings(data, place / "settings.yaml")


SETTINGS = (
    {"price": 0.31, "layers": {"0": {"dense": True}, "3": {"price": 0.2, "heads": {"3": {"dense": True}}}}},
    {"price": 0.4, "schedule": "0:1.2,0.9:0.3,0.9:0", "layers": {"1": {"heads": {"0": {"price": 0.1}}}}},
    {"target_recall": 0.9, "layers": {"1": {"target_recall": 0.99, "heads": {"0": {"price": 0.5}}}}},
    {"policy": "xattention", "layers": {"0": {"policy": "fixed", "vertical": 100, "slash": 10}}},
    {"vertical": 100, "slash": 10, "window": 64, "sink": 0, "layers": {"2": {"coverage": 0.5}}},
    [{str(h): ["vertical_and_slash", 30, 800, 1] for h in range(HEADS)}] * LAYERS,
    [{str(h): ["flex_vertical_and_slash", [0.9, 30], [0.9, 80], 1] for h in range(HEADS)}] * LAYERS,
)  # fmt: skip


def settings_json_seeds() -> list[bytes]:
    return [json.dumps(each).encode() for each in SETTINGS]


def settings_yaml_seeds() -> list[bytes]:
    import yaml

    seeds = [yaml.safe_dump(each).encode() for each in SETTINGS]
    return [*seeds, b"layers:\n  0: &a {price: 0.2}\n  1: {<<: *a, price: .5}\n  2: *a\n"]
