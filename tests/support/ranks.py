# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Run a function on several gloo processes, and bring back what each returns; or a script, as torchrun does.

Ranks are forked from a process that has imported torch, Megatron and transformers, which takes each of them
seconds else.
It knows nothing of the tests: environment and output are those of the test that asks.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_mtraining.cp_group import shut_down

TIMEOUT = 120  # seconds, of the process group
HANGS = 240  # seconds, of a script
ROOT = Path(__file__).parents[2]
ON_CPU = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""The environment of Megatron's processes in tests."""
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "transformers.modeling_utils",
        "peft",
    ]
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _settle(environment: dict, output: str) -> None:
    """Take over a test's environment, and write to a file."""
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.set_num_threads(1)


def _meet(rank: int, world: int, folder: str, timeout: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def _entry(rank, world, folder, output, environment, function, arguments):
    _settle(environment, output)
    _meet(rank, world, folder, TIMEOUT)
    try:
        torch.save(function(rank, world, *arguments), f"{folder}/result{rank}")
    finally:
        shut_down()


def run_ranks(world, function, *arguments):
    """Results of ``function(rank, world, *arguments)``, in rank order. A rank's exception is raised
    here. ``function`` must be importable (module level)."""
    try:
        return _run_ranks(world, function, *arguments)
    except mp.ProcessRaisedException as error:
        # On a busy machine gloo's ranks sometimes do not find each other. Nothing of the test has run then.
        if "in _meet" not in str(error) or "connectFullMesh" not in str(error):
            raise
        return _run_ranks(world, function, *arguments)


def _run_ranks(world, function, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        output.touch()
        given = world, folder, str(output), dict(os.environ), function, arguments
        try:
            mp.start_processes(_entry, given, nprocs=world, start_method="forkserver")
        finally:
            print(output.read_text(), end="")  # for pytest to show
        results = [f"{folder}/result{rank}" for rank in range(world)]
        return [torch.load(path, weights_only=False) for path in results]


def _to_its_end(rank, world, folder, output, environment, timeout, function, arguments):
    _settle(environment, output)
    _meet(rank, world, folder, timeout)
    try:
        function(rank, world, *arguments)
    except Exception as error:
        Path(folder, f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)  # as a program whose rank has raised ends: its connections go with it


def run_to_their_ends(world, timeout, function, *arguments):
    """Each rank's exit status, and what it has raised ("" if nothing), in rank order.

    Unlike :func:`run_ranks` it leaves ranks alone when one fails, and fails itself if one still runs long
    after the process group's ``timeout``, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        output.touch()
        given = world, folder, str(output), dict(os.environ), timeout, function, arguments
        ranks = [FORKS.Process(target=_to_its_end, args=(rank, *given)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout + HANGS
        try:
            for rank in ranks:
                rank.join(max(0, end - time.monotonic()))
            hang = [number for number, rank in enumerate(ranks) if rank.is_alive()]
            assert not hang, f"ranks {hang} hang; {output.read_text()[-4000:]}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
            print(output.read_text(), end="")  # for pytest to show
        errors = [Path(folder, f"error{rank}") for rank in range(world)]
        said = [error.read_text() if error.exists() else "" for error in errors]
        return [rank.exitcode for rank in ranks], said


def _alone(environment, output, function, arguments):
    _settle(environment, output)
    try:
        function(*arguments)
    except SystemExit as error:  # to say it, multiprocessing has another form
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            sys.exit(1)
        raise
    finally:
        sys.stdout.flush()


def run_alone(function, *arguments, world: int = 1, **environment):
    """``function(*arguments)`` in ``world`` new processes with an environment of their own: as
    :func:`subprocess.run` gives it, with standard output and error in one. Fails when it takes longer than
    ``HANGS``. Ranks are numbered, and have no process group."""
    common = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        output.touch()
        ranks = []
        for rank in range(world):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            given = own, str(output), function, arguments
            ranks.append(FORKS.Process(target=_alone, args=given))
            ranks[-1].start()
        end = time.monotonic() + HANGS
        try:
            while any(rank.is_alive() for rank in ranks):
                if any(rank.exitcode for rank in ranks):
                    time.sleep(0.5)  # the others' last words
                    break
                assert time.monotonic() < end, f"hangs: {output.read_text()[-4000:]}"
                time.sleep(0.05)
            failed = [rank.exitcode for rank in ranks if rank.exitcode]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return SimpleNamespace(returncode=failed[0] if failed else 0, stdout=output.read_text())


def _script(script, words):
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def run_script(world: int, script, *words):
    """``torchrun script words`` with ``world`` ranks, on the CPU."""
    meet = {**ON_CPU, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return run_alone(_script, str(script), list(map(str, words)), world=world, **meet)
