# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options of ``mtraining inspect``, checked before a model is read."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import ConfigError, MTrainingConfig
from ...requirements import require
from ..common.atomic_output import refuse_to_replace_input
from ..common.model_options import add_model_arguments, check_model_arguments

if TYPE_CHECKING:  # --help needs none of it
    import torch

ROWS = 512
"""Default number of query rows that patterns are evaluated on."""
SETTINGS = "settings.json"
"""The file of settings in the output folder, if no other is named."""
PAGE = "inspect.html"
FILES = (
    PAGE,
    "results.json",
    "summary.txt",
    "recall_density.png",
    "density_needed.png",
    "head_easiest.png",
    "head_middle.png",
    "head_hardest.png",
)
"""What else is written there; and the heads of --head."""


@dataclass(frozen=True)
class Options:
    """One run of ``mtraining inspect``.

    Attributes:
        seq_length: None for as many tokens as the text and the model have.
        rows: None for :data:`ROWS`, or as many as there are.
        layers: how many layers to measure, or which; None for all.
        policies: None for all.
        sensitivity: "layers" or "heads" to measure the sensitivity of each, or None.
        heads: (layer, head) of further heads to draw.
        base: options of MTrainingConfig that all settings have, without those left at their default.
        settings: the file of recommended settings, in ``output`` or elsewhere.
        overwrite: replace the results of an earlier run, and that file.
    """

    model: Path
    text: list[Path]
    tokenizer: Path | None
    seq_length: int | None
    yarn: float | None
    target_recall: float
    rows: int | None
    layers: int | tuple[int, ...] | None
    policies: list[str] | None
    sensitivity: str | None
    heads: list[tuple[int, int]]
    base: dict
    device: torch.device
    dtype: torch.dtype
    output: Path
    settings: Path
    overwrite: bool

    def measured_layers(self, total: int) -> list[int]:
        """The layers to measure, ascending, of a model with ``total``.

        Raises:
            ConfigError: the model has fewer, or a head of --head is in another.
        """
        if self.layers is None:
            layers = list(range(total))
        elif isinstance(self.layers, int):
            if self.layers > total:
                raise ConfigError(
                    f"--layers is {self.layers}, but MODEL has {total} layers: use at most {total}, or all"
                )
            count = self.layers  # from the first to the last
            layers = [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]
        else:
            layers = sorted(self.layers)
            if layers[-1] >= total:
                raise ConfigError(
                    f"--layers has {layers[-1]}, but MODEL has {total} layers, counted from 0"
                )
        for layer, head in self.heads:
            if layer < total and layer not in layers:
                raise ConfigError(
                    f"--head is {layer}:{head}, but layer {layer} is not among --layers "
                    f"({', '.join(map(str, layers))}): add it there"
                )
        return layers

    @property
    def files(self) -> list[str]:
        """Names of the files in ``output``, without the settings where they have a name of their own."""
        drawn = [f"head_layer{layer}_head{head}.png" for layer, head in self.heads]
        own = self.settings != self.output / SETTINGS
        return [*FILES, *drawn, *([] if own else [SETTINGS])]

    @property
    def block_size(self) -> int:
        return MTrainingConfig.from_options(**self.base).block_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    add = parser.add_argument
    add_model_arguments(
        parser,
        tokenizer="a Hugging Face folder, a .gguf file or a sentencepiece .model (the model's own)",
        dtype="dtype of the model (bf16 if the device computes in it; float32 with --sensitivity)",
    )
    what = "UTF-8 text (several files are concatenated), or token ids: .npy, or Megatron's .bin"
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help=what)
    what = "number of tokens (the whole text, up to the model's positions)"
    add("--seq", dest="seq_length", type=int, metavar="N", help=what)
    what = "fraction of the attention mass that patterns must hold (%(default)s)"
    add("--target-recall", type=float, default=0.95, metavar="FRACTION", help=what)
    add("--rows", type=int, help=f"query rows that patterns are evaluated on (at most {ROWS})")
    what = "number of layers to measure, evenly spaced; or a list, counted from 0: 3,9,14 (all)"
    add("--layers", default="all", metavar="COUNT", help=what)
    what = "policies to try, or all (all on a GPU; price on a CPU)"
    add("--policy", dest="policies", nargs="+", metavar="NAME", help=what)
    what = (
        "measure how much predictions depend on each layer or head, and set its target recall by it"
    )
    add("--sensitivity", choices=("layers", "heads"), help=what)
    what = "also draw this head, counted from 0; may be repeated"
    add("--head", dest="heads", action="append", default=[], metavar="LAYER:HEAD", help=what)
    add("--window", type=int, help="local window of all settings, in tokens")
    add("--block-size", type=int, help="block size of all settings: 64 or 128")
    what = "folder for the page, pictures, numbers and settings (%(default)s)"
    add("--output", type=Path, default=Path("inspect-out"), metavar="FOLDER", help=what)
    what = "file for the recommended settings: YAML if it ends in .yaml, else JSON (FOLDER/settings.json)"
    add("--settings", type=Path, metavar="FILE", help=what)
    what = "replace an earlier run's files in the output folder, and the file of --settings"
    add("--overwrite", action="store_true", help=what)


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value that cannot work, or a package that is missing.
    """
    import torch

    from ...models.environment import DTYPES, default_dtype, device_of

    require("matplotlib", "tqdm", extra="inspect")
    check_model_arguments(values)
    given = {"window": values.window, "block_size": values.block_size}
    base = {name: value for name, value in given.items() if value is not None}
    _check_numbers(values, base)
    device = device_of(values.device)
    settings = settings_path(values)
    if settings.suffix in (".yaml", ".yml"):
        require("yaml", extra="inspect")
    if settings.is_dir() or (values.settings and not settings.parent.is_dir()):
        raise ConfigError(f"--settings is {settings}: name a file in a folder that exists")
    read = [*values.text, *filter(None, [values.tokenizer])]
    if values.settings:
        refuse_to_replace_input("--settings", settings, [values.model, *read])
        if settings.name in FILES and _same_folder(settings.parent, values.output):
            raise ConfigError(
                f"--settings is {settings}, which is the name of a file of --output: name another"
            )
    for name in (*FILES, SETTINGS):
        refuse_to_replace_input("--output", values.output / name, read)
    if values.dtype is not None:
        dtype = DTYPES[values.dtype]
    else:  # rounding to bf16 moves predictions as far as sparse attention in one layer does
        dtype = torch.float32 if values.sensitivity else default_dtype(device)
    fields = {
        name: value for name, value in vars(values).items() if name in Options.__annotations__
    }
    heads = [_head(word) for word in values.heads]
    layers = _layers(values.layers)
    if layers is not None and values.sensitivity is not None:
        raise ConfigError(
            f"--layers is {values.layers}, but --sensitivity measures all layers: leave one of them out"
        )
    policies = values.policies
    if policies is None and device.type == "cpu":
        policies = ["price"]
    elif policies == ["all"]:
        policies = None
    fields |= dict(
        base=base, heads=heads, layers=layers, policies=policies, device=device, dtype=dtype,
        settings=settings,
    )  # fmt: skip
    return Options(**fields)


def settings_path(values: argparse.Namespace) -> Path:
    """Where the settings file goes."""
    return values.settings or values.output / SETTINGS


def _same_folder(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _check_numbers(values: argparse.Namespace, base: dict) -> None:
    if not 0 < values.target_recall < 1:
        raise ConfigError(
            f"--target-recall is {values.target_recall:g}: use a fraction between 0 and 1, such as 0.95"
        )
    for name, value in {"--rows": values.rows, "--seq": values.seq_length}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: use 1 or more")
    try:
        MTrainingConfig.from_options(**base)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--mtraining-", "--")) from None


def _head(word: str) -> tuple[int, int]:
    layer, _, head = word.partition(":")
    if not all(re.fullmatch("[0-9]{1,9}", each) for each in (layer, head)):
        raise ConfigError(f"--head is {word}: use LAYER:HEAD, counted from 0, such as 3:5")
    return int(layer), int(head)


def _layers(word: str) -> int | tuple[int, ...] | None:
    if word == "all":
        return None
    if re.fullmatch("[0-9]{1,9}", word) and int(word) >= 1:
        return int(word)
    numbers = word.removesuffix(",").split(",")
    if "," in word and all(re.fullmatch("[0-9]{1,9}", each) for each in numbers):
        return tuple(sorted({int(each) for each in numbers}))
    raise ConfigError(
        f"--layers is {word}: use how many, such as 8, or which, counted from 0 with commas: 3,9,14 "
        "(a single one: 3,), or all"
    )
