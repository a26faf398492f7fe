#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Extend a model of Qwen2.5-3B's shape to 512K tokens, on one node of 4 GPUs or 4 nodes of 8.
#
#   examples/qwen2.5-3b-512k/run.sh /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# On each node, with NODES, GPUS, NODE_RANK, MASTER_ADDR, MASTER_PORT, DATA_PATH, TOKENIZER,
# CHECKPOINT and ITERATIONS from the environment: README.md beside this file has them all. Arguments
# after the checkout's path override those here and in ../common.sh.
set -euo pipefail

GPUS=${GPUS:-4} # of each node
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL=(
  --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008
  --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 128
)
# Trained for 32768 positions; YaRN extends them 16 times, as in Qwen2.5's own recipe.
LENGTH=(--seq-length 524288 --max-position-embeddings 524288 --rotary-scaling-factor 16)
# All GPUs hold one sequence: with 2 key heads there is little to split by tensor parallelism, and a layer's
# weights are small beside its activations. Keys are gathered in each node (NVLink) and go round between
# nodes, as the two hierarchical sizes say. One sequence per step is half a million tokens already.
PARALLEL=(--context-parallel-size $((NODES * GPUS)) --global-batch-size 1)
if [ "$NODES" -gt 1 ]; then
  PARALLEL+=(--hierarchical-context-parallel-sizes "$GPUS" "$NODES")
fi

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with context parallelism
exec torchrun "${LAUNCH[@]}" \
  -m megatron_mtraining.launch "$MEGATRON_LM/pretrain_gpt.py" \
  "${MODEL[@]}" "${LENGTH[@]}" "${PARALLEL[@]}" "${COMMON[@]}" "${ATTENTION[@]}" \
  "${DATA[@]}" "${CHECKPOINTING[@]}" "$@"
