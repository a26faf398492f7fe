#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Extend a model of Qwen2.5-0.5B's shape to 128K tokens, on one GPU.
#
#   examples/qwen2.5-0.5b-128k/run.sh /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# On each node, with NODES, GPUS, NODE_RANK, MASTER_ADDR, MASTER_PORT, DATA_PATH, TOKENIZER,
# CHECKPOINT, BATCH and ITERATIONS from the environment: README.md beside this file has them all. Arguments
# after the checkout's path override those here and in ../common.sh.
set -euo pipefail

GPUS=${GPUS:-1} # of each node
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL=(
  --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864
  --num-attention-heads 14 --group-query-attention --num-query-groups 2 --kv-channels 64
)
# Trained for 32768 positions; YaRN extends them 4 times, as in Qwen2.5's own recipe.
LENGTH=(--seq-length 131072 --max-position-embeddings 131072 --rotary-scaling-factor 4)
# A GPU holds a whole sequence; more GPUs split the sequences of a step (data parallelism).
PARALLEL=(--context-parallel-size 1)
# BATCH sequences per step, half a million tokens: gradients of fewer are noisy. A multiple of the GPUs.
STEP=(--global-batch-size "${BATCH:-4}")

exec torchrun "${LAUNCH[@]}" \
  -m megatron_mtraining.launch "$MEGATRON_LM/pretrain_gpt.py" \
  "${MODEL[@]}" "${LENGTH[@]}" "${PARALLEL[@]}" "${STEP[@]}" "${COMMON[@]}" "${ATTENTION[@]}" \
  "${DATA[@]}" "${CHECKPOINTING[@]}" "$@"
