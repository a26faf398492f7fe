# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect`` from start to end: open, measure, tell."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import __version__
from ...config import ConfigError, MTrainingConfig
from ..common.signals import Ended, ends_as_exceptions
from .options import Options, add_arguments, options_from

__all__ = ["add_arguments", "run"]  # what megatron_mtraining.tools.cli asks of a subcommand


def run(args) -> int:
    """Inspect a model with parsed arguments; returns the exit status.

    Raises:
        ConfigError: the model, the text or an option cannot work.
    """
    options = options_from(args)
    try:
        with ends_as_exceptions():
            inspect(options)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the memory of {options.device} is not enough ({str(error).splitlines()[0]}): use a smaller "
            "--seq, or --device cpu"
        ) from error
    except KeyboardInterrupt:
        print(f"mtraining inspect: interrupted; {_left(options)}", file=sys.stderr)
        return 130
    except Ended as end:
        print(f"mtraining inspect: ended by {end.name}; {_left(options)}", file=sys.stderr)
        return 128 + end.number
    return 0


def _left(options: Options) -> str:
    """What a run that was broken off has written."""
    if options.output.exists() or options.settings.exists():
        return f"what is in {options.output} and {options.settings} may be of an earlier run"
    return "nothing was written"


def inspect(options: Options) -> None:
    """Measure a model, print the tables, and write the files.

    Raises:
        ConfigError: see :func:`run`.
    """
    from ...models.open import open_model
    from ...models.text import tokens_for
    from ...models.types import ModelOptions
    from .measure import held_out_rows
    from .mixed import mixed_of
    from .output import all_or_nothing, write_json, write_settings
    from .results import Recommendation, numbers, summary
    from .sensitivity import check_sensitivity, measure_sensitivity
    from .sweep import series_for

    source = open_model(
        ModelOptions(options.model, options.device, options.dtype, options.tokenizer, options.yarn)
    )
    shape = source.shape
    extend = "--yarn FACTOR to let them go farther" if options.yarn is None else "a larger --yarn"
    tokens = tokens_for(
        options.text, options.seq_length, shape.positions, options.block_size, source.tokenizer, extend
    )  # fmt: skip
    length = len(tokens)
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < shape.vocabulary:
        wrong = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise ConfigError(
            f"--text has the token id {wrong}, but MODEL has {shape.vocabulary} tokens: use the tokenizer "
            "that it was trained with (--tokenizer)"
        )
    series = series_for(length, options.base, options.policies)
    configs = [
        MTrainingConfig.from_options(**setting) for one in series for setting in one.settings
    ]
    if options.sensitivity is not None:
        check_sensitivity(options, length)
    rows = held_out_rows(length, options.rows, configs, options.seed)
    for layer, head in options.heads:
        if layer >= shape.layers or head >= shape.heads:
            raise ConfigError(
                f"--head is {layer}:{head}, but there are {shape.layers} layers of {shape.heads} heads: both "
                "are counted from 0"
            )
    print(
        f"{source.description}: {shape.layers} layers, {shape.heads}/{shape.kv_heads} heads of "
        f"{shape.head_dim}; {length} tokens, {len(configs)} settings, {len(rows)} rows to judge by, "
        f"{_name(options.dtype)} on {options.device}",
        flush=True,
    )
    with all_or_nothing(options.output) as folder:
        started = time.perf_counter()
        sensitivity = None
        with source.loaded(options.sensitivity is not None) as run_model:
            loaded = time.perf_counter()
            collected = Collected(options, series, configs, rows, shape.layers)
            with collected.progress:
                run_model(tokens, collected.add)
            if options.sensitivity is not None:
                sensitivity = measure_sensitivity(run_model, tokens, shape, options)
        measured = collected.measured()
        recommended, mixed = Recommendation(measured), mixed_of(measured)
        seconds, memory = time.perf_counter() - loaded, peak_memory(options.device)
        text = summary(measured, recommended, options.target_recall)
        settings = recommended.settings_file()
        if mixed is not None:
            text += "\n" + mixed.summary()
            text += ": the settings file has these" if options.mixed else " (--mixed)"
            settings = mixed.settings_file() if options.mixed else settings
        if sensitivity is not None:
            text += "\n" + sensitivity.summary()
            settings = sensitivity.settings_file(options.base)
        print(f"\n{text}\n", flush=True)
        about = {
            "model": source.description,
            "text": [str(path) for path in options.text],
            "tokens": length,
            "rows": len(rows),
            "yarn": options.yarn,
            "target_recall": options.target_recall,
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": _name(options.dtype),
            "device": str(options.device),
            "seconds": round(seconds, 1),
            "loading_seconds": round(loaded - started, 1),
            "peak_memory_bytes": memory,
            "megatron_mtraining": __version__,
            "torch": torch.__version__,
        }
        if mixed is not None:
            about["mixed"] = mixed.numbers()
        if sensitivity is not None:
            about["sensitivity"] = sensitivity.numbers() | {"settings": settings}
        write_json(folder / "results.json", numbers(measured, recommended, about))
        (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
        draw(folder, measured, recommended, collected.kept, rows, length, options)
        # The last that can fail, and written in one step.
        write_settings(options.settings, settings)
    print(
        f"Took {seconds:.0f} s after {loaded - started:.0f} s of loading; peak memory "
        f"{memory / 2**30:.1f} GiB. Pictures and numbers: {options.output.resolve()}; settings: "
        f"{options.settings.resolve()}"
    )


@dataclass(frozen=True)
class KeptHead:
    """A head that may be drawn.

    Attributes:
        picture: see :class:`~megatron_mtraining.tools.inspect.measure.LayerRecall`, ``[cells, cells]``.
        patterns: of each setting distances and columns, or of block lists the key blocks that the rows see,
            eight to a byte; on the CPU.
    """

    layer: int
    head: int
    picture: Tensor
    patterns: list[tuple[Tensor, Tensor] | np.ndarray]


class Collected:
    """Gathers what is measured, layer after layer; of patterns and pictures, those of few heads."""

    def __init__(self, options: Options, series: list, configs: list, rows: Tensor, layers: int):
        from tqdm import tqdm

        self.options, self.series, self.configs, self.rows = options, series, configs, rows
        self.recall: list[np.ndarray] = []
        self.density: list[np.ndarray] = []
        self.kept: list[KeptHead] = []
        self.progress = tqdm(total=layers, desc="inspect", unit="layer", file=sys.stderr)

    def add(self, given) -> None:
        """Measure a layer; see :meth:`~megatron_mtraining.models.types.Visitor`."""
        from .measure import LayerRecall

        found = LayerRecall(given, self.configs, self.rows)
        self.recall.append(found.recall.numpy())
        self.density.append(found.density.numpy())
        here, first = self.recall[-1].shape[1], self.recall[0].shape[1]
        if here != first:
            raise ConfigError(
                f"layer {given.layer} has {here} heads, layer 0 {first}: models with as many heads in every "
                "layer are supported"
            )
        heads = self._worth_keeping(given.layer)
        patterns = [_kept_patterns(pattern, heads) for pattern in found.patterns]
        for at, head in enumerate(heads):
            picture = found.picture[head].clone()
            self.kept.append(KeptHead(given.layer, head, picture, [each[at] for each in patterns]))
        self.progress.set_postfix(recall=f"{found.recall.mean():.1%}", refresh=False)
        self.progress.update()

    def _worth_keeping(self, layer: int) -> list[int]:
        """The easiest, middle and hardest head of the layer that was last added, and those asked for."""
        from .results import by_difficulty, needed_density

        recall, density = self.recall[-1], self.density[-1]
        target = self.options.target_recall
        each = [needed_density(recall[of], density[of], target) for of in self._slices()]
        order = by_difficulty(np.minimum(each, 1).mean(0), recall.mean(0))
        chosen = {int(order[0]), int(order[len(order) // 2]), int(order[-1])}
        return sorted(chosen | {head for at, head in self.options.heads if at == layer})

    def _slices(self) -> list[slice]:
        """Where each series' settings are among all."""
        ends = np.cumsum([len(one.settings) for one in self.series])
        return [slice(end - len(one.settings), end) for one, end in zip(self.series, ends)]

    def measured(self) -> list:
        """A :class:`~megatron_mtraining.tools.inspect.results.Measured` for each series."""
        from .results import Measured

        recall, density = np.stack(self.recall, 1), np.stack(self.density, 1)
        target = self.options.target_recall
        return [
            Measured(one, recall[of], density[of], target)
            for one, of in zip(self.series, self._slices())
        ]


def _kept_patterns(pattern, heads: list[int]) -> list:
    """Some heads' patterns, as :class:`KeptHead` has them."""
    from .measure import ListsAtRows

    if isinstance(pattern, ListsAtRows):
        return list(np.packbits(pattern.seen[heads].cpu().numpy(), axis=-1))
    sides = pattern.distances()[0, heads].cpu(), pattern.columns[0, heads].cpu()
    return list(zip(*(side.unbind() for side in sides)))


def draw(folder: Path, measured, recommended, kept, rows, length: int, options: Options) -> None:
    """Write all pictures into ``folder``."""
    from ..report import pictures
    from .measure import lists_picture, pattern_picture
    from .results import by_difficulty

    target = options.target_recall
    name = options.model.name or str(options.model)
    curves = {
        one.series.label: (
            one.density.mean((1, 2)),
            one.recall.mean((1, 2)),
            np.quantile(one.recall, 0.1, axis=(1, 2)),
        )
        for one in measured
    }
    pictures.recall_density(
        folder / "recall_density.png",
        curves,
        target,
        f"{name}, {length} tokens: mean over all heads",
    )
    best = recommended.measured
    pictures.layers_by_heads(
        folder / "density_needed.png",
        best.needed,
        f"{name}, {length} tokens\n{best.series.label}; crossed out: recall not reached",
        f"share of pairs a head has to keep for a recall of {target:.0%}",
    )
    number = sum(len(one.series.settings) for one in measured[: measured.index(best)])
    number += recommended.point.denser
    setting = best.series.describe(best.series.settings[recommended.point.denser])
    places = tuple(np.array([(head.layer, head.head) for head in kept]).T)
    order = by_difficulty(best.needed[places], best.recall[recommended.point.denser][places])
    middle = order[len(order) // 2]
    chosen = {"easiest": kept[order[0]], "middle": kept[middle], "hardest": kept[order[-1]]}
    for head in kept:
        if (head.layer, head.head) in options.heads:
            chosen[f"layer{head.layer}_head{head.head}"] = head
    for which, head in chosen.items():
        where = (rows, length, options.block_size, len(head.picture))
        if isinstance(head.patterns[number], tuple):
            shares = pattern_picture(*head.patterns[number], *where)
        else:
            seen = torch.from_numpy(np.unpackbits(head.patterns[number], axis=-1)).bool()
            shares = lists_picture(seen, *where)
        recall = best.recall[recommended.point.denser, head.layer, head.head]
        density = best.density[recommended.point.denser, head.layer, head.head]
        pictures.attention_and_pattern(
            folder / f"head_{which}.png",
            head.picture.numpy(),
            shares.numpy(),
            length,
            f"{name}, layer {head.layer}, head {head.head}: {best.series.label}, {setting} keeps "
            f"{recall:.1%} of its attention with {density:.1%} of the pairs",
        )


def peak_memory(device: torch.device) -> int:
    """Bytes that this process held at most: of the GPU if it used one, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
