# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""No network: the libraries are told so, and connections beyond this machine fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
LOCAL = ("127.", "::1", "localhost")


class NoNetwork(OSError):
    """Something has tried to reach another machine."""


@contextmanager
def no_network() -> Iterator[None]:
    """Refuse connections to other machines while the context lasts.

    The environment variables are set for good: huggingface_hub reads them once, when it is imported.
    """
    os.environ.update(dict.fromkeys(VARIABLES, "1"))
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def refuse(host: object) -> None:
        if not str(host).startswith(LOCAL):
            raise NoNetwork(f"mtraining eval uses no network, and {host} was asked for")

    def guarded_connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse(address[0])
        return connect(self, address)

    def guarded_look_up(host, *args, **kwargs):
        if host is not None:
            refuse(host.decode() if isinstance(host, bytes) else host)
        return look_up(host, *args, **kwargs)

    with (
        mock.patch.object(socket.socket, "connect", guarded_connect),
        mock.patch.object(socket, "getaddrinfo", guarded_look_up),
    ):
        yield
