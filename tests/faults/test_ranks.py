# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A rank that stops or dies in the middle of attention: the others end with an error within the timeout.

For ranks with other settings see tests/test_agreement.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.attention import attend
from tests.support.ranks import FORKS, _meet, _settle

TIMEOUT = 6
TOKENS, HEADS, KV_HEADS, DIM = 256, 4, 2, 64


def attend_until_a_rank_is_gone(rank, folder, output, environment, how):
    _settle(environment, output)
    _meet(rank, 2, folder, TIMEOUT)
    config = MTrainingConfig.from_options(block_size=64, window=64, sample_strata=8)
    for step in range(3):
        if step == 2:
            if (
                rank == 1
            ):  # stopped or killed by itself, when the other one has all of the last step
                while not Path(folder, "waits").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), how)
            Path(folder, "waits").touch()
        query = torch.randn(TOKENS, 1, HEADS, DIM, requires_grad=True)
        key, value = torch.randn(2, TOKENS, 1, KV_HEADS, DIM)
        try:
            found = attend(query, key, value, config=config, cp_group=dist.group.WORLD)
            found.out.sum().backward()
        except Exception as error:
            Path(folder, "error").write_text(f"{step} {type(error).__name__}: {error}")
            os._exit(1)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=lambda how: how.name)
def test_the_others_end_with_an_error(how, tmp_path):
    output = tmp_path / "output"
    output.touch()
    given = str(tmp_path), str(output), dict(os.environ), how
    ranks = [
        FORKS.Process(target=attend_until_a_rank_is_gone, args=(rank, *given)) for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 120
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < deadline and ranks[0].is_alive(), _said(tmp_path)
            time.sleep(0.02)
        started = time.monotonic()
        ranks[0].join(TIMEOUT + 30)
        took = time.monotonic() - started
        assert ranks[0].exitcode == 1, _said(tmp_path)
    finally:
        for rank in ranks:
            rank.kill()  # ends a stopped process too
            rank.join()
    step, message = (tmp_path / "error").read_text().split(" ", 1)
    assert step == "2"
    if how is signal.SIGSTOP:
        assert TIMEOUT - 1 < took < TIMEOUT + 10
        assert "Timed out" in message and str(TIMEOUT * 1000) in message, message
    else:  # a connection that is closed is seen at once
        assert took < TIMEOUT
        assert "onnection" in message, message


def _said(folder: Path) -> str:
    files = [folder / "error", folder / "output"]
    return "\n".join(file.read_text()[-2000:] for file in files if file.exists())
