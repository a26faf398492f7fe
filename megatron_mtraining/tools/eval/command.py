# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval`` from start to end: open the model, make the data, run, and write."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...errors import ConfigError
from ..common.atomic_output import atomic_files, locked_folder
from ..common.digests import digest_of_files
from .kept_samples import FOLDER, KeptSamples, number_kept, remove_if_unused
from .offline import no_network
from .options import BENCHMARKS, CONVERTED, DENSE, SPARSE, Options, add_arguments, options_from

if TYPE_CHECKING:  # --help needs none of it
    from ...models.hugging_face import HuggingFaceModel

__all__ = ["add_arguments", "run", "when_ended"]  # the interface of a subcommand, see tools.cli


def run(args) -> int:
    """Run a benchmark with parsed arguments; returns the exit status.

    Raises:
        ConfigError: the model, the data or an option cannot work.
    """
    with no_network():
        import torch

        options = options_from(args)
        try:
            evaluate(options)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the memory of {options.device} is not enough ({str(error).splitlines()[0]}); finished "
                f"samples are kept in {options.output}: use smaller --lengths, or --device cpu"
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
        stack.enter_context(_output(options.output))
        source = stack.enter_context(opened(options, max(options.lengths, default=None)))
        check_settings(options, source)
        tokenizer = tokenizer_of(source, options)
        benchmark = _Perplexity if options.benchmark == "perplexity" else _Harness
        planned = benchmark(options, source, tokenizer)
        dtype = str(options.dtype).removeprefix("torch.")
        print(
            f"{options.benchmark} on {source.description}: {' and '.join(options.attentions)} attention, "
            f"{dtype} on {options.device}",
            flush=True,
        )
        samples = planned.samples()
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


