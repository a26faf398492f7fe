# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tokenizing parts of the input, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...config import ConfigError
from .inputs import Part
from .parts import Parts
from .readers import NOT_TEXT, read
from .tokenizer import Tokenizer, load

NAMED = 10
"""Files left out that a part's counts name."""


@dataclass
class Job:
    """What workers need to know.

    Attributes:
        as_is: documents are kept token for token; otherwise an end-of-document token at the end is taken
            off, as packing sets them, and packed records are taken apart.
        keys: names of the parts, see :class:`~megatron_mtraining.tools.data.parts.Parts`.
        tokenizer: its path.
    """

    folder: Path
    parts: list[Part]
    keys: list[str]
    tokenizer: Path
    eod: str | None
    text_field: str | None
    as_is: bool
    loaded: Tokenizer | None = field(default=None, repr=False)


def tokenize(job: Job, number: int, stop=None) -> dict:
    """Write the token ids of part ``number``, and return what was counted in it.

    Raises:
        ConfigError: the input is broken, or what is written cannot be.
        KeyboardInterrupt: ``stop`` is set.
    """
    part, tokenizer = job.parts[number], job.loaded
    empty = with_eod = skipped = 0
    names: list[str] = []
    shortest = longest = None
    with Parts(job.folder, job.keys).writing(number) as (add, counts):
        for place, content in read(part, job.text_field, stretches=not job.as_is):
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            if content is NOT_TEXT:
                skipped += 1
                names += [place.file] if len(names) < NAMED else []
                continue
            ids = _ids(place, content, tokenizer)
            if not job.as_is and len(ids) and ids[-1] == tokenizer.eod:
                ids = ids[:-1]
            if not len(ids) or (isinstance(content, str) and not content.strip()):
                empty += 1
                continue
            with_eod += bool((ids[:-1] == tokenizer.eod).any())
            add(ids)
            where = [len(ids), place.file, place.number, place.document]
            shortest = where if shortest is None or len(ids) < shortest[0] else shortest
            longest = where if longest is None or len(ids) > longest[0] else longest
        counts.update(
            empty=empty, with_eod=with_eod, skipped=skipped, skipped_names=names, shortest=shortest,
            longest=longest,
        )  # fmt: skip
    return counts


def _ids(place, content, tokenizer: Tokenizer) -> np.ndarray:
    if not isinstance(content, str):
        ids = content
    else:
        try:
            ids = np.array(tokenizer.encode(content), np.int64)
        except Exception as error:
            raise ConfigError(
                f"{place} cannot be tokenized: {type(error).__name__}: {error}"
            ) from None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise ConfigError(
            f"{place} has the token id {wrong}, but --tokenizer has {tokenizer.vocab_size} tokens: give the "
            "one that the ids are of"
        )
    return ids.astype(tokenizer.dtype)


def tokenize_all(job: Job, numbers: list[int], workers: int) -> Iterator[tuple[int, dict]]:
    """Tokenize parts, in any order; yields number and counts of each as it is done.

    Raises:
        ConfigError: see :func:`tokenize`; or a worker process ended.
    """
    workers = min(workers, len(numbers))
    if workers <= 1:
        for number in numbers:
            yield number, tokenize(job, number)
        return
    # Not fork: this process has threads. A server that has imported the tokenizers' library forks
    # quickly, where there is one.
    server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if server else "spawn")
    if server:
        of_transformers = job.tokenizer.suffix != ".model"
        context.set_forkserver_preload([__name__, *[f"{__package__}.preload"] * of_transformers])
    stop = context.Event()
    sent = replace(job, loaded=None)
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(sent, stop))
    try:
        futures = {pool.submit(_run, number): number for number in numbers}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ConfigError(
            f"one of {workers} worker processes ended (out of memory?): run the same command again to go on "
            "with what is left, with fewer --workers if it was memory"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_job: Job
_stop = None


def _start(job: Job, stop) -> None:
    """In a worker process, before its first part."""
    global _job, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are
    # A parent that is killed tells nobody.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job.loaded = load(job.tokenizer, job.eod)
    _job, _stop = job, stop


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _run(number: int) -> dict:
    try:
        return tokenize(_job, number, _stop)
    except KeyboardInterrupt:
        return {}  # nobody waits for it
