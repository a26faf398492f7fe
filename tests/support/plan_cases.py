# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Flags of Megatron that tests of ``mtraining plan`` start from."""

from __future__ import annotations

from megatron_mtraining.tools.plan.options import read
from megatron_mtraining.tools.plan.setting import Setting, setting_of

SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --kv-channels 64 --seq-length 512 "
    "--max-position-embeddings 600 --micro-batch-size 1 --vocab-size 1000 --attention-dropout 0 "
    "--hidden-dropout 0 --attention-backend mtraining "
)
QWEN = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias "
    "--attention-dropout 0 --hidden-dropout 0 --group-query-attention --num-query-groups 2 "
    "--micro-batch-size 1 --vocab-size 151936 --no-create-attention-mask-in-dataloader "
)
QWEN_3B = QWEN + (
    "--num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 --kv-channels 128 "
    "--seq-length 131072 --max-position-embeddings 131072 "
)
QWEN_HALF_B = QWEN + (
    "--num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --kv-channels 64 "
    "--seq-length 131072 --max-position-embeddings 131072 "
)
OURS = "--attention-backend mtraining "
EXAMPLE = QWEN_3B + (
    "--bf16 --use-distributed-optimizer --context-parallel-size 4 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --global-batch-size 1 "
    "--no-gradient-accumulation-fusion --cross-entropy-loss-fusion "
)
"""examples/pretrain_qwen2.5_3b.sh."""


def made(flags: str, world_size: int | None = None) -> Setting:
    return setting_of(read(flags.split())[0], world_size)
