#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Qwen2.5-0.5B at 128K tokens on one GPU: ../run.sh with the defaults of this recipe.
#
#   MODEL=... examples/qwen2.5-0.5b-128k/run.sh [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# README.md beside this file has the steps, ../README.md all variables. Without MODEL the weights are random.
set -euo pipefail

: "${NODES:=1}" "${GPUS:=1}"
# A GPU holds a whole sequence; more GPUs share out the sequences of a step (data parallelism).
: "${CP:=1}"
: "${SEQ_LENGTH:=131072}"
# BATCH sequences per step, half a million tokens: gradients of fewer are noisy. A multiple of the GPUs.
: "${BATCH:=4}"
# Positions that Qwen2.5 was trained with; YaRN extends them.
: "${TRAINED_LENGTH:=32768}"
# The model's shape, for random weights. Embedding and output layer share their weight, Megatron's default.
# shellcheck disable=SC2034  # ../run.sh uses it
SHAPE=(
  --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864
  --num-attention-heads 14 --group-query-attention --num-query-groups 2 --kv-channels 64
  --padded-vocab-size 151936
)

source "$(dirname "${BASH_SOURCE[0]}")/../run.sh"
