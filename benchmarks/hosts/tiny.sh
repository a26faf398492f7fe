#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# A model of two layers on CPU tensors, to try the benchmarks of whole steps: "benchmarks.hosts.one_host --tiny".
#
#   benchmarks/hosts/tiny.sh /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# Variables are those of examples/run.sh: GPUS (ranks), CP, BATCH, SEQ_LENGTH, ITERATIONS, VERTICAL, SLASH, PRICE.
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1/pretrain_gpt.py" ]; then
  echo "usage: $0 /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]" >&2
  exit 2
fi
MEGATRON_LM=$1
shift

GPUS=${GPUS:-2}
CP=${CP:-$GPUS}
SEQ_LENGTH=${SEQ_LENGTH:-1024}
ATTENTION=(--attention-backend mtraining --mtraining-block-size 64)
if [ -n "${VERTICAL:-}${SLASH:-}" ]; then
  ATTENTION+=(--mtraining-vertical "${VERTICAL:-16}" --mtraining-slash "${SLASH:-4}")
else
  ATTENTION+=(--mtraining-price "${PRICE:-0.25}")
fi

export CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1
exec torchrun --standalone --nproc-per-node "$GPUS" \
  -m megatron_mtraining.launch --cpu "$MEGATRON_LM/pretrain_gpt.py" \
  --use-mcore-models --num-layers 2 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 \
  --group-query-attention --num-query-groups 2 --kv-channels 64 --position-embedding-type rope \
  --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 \
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --context-parallel-size "$CP" \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --micro-batch-size 1 --global-batch-size "${BATCH:-$((GPUS / CP))}" --train-iters "${ITERATIONS:-5}" \
  --lr 1e-4 --lr-decay-style constant --log-interval 1 --eval-interval 1000 --eval-iters 0 \
  --no-create-attention-mask-in-dataloader \
  --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --make-vocab-size-divisible-by 4 \
  "${ATTENTION[@]}" "$@"
