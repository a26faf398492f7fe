# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval`` from start to end: open the model, make the data, run, and write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...errors import ConfigError
from ..common.atomic_output import atomic_files
from ..common.digests import digest_of_files
from .kept_samples import FOLDER, KeptSamples, number_kept, samples_folder
from .options import BENCHMARKS, DENSE, SPARSE, Options, add_arguments, options_from

if TYPE_CHECKING:  # --help needs none of it
    from ...models.hugging_face import HuggingFaceModel

__all__ = ["add_arguments", "run", "when_ended"]  # the interface of a subcommand, see tools.cli

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
"""What tells Hugging Face's libraries, as they are imported, to reach no other machine."""


def run(args) -> int:
    """Run a benchmark with parsed arguments; returns the exit status.

    Raises:
        ConfigError: the model, the data or an option cannot work.
    """
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    import torch

    options = options_from(args)
    try:
        evaluate(options)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the memory of {options.device} is not enough ({str(error).splitlines()[0]}); finished samples "
            f"are kept in {options.output}: use smaller --lengths, or --device cpu"
        ) from error
    return 0


def when_ended(args) -> str:
    """What a run has left that was interrupted."""
    kept = number_kept(args.output)
    if not kept:
        return "no sample was finished"
    return f"{kept} samples are kept in {args.output / FOLDER}: the same command goes on from there"


def evaluate(options: Options) -> None:
    """Run a benchmark, print its tables, and write the files.

    Raises:
        ConfigError: see :func:`run`.
    """
    from .model import check_settings, opened, tokenizer_of
    from .results import differences_of, rows_of, summary, write

    with ExitStack() as stack:
        stack.enter_context(samples_folder(options.output))
        source = stack.enter_context(opened(options, max(options.lengths, default=None)))
        check_settings(options, source)
        tokenizer = tokenizer_of(source, options)
        planned = _planned(options, source, tokenizer)
        kept = {
            (each.label, attention): _kept(options, each, attention)
            for each in planned
            for attention in options.attentions
        }
        dtype = str(options.dtype).removeprefix("torch.")
        print(
            f"{options.benchmark} on {source.description}: {' and '.join(options.attentions)} attention, "
            f"{dtype} on {options.device}",
            flush=True,
        )
        samples = _samples(options, source, tokenizer, planned, kept)
        rows, differences = rows_of(samples), differences_of(samples)
        text = summary(rows, differences)
        about = {
            "benchmark": options.benchmark,
            "model": source.description,
            "settings": options.settings,
            "dense_tail": options.dense_tail,
            "yarn": options.yarn,
            "chat": options.chat,
            "dtype": dtype,
            "device": str(options.device),
            "versions": _versions(),
        }
        print(f"\n{text}\n", flush=True)
        with atomic_files(options.output) as folder:
            write(folder, options, about, samples, rows, differences)
    print(f"Numbers and pictures: {options.output.resolve()}")


def _planned(options: Options, source: HuggingFaceModel, tokenizer) -> list:
    """What is to be run, with its data: :class:`.planned.Planned` for each task and length of lm-eval, or
    :class:`.perplexity.Windows` for each length."""
    if options.benchmark == "perplexity":
        from . import perplexity

        return perplexity.planned(options, source, tokenizer)
    if options.benchmark == "needle":
        from . import needle

        return needle.planned(options, tokenizer)
    if options.benchmark != "ruler":
        from . import local_tasks

        return local_tasks.planned(options)
    from . import ruler

    with tempfile.TemporaryDirectory(prefix="mtraining-eval-") as folder:
        tokenizer.save_pretrained(folder)  # lm-eval opens it by its path
        return ruler.planned(options, tokenizer, Path(folder))


def _samples(
    options: Options, source: HuggingFaceModel, tokenizer, planned: list, kept: dict
) -> list[dict]:
    """Run all that is planned, with each attention; the samples' results, by task and length."""
    from .model import AttendingModel

    run: Callable
    if options.benchmark == "perplexity":
        from . import perplexity

        if options.evaluator is not None:
            perplexity.find_keys(*perplexity.evaluator(options), planned, kept, options)
        model = AttendingModel(source.causal_model(), options)
        if options.longppl is not None and options.evaluator is None:
            model.use(DENSE)
            perplexity.find_keys(model.model, None, planned, kept, options)
        run = partial(perplexity.measured, model)
    else:
        from .harness import KeptLM, evaluated

        model = AttendingModel(source.causal_model(), options)
        lm = KeptLM(model, tokenizer, source.shape.positions)
        samples = options.samples * (len(options.depths) or 1)
        run = partial(evaluated, lm, samples=samples, chat=options.chat)
    found: dict = {each.label: [] for each in planned}
    for attention in options.attentions:
        model.use(attention)
        for each in planned:
            where = {"task": each.name, "length": each.length, "attention": attention}
            rows = run(each, kept[each.label, attention], f"{each.title} {attention}")
            found[each.label] += [{**where, **row} for row in rows]
    return [row for rows in found.values() for row in rows]


def _kept(options: Options, planned, attention: str) -> KeptSamples:
    """The samples of what is planned with an attention."""
    from ...models.environment import DTYPES

    def digest(path: Path | None) -> str | None:
        return None if path is None else digest_of_files(path, _written(options.output))

    run = {
        "MODEL": str(options.model.resolve()),
        "the files of MODEL": digest(options.model),
        "the files of --tokenizer": digest(options.tokenizer),
        "the files of --like": digest(options.like),
        "the files of --evaluator": digest(options.evaluator),
        "--yarn": options.yarn,
        "--dtype": next(name for name, each in DTYPES.items() if each == options.dtype),
        "--device": options.device.type,
        "--chat": options.chat,
        **(_settings(options) if attention == SPARSE else {}),
        **planned.data,
        **{f"version of {name}": value for name, value in _versions().items()},
    }
    file = options.output / FOLDER / f"{planned.label}-{attention}.jsonl"
    return KeptSamples(file, run, overwrite=options.overwrite)


def _settings(options: Options) -> dict:
    """What sparse attention depends on, by the names of options."""
    from ...config import OPTIONS

    flags = {each.name: each.flag for each in OPTIONS}
    file = options.config.settings
    return {
        **{flags.get(name, name): value for name, value in options.settings.items()},
        "the file of --settings": None if file is None else digest_of_files(Path(file)),
        "--dense-tail": options.dense_tail,
    }


def _written(output: Path) -> list[Path]:
    """What runs write into an output folder, and the folder: it may be in the model's or be the same, and is
    no part of the model."""
    names = [f"{name}.{kind}" for name in BENCHMARKS for kind in ("json", "png")]
    return [output, *(output / name for name in (FOLDER, ".partial", *names))]


def _versions() -> dict[str, str]:
    found = {"megatron-mtraining": __version__}
    for name in ("lm-eval", "longppl", "transformers", "torch"):
        with suppress(Exception):
            found[name] = version(name)
    return found
