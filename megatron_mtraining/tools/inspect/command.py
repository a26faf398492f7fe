# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining inspect`` from start to end: open the model, measure, recommend, write."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from ... import __version__
from ...errors import ConfigError
from ..common.atomic_output import atomic_file, atomic_files
from .options import PAGE, SETTINGS, Options, add_arguments, options_from, settings_path

if TYPE_CHECKING:  # --help needs none of it
    import torch
    from torch import Tensor

    from ...models.types import Source

__all__ = ["add_arguments", "run", "when_ended"]  # the interface of a subcommand, see tools.cli


def run(args) -> int:
    """Inspect a model with parsed arguments; returns the exit status.

    Raises:
        ConfigError: the model, the text or an option cannot work.
    """
    import torch

    options = options_from(args)
    try:
        inspect(options)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the memory of {options.device} is not enough ({str(error).splitlines()[0]}): use a smaller "
            "--seq, or --device cpu"
        ) from error
    return 0


def when_ended(args) -> str:
    """What a run has written that was interrupted."""
    settings = settings_path(args)
    if args.output.exists() or settings.exists():
        return f"files in {args.output}, and {settings}, may be from an earlier run"
    return "nothing was written"


def inspect(options: Options) -> None:
    """Measure a model, print the tables, and write the files.

    Raises:
        ConfigError: see :func:`run`.
    """
    import numpy as np
    import torch
    from tqdm import tqdm

    from ...models.open import open_model
    from ...models.types import ModelOptions
    from ..common.settings_bytes import settings_bytes
    from .collect import Collector
    from .measure import held_out_rows
    from .output import draw, heads_to_draw, write_json
    from .results import Recommendation, numbers, recommendation, summary
    from .sensitivity import check_sensitivity, measure_sensitivity
    from .settled import Settled
    from .sweep import series_for

    source = open_model(
        ModelOptions(options.model, options.device, options.dtype, options.tokenizer, options.yarn)
    )
    shape, tokens = source.shape, read_tokens(options, source)
    length = len(tokens)
    series = series_for(length, options.base, options.policies)
    if options.sensitivity is not None:
        check_sensitivity(options, length)
    for layer, head in options.heads:
        if layer >= shape.layers or head >= shape.heads:
            raise ConfigError(
                f"--head is {layer}:{head}, but there are {shape.layers} layers of {shape.heads} heads, "
                "counted from 0"
            )
    layers = options.measured_layers(shape.layers)
    configs = [config for one in series for config in one.configs()]
    rows = held_out_rows(length, options.rows, configs)
    dtype = str(options.dtype).removeprefix("torch.")
    print(
        f"{source.description}: {shape.layers} layers, {shape.heads}/{shape.kv_heads} heads of dimension "
        f"{shape.head_dim}; {length} tokens, {len(configs)} settings evaluated on {len(rows)} rows of "
        f"{len(layers)} layers, {dtype} on {options.device}",
        flush=True,
    )
    with ExitStack() as stack:
        # First: whether results can be written there is known before the model runs.
        replace = options.overwrite
        opened = atomic_files(options.output, overwrite=replace, names=options.files)
        folder = stack.enter_context(opened)
        written = None
        if SETTINGS not in options.files:
            file = atomic_file(options.settings, option="--settings", overwrite=replace)
            written = stack.enter_context(file)
        started = time.perf_counter()
        sensitivity = None
        with source.loaded(options.sensitivity is not None) as run_model:
            loaded = time.perf_counter()
            progress = partial(tqdm, total=len(layers), unit="layer", file=sys.stderr)
            with progress(desc="inspect") as bar:
                collected = Collector(series, configs, rows, layers, bar)
                run_model(tokens, collected)
            measured = collected.measured(options.target_recall)
            recommended = Recommendation(measured)
            drawn = heads_to_draw(recommended.measured, options.heads)
            with progress(desc="recommended") as bar:
                settled = Settled(recommended, rows, layers, set(drawn.values()), bar)
                run_model(tokens, settled)
            if options.sensitivity is not None:
                sensitivity = measure_sensitivity(run_model, tokens, shape, options)
        recall, density = np.stack(settled.recall), np.stack(settled.density)
        seconds, memory = time.perf_counter() - loaded, peak_memory(options.device)
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
            "dtype": dtype,
            "device": str(options.device),
            "seconds": round(seconds, 1),
            "loading_seconds": round(loaded - started, 1),
            "peak_memory_bytes": memory,
            "megatron_mtraining": __version__,
            "torch": torch.__version__,
        }
        text = summary(measured, recommended, options.target_recall)
        text += "\n" + recommendation(recommended, recall, density, shape.layers)
        settings = recommended.settings_file()
        if sensitivity is not None:
            text += "\n" + sensitivity.summary()
            settings = sensitivity.settings_file(options.base)
            about["sensitivity"] = sensitivity.numbers() | {"settings": settings}
        print(f"\n{text}\n", flush=True)
        found = numbers(measured, recommended, recall, density, about)
        write_json(folder / "results.json", found)
        (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
        draw(folder, measured, settled, drawn, length, options, text)
        content = settings_bytes(options.settings, settings)
        if written is None:
            (folder / SETTINGS).write_bytes(content)
        else:
            written.write(content)
    print(
        f"Took {seconds:.0f} s after {loaded - started:.0f} s of loading; peak memory "
        f"{memory / 2**30:.1f} GiB. Page with pictures: {options.output.resolve() / PAGE}; settings: "
        f"{options.settings.resolve()}"
    )


def read_tokens(options: Options, source: Source) -> Tensor:
    """The tokens to run over, int64 ``[s]``.

    Raises:
        ConfigError: the text does not fit the model.
    """
    from ...models.text import tokens_for

    positions, vocabulary = source.shape.positions, source.shape.vocabulary
    extend = "--yarn FACTOR to extend them" if options.yarn is None else "a larger --yarn"
    tokens = tokens_for(
        options.text, options.seq_length, positions, options.block_size, source.tokenizer, extend
    )
    low, high = int(tokens.min()), int(tokens.max())
    if not 0 <= low <= high < vocabulary:
        raise ConfigError(
            f"--text has the token id {low if low < 0 else high}, but MODEL has {vocabulary} tokens: use the "
            "tokenizer that it was trained with (--tokenizer)"
        )
    return tokens


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: of the GPU if it used one, else of the machine."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
