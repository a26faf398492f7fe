#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Pretrain a model of Qwen2.5-3B's shape on 128K-token sequences, context parallel over 4 GPUs.
#
#   examples/pretrain_qwen2.5_3b.sh /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# Needs a Megatron-LM checkout (patched or not) and Transformer Engine. ATTENTION=fused gives the
# dense run to compare with. README.md beside this file explains the settings.
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1/pretrain_gpt.py" ]; then
  echo "usage: $0 /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]" >&2
  [ $# -lt 1 ] || echo "there is no pretrain_gpt.py in $1" >&2
  exit 2
fi
MEGATRON_LM=$1
shift

GPUS=${GPUS:-4}
SEQ_LENGTH=${SEQ_LENGTH:-131072}
ITERATIONS=${ITERATIONS:-30}
ATTENTION=${ATTENTION:-mtraining}

MODEL=(
  --use-mcore-models --transformer-impl transformer_engine
  --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008
  --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 128
  --position-embedding-type rope --rotary-base 1000000
  --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias
  --attention-dropout 0 --hidden-dropout 0
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
)
PARALLEL=(
  --context-parallel-size "$GPUS" --cp-comm-type p2p --use-distributed-optimizer
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
TRAIN=(
  --bf16 --micro-batch-size 1 --global-batch-size 1 --train-iters "$ITERATIONS"
  --lr 1e-5 --lr-decay-style constant --calculate-per-token-loss
  --no-gradient-accumulation-fusion --cross-entropy-loss-fusion
  --no-create-attention-mask-in-dataloader
  --log-interval 1 --eval-interval 1000 --eval-iters 0
)
# DATA_PATH: an indexed dataset of Megatron's, without .bin and .idx; mock data otherwise.
DATA=(--tokenizer-type NullTokenizer --vocab-size 151936)
if [ -n "${DATA_PATH:-}" ]; then
  DATA+=(--data-path "$DATA_PATH" --split "100,0,0")
else
  DATA+=(--mock-data)
fi

# A checkpoint, if CHECKPOINT names a folder: loaded if there is one in it, and saved to.
CHECKPOINTING=()
if [ -n "${CHECKPOINT:-}" ]; then
  CHECKPOINTING=(
    --save "$CHECKPOINT" --load "$CHECKPOINT" --save-interval "${SAVE_INTERVAL:-$ITERATIONS}"
    --ckpt-format torch_dist
  )
fi

# Attention of random weights is even: a price would select nearly all of it. So without a checkpoint to load,
# and unless a setting is given, budgets are fixed.
ATTENTION_ARGUMENTS=(--attention-backend "$ATTENTION")
SELECTS=' --mtraining-(price|schedule|target-recall|target-schedule|settings|policy|vertical|slash)[ =]'
LOADED=${CHECKPOINT:+$CHECKPOINT/latest_checkpointed_iteration.txt}
if [ "$ATTENTION" != mtraining ] || { [ -z "${PRICE:-}${VERTICAL:-}${SLASH:-}" ] && [[ " $* " =~ $SELECTS ]]; }; then
  :
elif [ -n "${VERTICAL:-}${SLASH:-}" ] || { [ -z "${PRICE:-}" ] && [ ! -f "$LOADED" ]; }; then
  ATTENTION_ARGUMENTS+=(--mtraining-vertical "${VERTICAL:-1000}" --mtraining-slash "${SLASH:-100}")
else
  ATTENTION_ARGUMENTS+=(--mtraining-price "${PRICE:-0.25}")
fi

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with context parallelism
exec torchrun --standalone --nproc-per-node "$GPUS" \
  -m megatron_mtraining.launch "$MEGATRON_LM/pretrain_gpt.py" \
  "${MODEL[@]}" "${PARALLEL[@]}" "${TRAIN[@]}" "${DATA[@]}" "${CHECKPOINTING[@]}" \
  "${ATTENTION_ARGUMENTS[@]}" "$@"
