#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Extend a model of Qwen2.5-0.5B's shape to 128K tokens, on one GPU.
#
#   examples/qwen2.5-0.5b-128k/run.sh /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# On each node, with NODES, GPUS, NODE_RANK, MASTER_ADDR, MASTER_PORT, DATA_PATH, TOKENIZER,
# CHECKPOINT, BATCH and ITERATIONS from the environment: README.md beside this file has them all. Arguments
# after the checkout's path override those here.
set -euo pipefail

fail() {
  echo "$0: $1" >&2
  exit 2
}
[ $# -ge 1 ] || fail "usage: $0 /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]"
MEGATRON_LM=$1
shift
[ -f "$MEGATRON_LM/pretrain_gpt.py" ] || fail "there is no pretrain_gpt.py in $MEGATRON_LM"
grep -qs -e --yarn-original-max-position-embeddings "$MEGATRON_LM/megatron/training/arguments.py" ||
  fail "$MEGATRON_LM has no options for YaRN: take Megatron-LM 0.19 or later"

NODES=${NODES:-1}
GPUS=${GPUS:-1} # of each node

LAUNCH=(--nproc-per-node "$GPUS")
if [ "$NODES" -gt 1 ]; then
  [ -n "${MASTER_ADDR:-}" ] || fail "NODES is $NODES: set MASTER_ADDR to the first node's name"
  NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
  [ -n "$NODE_RANK" ] || fail "NODES is $NODES: set NODE_RANK to this node's number, from 0"
  LAUNCH+=(
    --nnodes "$NODES" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
  )
else
  LAUNCH+=(--standalone)
fi

# Qwen2.5-0.5B's config.json. Embedding and output layer share their weight, as Megatron's do unless
# told otherwise. The vocabulary is larger than the tokenizer's, and is not left to be derived from it.
MODEL=(
  --transformer-impl transformer_engine
  --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864
  --num-attention-heads 14 --group-query-attention --num-query-groups 2 --kv-channels 64
  --normalization RMSNorm --norm-epsilon 1e-6
  --swiglu --disable-bias-linear --add-qkv-bias
  --attention-dropout 0 --hidden-dropout 0
  --padded-vocab-size 151936
)

# The model knows 32768 positions at base 1e6. YaRN takes them 4 times as far, as Qwen2.5's own
# recipe: high frequencies stay, low ones are interpolated, and attention's logits are scaled by
# (1 + 0.1 ln 4)^2, which Megatron does for queries and keys while it rotates them. Transformer Engine's fused rotation
# cannot, and Megatron would fall back to its own with a warning.
LENGTH=(
  --seq-length 131072 --max-position-embeddings 131072
  --position-embedding-type yarn --rotary-base 1000000
  --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32768
  --no-rope-fusion
)

# A GPU holds a whole sequence; more of them share out the sequences of a step (data parallelism).
PARALLEL=(--context-parallel-size 1)

MEMORY=(
  # Optimizer state and float32 weights are shared out, where there are several GPUs.
  --use-distributed-optimizer
  # Of each layer its input is kept, and attention's result, so that only the rest runs again.
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  # Logits of 131072 tokens and 151936 words would be 37 GiB in bf16; these are of 4096 tokens.
  --mtraining-loss-chunk 4096
  # A mask of sequence x sequence would not fit; attention is causal without one.
  --no-create-attention-mask-in-dataloader
  # The fused one needs NVIDIA apex.
  --no-gradient-accumulation-fusion
)

# Keys are kept that are worth their cost at this price, in every layer and head alike: higher is
# sparser, and `mtraining inspect` says what a model takes. RECALL instead lets each head's price follow
# what that head keeps: its loss stays closest to dense. SETTINGS is a file that `mtraining inspect` has
# written of the model, best with --sensitivity heads. VERTICAL and SLASH are fixed budgets.
CHOSEN=()
[ -z "${SETTINGS:-}" ] || CHOSEN+=(SETTINGS)
[ -z "${VERTICAL:-}${SLASH:-}" ] || CHOSEN+=("VERTICAL or SLASH")
[ -z "${RECALL:-}" ] || CHOSEN+=(RECALL)
[ -z "${PRICE:-}" ] || CHOSEN+=(PRICE)
[ "${#CHOSEN[@]}" -le 1 ] || fail "${CHOSEN[0]} and ${CHOSEN[1]} are both set: each says what is kept, so give one"
# Made-up tokens get fixed budgets: attention to them is even, and a price would keep nearly all of it.
[[ " $*" == *" --mtraining-"* ]] || [ "${#CHOSEN[@]}" -eq 1 ] || [ -n "${DATA_PATH:-}" ] || VERTICAL=1000
ATTENTION=(--attention-backend mtraining)
if [ -n "${SETTINGS:-}" ]; then
  [ -f "$SETTINGS" ] || fail "there is no $SETTINGS: SETTINGS is a settings file of mtraining inspect"
  ATTENTION+=(--mtraining-overrides "$SETTINGS")
elif [ -n "${VERTICAL:-}${SLASH:-}" ]; then
  ATTENTION+=(--mtraining-vertical "${VERTICAL:-1000}" --mtraining-slash "${SLASH:-100}")
elif [ -n "${RECALL:-}" ]; then
  ATTENTION+=(--mtraining-target-recall "$RECALL")
else
  ATTENTION+=(--mtraining-price "${PRICE:-0.25}")
fi

# BATCH sequences make a step, one after the other on one GPU: half a million tokens, as gradients of
# less are noisy; a multiple of the GPUs. The rate is that of a model that is trained: raise it, and
# the warm-up, to train one from nothing.
BATCH=${BATCH:-4}
ITERATIONS=${ITERATIONS:-1000}
TRAIN=(
  --bf16 --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters "$ITERATIONS"
  --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.02
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
  --log-interval 1 --eval-interval 1000 --eval-iters 0
)

# Without data, made-up tokens: enough to see that everything fits, and how long a step takes.
if [ -n "${DATA_PATH:-}" ]; then
  [ -f "$DATA_PATH.idx" ] || fail "there is no $DATA_PATH.idx: DATA_PATH is what .bin and .idx follow"
  [ -n "${TOKENIZER:-}" ] || fail "DATA_PATH is set: set TOKENIZER to the tokenizer's folder, too"
  DATA=(
    --data-path "$DATA_PATH" --split "100,0,0"
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
  )
else
  DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 151936)
fi

# Loaded from if there is a checkpoint in it, and saved to.
CHECKPOINTING=()
if [ -n "${CHECKPOINT:-}" ]; then
  CHECKPOINTING=(
    --save "$CHECKPOINT" --load "$CHECKPOINT" --save-interval "${SAVE_INTERVAL:-100}"
    --ckpt-format torch_dist
  )
fi

exec torchrun "${LAUNCH[@]}" \
  -m megatron_mtraining.launch "$MEGATRON_LM/pretrain_gpt.py" \
  "${MODEL[@]}" "${LENGTH[@]}" "${PARALLEL[@]}" "${MEMORY[@]}" "${ATTENTION[@]}" \
  "${TRAIN[@]}" "${DATA[@]}" "${CHECKPOINTING[@]}" "$@"
