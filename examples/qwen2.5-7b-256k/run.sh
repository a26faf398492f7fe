#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Qwen2.5-7B at 256K tokens on 2 nodes of 8 GPUs with 80 GB: ../run.sh with the defaults of this recipe.
#
#   MODEL=... examples/qwen2.5-7b-256k/run.sh [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# README.md beside this file has the steps, ../README.md all variables. Without MODEL the weights are random.
set -euo pipefail

: "${NODES:=2}" "${GPUS:=8}"
# Gradients are whole on every rank, 28 GiB without tensor parallelism. The other GPUs share one sequence.
: "${TP:=2}"
: "${SEQ_LENGTH:=262144}"
: "${BATCH:=4}" # sequences per step: a million tokens
# Positions that Qwen2.5 was trained with; YaRN extends them.
: "${TRAINED_LENGTH:=32768}"
# The model's shape, for random weights.
# shellcheck disable=SC2034  # ../run.sh uses it
SHAPE=(
  --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944
  --num-attention-heads 28 --group-query-attention --num-query-groups 4 --kv-channels 128
  --padded-vocab-size 152064 --untie-embeddings-and-output-weights
)

source "$(dirname "${BASH_SOURCE[0]}")/../run.sh"
