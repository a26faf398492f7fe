# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A process that runs a target: what hangs, crashes or takes too much memory ends it, and is a fault.

It is forked, for a target takes milliseconds, and importing torch takes seconds.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from pathlib import Path

from megatron_mtraining import ConfigError

from .targets import TARGETS, Fault, Refused, Target, check_message

SECONDS, CPU_SECONDS = 200, 20
"""Of one input. All take far less than one on a core of their own, but tests share the machine."""
MEMORY = 4 << 30
"""Bytes of address space that an input may take, beyond what the process has."""
FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
)  # fmt: skip
"""Audit events that no input may cause."""


def outcome(target: Target, case: object, place: Path) -> tuple[str, str]:
    """What becomes of an input: "read", "refused" with the message, or "fault" with the traceback."""
    try:
        target.run(case, place)
        return "read", ""
    except Refused as refusal:
        return "refused", str(refusal)
    except ConfigError as error:
        try:
            check_message(str(error))
        except Fault as fault:
            return "fault", str(fault)
        return "refused", str(error)
    except BaseException:
        return "fault", traceback.format_exc()


class Worker:
    """Runs one target.

    Attributes:
        tried, read: inputs, and those that were not refused.
    """

    def __init__(self, name: str, seconds: float = SECONDS, target: Target | None = None):
        self.name, self.seconds = name, seconds
        self.target = TARGETS[name] if target is None else target
        self.tried = self.read = 0
        self._process = None
        # Also makes the files that workers share.
        self.seeds = [] if self.target.seeds is None else self.target.seeds()
        self.root = Path(tempfile.mkdtemp(prefix="mtraining-fuzz-"))

    def run(self, case: object) -> tuple[str, str]:
        """What becomes of an input, as :func:`outcome` says it."""
        self.tried += 1
        if self._process is None:
            self._start()
        data = pickle.dumps(case)
        os.write(self._to, struct.pack("<Q", len(data)))
        with os.fdopen(os.dup(self._to), "wb") as pipe:
            pipe.write(data)
        reply = self._reply()
        if reply is None:
            return "fault", self._ended()
        self.read += reply[0] == "read"
        return reply

    def check(self, case: object) -> None:
        """Raise :class:`Fault` unless an input is read or refused as it should be."""
        kind, message = self.run(case)
        if kind == "fault":
            raise Fault(message)

    def close(self) -> None:
        if self._process is not None:
            os.kill(self._process, signal.SIGKILL)
            self._forget()
        shutil.rmtree(self.root, ignore_errors=True)

    def _reply(self) -> tuple[str, str] | None:
        """The child's answer; None if it ends or takes too long."""
        data, wanted = b"", None
        while wanted is None or len(data) < wanted:
            ready, _, _ = select.select([self._from], [], [], self.seconds)
            part = os.read(self._from, 1 << 16) if ready else b""
            if not part:
                return None
            data += part
            if wanted is None and len(data) >= 8:
                wanted = 8 + struct.unpack("<Q", data[:8])[0]
        return pickle.loads(data[8:])

    def _ended(self) -> str:
        number, status = os.waitpid(self._process, os.WNOHANG)
        if not number:
            ready, _, _ = select.select([self._from], [], [], 0)
            if not ready:  # else it is just ending
                os.kill(self._process, signal.SIGKILL)
                self._forget()
                return f"it hangs: no answer after {self.seconds} s"
            status = self._forget()
        else:
            self._forget(waited=True)
        return f"it ended the process: wait status {status}, {os.waitstatus_to_exitcode(status)}"

    def _forget(self, waited: bool = False) -> int:
        status = 0 if waited else os.waitpid(self._process, 0)[1]
        os.close(self._to)
        os.close(self._from)
        self._process = None
        return status

    def _start(self) -> None:
        inner_from, self._to = os.pipe()
        self._from, inner_to = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if self._process:
            os.close(inner_from)
            os.close(inner_to)
            return
        try:
            os.close(self._to)
            os.close(self._from)
            _serve(self.target, self.seeds[:1], self.root, inner_from, inner_to)
        finally:
            os._exit(3)


def _serve(target: Target, first: list, root: Path, get: int, put: int) -> None:
    for number, case in enumerate(
        first
    ):  # what is imported may start programs, to look for a compiler say
        (root / f"first{number}").mkdir(parents=True, exist_ok=True)
        outcome(target, case, root / f"first{number}")
        shutil.rmtree(root / f"first{number}")
    faulthandler.disable()  # the parent tells of a crash
    happened: list[str] = []
    sys.addaudithook(lambda event, args: event in FORBIDDEN and happened.append(f"{event} {args}"))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(get, "rb") as cases:
        number = 0
        while header := cases.read(8):
            case = pickle.loads(cases.read(struct.unpack("<Q", header)[0]))
            place = root / f"{os.getpid()}-{number}"
            place.mkdir(parents=True)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends the process
            result = outcome(target, case, place)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if happened:
                result = "fault", f"it runs code: {happened}; {result[1]}"
            happened.clear()
            data = pickle.dumps(result)
            data = struct.pack("<Q", len(data)) + data
            while data:
                data = data[os.write(put, data) :]
            shutil.rmtree(place, ignore_errors=True)
            number += 1
