# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tokenizing in bounded time: a tokenizer's regular expressions can take exponentially long.

The library cannot be told to stop. It runs in a thread of its own, which is left behind when it takes too
long: the process can then clean up and end, also by Ctrl-C.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ..errors import ConfigError
from ..requirements import first_line

LEAST = 60.0
"""Seconds that any text may take."""
SLOWEST = 10_000
"""Characters a second, of what a text may take beyond that: tokenizers do a hundred times as many."""
TICK = 1.0
"""Seconds between two looks at the clock."""


class BoundedEncode:
    """``encode`` of a tokenizer, refused if it takes too long or fails; one call at a time.

    Args:
        encode: text to token ids, by a library that lets other threads run meanwhile.
        name: of the tokenizer, for messages.
    """

    def __init__(self, encode: Callable[[str], list[int]], name: str):
        self._encode, self._name = encode, name
        self._texts: SimpleQueue[str] = SimpleQueue()
        self._results: SimpleQueue = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, text: str) -> list[int]:
        """Token ids.

        Raises:
            ConfigError: it took too long, or the library failed.
        """
        if self._thread is None:
            # Not a pool's: Python would wait for that at the end.
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._texts.put(text)
        ids, error = self._wait(text)
        if isinstance(error, MemoryError):
            raise error
        if error is not None:
            raise ConfigError(f"{self._name} fails: {first_line(error)}") from None
        return ids

    def _wait(self, text: str):
        limit = LEAST + len(text) / SLOWEST
        spent, before = 0.0, time.monotonic()
        while True:
            try:
                return self._results.get(timeout=TICK)
            except Empty:
                now = time.monotonic()
                # Not the clock's time: this process may have been stopped.
                spent += min(now - before, 2 * TICK)
                before = now
            if spent > limit:
                raise ConfigError(
                    f"{self._name} has not tokenized {len(text)} characters in {spent:.0f} s: a regular "
                    "expression in its tokenizer.json may take for ever on this text; use another tokenizer"
                )

    def _run(self) -> None:
        while True:
            text = self._texts.get()
            try:
                self._results.put((self._encode(text), None))
            except BaseException as error:  # a panic of tokenizers is no Exception
                self._results.put((None, error))