@contextmanager
def _output(folder: Path) -> Iterator[None]:
    """The output folder, with the locked folder of samples in it; those that are made here are removed again
    if the context fails before anything is written there."""
    samples = folder / FOLDER
    made = [path for path in (samples, folder) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked_folder(samples, "--output"):
            try:
                yield
            except BaseException:
                # Under the lock alone: without it the files are another run's, or the user's own.
                with suppress(OSError):
                    remove_if_unused(samples)
                raise
    except BaseException:
        for path in made:
            with suppress(OSError):  # not empty
                path.rmdir()
        raise


def _written(output: Path) -> list[Path]:
    """What runs write into an output folder, and the folder: it may be in the model's or be the same, and is
    no part of the model."""
    names = [f"{name}.{kind}" for name in BENCHMARKS for kind in ("json", "png")]
    own = [output / name for name in (FOLDER, ".partial", *names)]
    return [output, *own, *output.glob(f"{CONVERTED}*")]


def _versions() -> dict[str, str]:
    found = {"megatron-mtraining": __version__}
    for name in ("lm-eval", "longppl", "transformers", "torch"):
        with suppress(Exception):
            found[name] = version(name)
    return found


class _Benchmark:
    """What all benchmarks have: the model, and files of samples."""

    def __init__(self, options: Options, source: HuggingFaceModel, tokenizer):
        self.options, self.source, self.tokenizer = options, source, tokenizer

    def kept(self, label: str, attention: str, data: dict) -> KeptSamples:
        """The samples of a task with an attention."""
        from ...models.environment import DTYPES

        options, versions = self.options, _versions()
        run = {
            "MODEL": str(options.model.resolve()),
            "the files of MODEL": self._digest(options.model),
            "the files of --tokenizer": self._digest(options.tokenizer),
            "the files of --like": self._digest(options.like),
            "--yarn": options.yarn,
            "--dtype": next(name for name, each in DTYPES.items() if each == options.dtype),
            "--device": options.device.type,
            "--chat": options.chat,
            **(self._settings() if attention == SPARSE else {}),
            **data,
            **{f"version of {name}": value for name, value in versions.items()},
        }
        file = options.output / FOLDER / f"{label}-{attention}.jsonl"
        return KeptSamples(file, run, overwrite=options.overwrite)

    def _digest(self, path: Path | None) -> str | None:
        """Of a model's or a tokenizer's files, without those that runs with this output write."""
        return None if path is None else digest_of_files(path, _written(self.options.output))

    def _settings(self) -> dict:
        """What sparse attention depends on, by the names of options."""
        from ...config import OPTIONS

        options = self.options
        flags = {each.name: each.flag for each in OPTIONS}
        file = options.config.settings
        return {
            **{flags.get(name, name): value for name, value in options.settings.items()},
            "the file of --settings": None if file is None else digest_of_files(Path(file)),
            "--dense-tail": options.dense_tail,
        }

    def loaded(self):
        """The model, whose attention can be changed."""
        from .model import AttendingModel

        return AttendingModel(self.source.causal_model(), self.options)


class _Harness(_Benchmark):
    """The benchmarks that lm-eval runs."""

    def __init__(self, options: Options, source: HuggingFaceModel, tokenizer):
        super().__init__(options, source, tokenizer)
        self.planned = self._planned()
        self.files = {
            (number, attention): self.kept(each.label, attention, each.data)
            for number, each in enumerate(self.planned)
            for attention in options.attentions
        }

    def _planned(self):
        if self.options.benchmark == "needle":
            from . import needle

            return needle.planned(self.options, self.tokenizer)
        if self.options.benchmark != "ruler":
            from . import local_tasks

            return local_tasks.planned(self.options)
        from . import ruler

        with tempfile.TemporaryDirectory(prefix="mtraining-eval-") as folder:
            self.tokenizer.save_pretrained(folder)  # lm-eval opens it by its path
            return ruler.planned(self.options, self.tokenizer, Path(folder))

    def samples(self) -> list[dict]:
        """Run all tasks."""
        from .harness import KeptLM, evaluated

        options, found = self.options, []
        model = self.loaded()
        lm = KeptLM(model, self.tokenizer, self.source.shape.positions)
        depths = len(options.depths) or 1
        for attention in options.attentions:
            model.use(attention)
            for number, each in enumerate(self.planned):
                rows = evaluated(
                    lm, each, self.files[number, attention], f"{each.label} {attention}",
                    samples=options.samples * depths, chat=options.chat,
                )  # fmt: skip
                where = {"task": each.name, "length": each.length, "attention": attention}
                found += [{**where, **row} for row in rows]
        place = {(each.name, each.length): number for number, each in enumerate(self.planned)}
        return sorted(found, key=lambda each: place[each["task"], each["length"]])


class _Perplexity(_Benchmark):
    """Loss by position, and LongPPL."""

    def __init__(self, options: Options, source: HuggingFaceModel, tokenizer):
        from ...models.hugging_face import check_logits
        from .perplexity import check_offsets, windows_of

        super().__init__(options, source, tokenizer)
        check_logits(source.config, f"MODEL ({options.model})", "mtraining eval perplexity")
        check_offsets(tokenizer, str(options.tokenizer or options.model))
        self.windows = {
            length: windows_of(options, tokenizer, length) for length in options.lengths
        }
        self.evaluator = None if options.evaluator is None else self._evaluator()
        data = {
            "the files of --text": [digest_of_files(path) for path in options.text],
            "--longppl": options.longppl,
            "the files of --evaluator": self._digest(options.evaluator),
        }
        self.keys = {}
        if options.longppl is not None:
            self.keys = {
                length: self.kept(f"longppl_keys-{length}", DENSE, data) for length in self.windows
            }
        self.files = {
            (length, attention): self.kept(f"perplexity-{length}", attention, data)
            for length in self.windows
            for attention in options.attentions
        }

    def samples(self) -> list[dict]:
        """Run all windows."""
        from .perplexity import measured

        if self.evaluator is not None:
            source, tokenizer = self.evaluator
            self._find_keys(source.causal_model(), tokenizer)
        model, found = self.loaded(), []
        if self.keys and self.evaluator is None:
            model.use(DENSE)
            self._find_keys(model.model, None)
        for attention in self.options.attentions:
            model.use(attention)
            for length, windows in self.windows.items():
                rows = measured(
                    model, windows, self.files[length, attention], self.keys.get(length),
                    f"perplexity {length} {attention}",
                )  # fmt: skip
                where = {"task": "perplexity", "length": length, "attention": attention}
                found += [{**where, **row} for row in rows]
        return sorted(found, key=lambda each: each["length"])

    def _evaluator(self):
        """The model that finds key tokens, opened and not loaded, and its tokenizer."""
        from ...models.hugging_face import check_logits
        from ...models.open import open_model
        from ...models.types import ModelOptions
        from .perplexity import check_offsets

        options = self.options
        asked = ModelOptions(options.evaluator, options.device, options.dtype, name="--evaluator")
        source = open_model(asked)
        if not hasattr(source, "causal_model"):
            raise ConfigError(
                f"--evaluator is {options.evaluator}: give a Hugging Face folder or a .gguf file"
            )
        if max(self.windows) > source.shape.positions:
            raise ConfigError(
                f"--lengths has {max(self.windows)}, and --evaluator ({options.evaluator}) has "
                f"{source.shape.positions} positions: use at most that"
            )
        check_logits(source.config, f"--evaluator ({options.evaluator})", "--longppl")
        tokenizer = source.transformers_tokenizer()
        check_offsets(tokenizer, f"--evaluator ({options.evaluator})")
        return source, tokenizer

    def _find_keys(self, model, tokenizer) -> None:
        """Find key tokens with a loaded model and its tokenizer; None for the tokens of the windows."""
        from .perplexity import find_keys

        for length, windows in self.windows.items():
            title = f"longppl's key tokens {length}"
            context = self.options.longppl
            find_keys(model, tokenizer, windows, context, self.keys[length], title)
