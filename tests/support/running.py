# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Starting several processes from a test, with a limit of time."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.ranks import ON_CPU, free_port


def torchrun(processes: int, *words, timeout: float = 240, **environment):
    """``torchrun words`` with ``processes`` ranks. Fails when it takes longer than ``timeout``
    seconds: that is a hang."""
    command, env = torchrun_command(processes, *words, **environment)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


def torchrun_command(processes: int, *words, **environment) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of :func:`torchrun`."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(processes), "--master-port", str(free_port())]
    return [*command, *map(str, words)], {**os.environ, **ON_CPU, **environment}
