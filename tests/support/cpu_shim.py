# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Training scripts of Megatron-LM without the launcher on a machine without a GPU, for tests.

    python cpu_shim.py SCRIPT ARGUMENTS              a training script, as a plain run
    python cpu_shim.py -m MODULE SCRIPT ARGUMENTS    through a module such as the launcher

Megatron must be importable (PYTHONPATH).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

from megatron_mtraining.megatron.cpu import install, install_core, install_torch
from megatron_mtraining.megatron.missing_names import define_missing_names

__all__ = ["install_core", "install_torch", "install_zigzag"]


def install_zigzag() -> None:
    """megatron-core's slice of the rotary table, which pins memory, for dense runs."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings import rotary_pos_embedding as rope
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    def zigzag(table, dim, cp_group):
        rank, size = cp_group.rank(), cp_group.size()
        halves = table.chunk(2 * size, dim)
        return torch.cat([halves[rank], halves[2 * size - 1 - rank]], dim)

    for module in (rope_utils, rope, yarn):
        module.get_pos_emb_on_this_cp_rank = zigzag


def main(argv: list[str]) -> None:
    install()
    define_missing_names()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
