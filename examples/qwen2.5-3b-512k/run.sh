#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Qwen2.5-3B at 512K tokens on one node of 4 GPUs or 4 nodes of 8: ../run.sh with the defaults of this recipe.
#
#   MODEL=... examples/qwen2.5-3b-512k/run.sh [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# README.md beside this file has the steps, ../README.md all variables. Without MODEL the weights are random.
set -euo pipefail

: "${NODES:=1}" "${GPUS:=4}"
# All GPUs share one sequence (CP is NODES x GPUS): with 2 KV heads there is little to split by tensor
# parallelism, and a layer's weights are small beside its activations.
: "${SEQ_LENGTH:=524288}"
: "${BATCH:=1}" # one sequence per step is half a million tokens already
# Positions that Qwen2.5 was trained with; YaRN extends them.
: "${TRAINED_LENGTH:=32768}"
# The model's shape, for random weights. Embedding and output layer share their weight, Megatron's default.
# shellcheck disable=SC2034  # ../run.sh uses it
SHAPE=(
  --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008
  --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 128
  --padded-vocab-size 151936
)

source "$(dirname "${BASH_SOURCE[0]}")/../run.sh"
