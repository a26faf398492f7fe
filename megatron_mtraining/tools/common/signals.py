# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Signals that end a process, as exceptions: what was being written is cleaned up on the way out."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager


class Ended(BaseException):
    """A signal that would have ended the process without cleaning up."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextmanager
def ends_as_exceptions():
    """Have SIGTERM and SIGHUP raise :class:`Ended` while the context lasts, once.

    A scheduler sends the first before it kills; a terminal that closes, the second. Whoever has them
    ignored (nohup) or handled keeps that, and threads other than the main one cannot have handlers.
    """
    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _raise)
                replaced.append(number)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def interrupts_ignored():
    """Ignore Ctrl-C, and have processes that are started ignore it as long as they live."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise(number: int, frame) -> None:
    for other in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(other) is _raise:
            signal.signal(other, signal.SIG_IGN)  # cleaning up is not to be broken off
    raise Ended(number)
