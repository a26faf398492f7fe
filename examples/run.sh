#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# Train a model with attention backend mtraining, on one node or several.
#
#   MODEL=CONVERTED examples/run.sh [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# MODEL is a folder that "mtraining convert hf-to-megatron" wrote: its megatron_args.sh describes the model.
# --dry-run prints the command and starts nothing, and refuses what a start would. Arguments after the checkout
# override those here. The recipes (*/run.sh) set defaults, and source this file. README.md beside this file has all
# variables.
set -euo pipefail

fail() {
  echo "$0: $1" >&2
  exit 2
}

# By how much YaRN extends TRAINED_LENGTH: a whole number, so that SEQ_LENGTH fits; 1 extends nothing.
yarn_factor() {
  echo $(((SEQ_LENGTH + TRAINED_LENGTH - 1) / TRAINED_LENGTH))
}

# The value of flag $1 among the words that follow it; nothing if it is not there.
value_of() {
  local flag=$1
  shift
  while [ $# -gt 1 ]; do
    if [ "$1" = "$flag" ]; then
      echo "$2"
      return
    fi
    shift
  done
}

DRY_RUN=
WORDS=()
for word in "$@"; do
  if [ "$word" = --dry-run ]; then DRY_RUN=yes; else WORDS+=("$word"); fi
done
set -- ${WORDS[@]+"${WORDS[@]}"}
[ $# -ge 1 ] || fail "usage: $0 [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]"
MEGATRON_LM=$1
shift
[ -f "$MEGATRON_LM/pretrain_gpt.py" ] || fail "there is no pretrain_gpt.py in $MEGATRON_LM"

# Before any arithmetic with them.
for name in SEQ_LENGTH TRAINED_LENGTH; do
  [ -z "${!name:-}" ] || [[ ${!name} =~ ^[1-9][0-9]{0,11}$ ]] || fail "$name is ${!name}: use a positive number"
done

# ---- model: that of MODEL, else the recipe's SHAPE with random weights.
MODEL_ARGS=() OWN_TOKENIZER=()
if [ -n "${MODEL:-}" ]; then
  [ -f "$MODEL/megatron_args.sh" ] ||
    fail "there is no megatron_args.sh in $MODEL: MODEL is a folder that mtraining convert hf-to-megatron wrote"
  [ -f "$MODEL/latest_checkpointed_iteration.txt" ] || fail "there is no checkpoint in $MODEL: convert it again"
  # shellcheck source=/dev/null
  source "$MODEL/megatron_args.sh"
  # Where to load from, and whether there is text for the tokenizer, is decided below.
  for ((i = 0; i < ${#MEGATRON_ARGS[@]}; i++)); do
    case ${MEGATRON_ARGS[i]} in
      --load | --ckpt-format) ((i += 1)) ;;
      --tokenizer-*) OWN_TOKENIZER+=("${MEGATRON_ARGS[@]:i++:2}") ;;
      *) MODEL_ARGS+=("${MEGATRON_ARGS[i]}") ;;
    esac
  done
  POSITIONS=$(value_of --max-position-embeddings "${MODEL_ARGS[@]}")
  SEQ_LENGTH=${SEQ_LENGTH:-$POSITIONS}
  [ "$SEQ_LENGTH" -le "$POSITIONS" ] ||
    fail "SEQ_LENGTH is $SEQ_LENGTH, but the model in $MODEL has $POSITIONS positions: convert it with a larger --yarn"
  ORIGINAL=$(value_of --yarn-original-max-position-embeddings "${MODEL_ARGS[@]}")
  if [ -n "${TRAINED_LENGTH:-}" ] && [ "$ORIGINAL" != "$TRAINED_LENGTH" ]; then
    fail "the model in $MODEL has YaRN from ${ORIGINAL:-no} positions, this recipe's from $TRAINED_LENGTH: \
write $TRAINED_LENGTH as max_position_embeddings into config.json, and convert it with \
--yarn $(yarn_factor)"
  fi
elif [ -n "${SHAPE+set}" ]; then
  MODEL_ARGS=(
    "${SHAPE[@]}" --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --add-qkv-bias
    --attention-dropout 0 --hidden-dropout 0
    --position-embedding-type yarn --rotary-base 1000000 --max-position-embeddings "$SEQ_LENGTH"
    --rotary-scaling-factor "$(yarn_factor)"
    --yarn-original-max-position-embeddings "$TRAINED_LENGTH" --yarn-beta-fast 32.0 --yarn-beta-slow 1.0
    # Transformer Engine's fused rotation cannot scale attention's logits, as YaRN does.
    --no-rope-fusion
  )
else
  fail "set MODEL to a folder that mtraining convert hf-to-megatron wrote"
fi
if [ "$(value_of --position-embedding-type "${MODEL_ARGS[@]}")" = yarn ]; then
  grep -qs -e --yarn-original-max-position-embeddings "$MEGATRON_LM/megatron/training/arguments.py" ||
    fail "$MEGATRON_LM has no options for YaRN: use Megatron-LM 0.19 or later, which needs Python 3.12"
fi

# ---- ranks. Megatron numbers tensor-parallel ranks first, then context-parallel ones, then data-parallel ones.
NODES=${NODES:-1} GPUS=${GPUS:-1} TP=${TP:-1} PP=${PP:-1}
for name in NODES GPUS TP PP CP BATCH; do
  [[ ${!name-1} =~ ^[1-9][0-9]*$ ]] || fail "$name is ${!name}: use a positive number"
done
WORLD=$((NODES * GPUS))
CP=${CP:-$((WORLD / (TP * PP)))} # by default all GPUs share one sequence
[ $((GPUS % TP)) -eq 0 ] || fail "TP is $TP, which does not divide the $GPUS GPUs of a node: tensor parallelism \
would cross nodes"
[ "$CP" -ge 1 ] && [ $((WORLD % (TP * PP * CP))) -eq 0 ] ||
  fail "TP $TP x PP $PP x CP $CP does not divide the $WORLD GPUs ($NODES nodes of $GPUS)"
DP=$((WORLD / (TP * PP * CP)))
BATCH=${BATCH:-$DP}
[ $((BATCH % DP)) -eq 0 ] || fail "BATCH is $BATCH, which is not a multiple of the $DP data-parallel ranks"
PARALLEL=(
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --context-parallel-size "$CP"
  --micro-batch-size 1 --global-batch-size "$BATCH"
  # Optimizer state and float32 weights are sharded over data- and context-parallel ranks.
  --use-distributed-optimizer
)
[ "$TP" -eq 1 ] || PARALLEL+=(--sequence-parallel)
# Keys are gathered among the context-parallel ranks of a host (NVLink), and go round between hosts. A host has
# GPUS / TP context-parallel ranks, not GPUS: its other GPUs hold the same tokens for other heads.
HOST=$((GPUS / TP))
if [ "$CP" -gt "$HOST" ]; then
  [ $((CP % HOST)) -eq 0 ] || fail "CP is $CP, which is not a multiple of the $HOST context-parallel ranks of a \
node ($GPUS GPUs / TP $TP): a gathered group would cross nodes"
  if [ "$HOST" -gt 1 ]; then
    PARALLEL+=(--hierarchical-context-parallel-sizes "$HOST" "$((CP / HOST))")
  else
    PARALLEL+=(--mtraining-gathered-ranks 1)
  fi
elif [ "$NODES" -gt 1 ] && [ $((HOST % CP)) -ne 0 ]; then
  fail "CP is $CP, which does not divide the $HOST context-parallel ranks of a node ($GPUS GPUs / TP $TP): some \
groups would cross nodes"
fi

LAUNCH=(--nproc-per-node "$GPUS")
if [ "$NODES" -gt 1 ]; then
  NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
  if [ -n "$DRY_RUN" ]; then
    NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-FIRST_NODE}
  fi
  [ -n "${MASTER_ADDR:-}" ] || fail "NODES is $NODES: set MASTER_ADDR to the first node's name"
  [ -n "$NODE_RANK" ] || fail "NODES is $NODES: set NODE_RANK to this node's number, from 0"
  LAUNCH+=(
    --nnodes "$NODES" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
  )
else
  LAUNCH+=(--standalone)
fi

# ---- memory and steps.
TRAINING=(
  --seq-length "$SEQ_LENGTH" --transformer-impl transformer_engine --bf16
  # Each layer keeps its input and the result of attention; the rest is computed again.
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  # The logits of a whole sequence would not fit; these are of 4096 tokens.
  --mtraining-loss-chunk 4096
  # Nor would a mask of sequence x sequence; attention is causal without one.
  --no-create-attention-mask-in-dataloader
  # The fused one needs NVIDIA apex.
  --no-gradient-accumulation-fusion
  # Else each context-parallel rank divides by its own loss tokens, of which masked ends of documents leave
  # unequal numbers.
  --calculate-per-token-loss
  --train-iters "${ITERATIONS:=1000}"
  # ProLong's (train_64K.sh): for weights that are trained already.
  --lr "${LR:=1e-5}" --min-lr "${MIN_LR:-1e-6}" --lr-decay-style cosine --lr-warmup-fraction 0.1
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
  --log-interval 1 --eval-interval "${EVAL_INTERVAL:-100}" --eval-iters "${EVAL_ITERS:=0}"
)

# ---- attention. Attention to mock data is even: a price would keep nearly all of it.
GIVEN=()
[ -z "${SETTINGS:-}" ] || GIVEN+=(SETTINGS)
[ -z "${VERTICAL:-}${SLASH:-}" ] || GIVEN+=("VERTICAL or SLASH")
[ -z "${RECALL:-}" ] || GIVEN+=(RECALL)
[ -z "${PRICE:-}" ] || GIVEN+=(PRICE)
[ "${#GIVEN[@]}" -le 1 ] || fail "${GIVEN[0]} and ${GIVEN[1]} are both set: each selects the pattern, so give one"
# Options after the checkout that select the pattern replace the price.
SELECTS=' --mtraining-(settings|policy|price|schedule|target-recall|target-schedule|vertical|slash)[ =]'
[[ " $*" == *" --mtraining-"* ]] || [ "${#GIVEN[@]}" -eq 1 ] || [ -n "${DATA_PATH:-}" ] || VERTICAL=1000
ATTENTION=(--attention-backend mtraining)
if [ -n "${SETTINGS:-}" ]; then
  [ -f "$SETTINGS" ] || fail "there is no $SETTINGS: SETTINGS is a settings file of mtraining inspect"
  ATTENTION+=(--mtraining-settings "$SETTINGS")
elif [ -n "${VERTICAL:-}${SLASH:-}" ]; then
  ATTENTION+=(--mtraining-vertical "${VERTICAL:-1000}" --mtraining-slash "${SLASH:-100}")
elif [ -n "${RECALL:-}" ]; then
  ATTENTION+=(--mtraining-target-recall "$RECALL")
elif [ -n "${PRICE:-}" ] || ! [[ " $* " =~ $SELECTS ]]; then
  ATTENTION+=(--mtraining-price "${PRICE:-0.25}")
fi

# ---- data. Each part of SPLIT that is not 0 needs two sequences in each dataset: an epoch of n sequences has n - 1.
SPLIT=${SPLIT:-100,0,0}
[[ $SPLIT =~ ^[0-9.]+(,[0-9.]+){0,2}$ && $SPLIT == *[1-9]* ]] || fail "SPLIT is $SPLIT: give shares for training, \
validation and test, such as 95,5,0"
check_split() {
  local header count shares
  [ -f "$1.idx" ] || fail "there is no $1.idx: DATA_PATH is the path without .bin and .idx"
  [ -f "$1.bin" ] || fail "there is no $1.bin, which belongs to $1.idx"
  header=$(head -c 7 "$1.idx" | tr -d '\0')
  [ "$header" = MMIDIDX ] || fail "$1.idx is not an index of Megatron's: write it with mtraining data prepare"
  count=$(od -An -t d8 -j 18 -N 8 "$1.idx" | tr -d ' ')
  # As Megatron rounds them.
  shares=$(awk -v count="$count" -v split_="$SPLIT" 'BEGIN {
    parts = split(split_, weights, ",")
    for (i = 1; i <= parts; i++) all += weights[i]
    for (i = 1; i <= parts; i++) {
      before = sum; sum += weights[i]
      n = sprintf("%.0f", sum / all * count) - sprintf("%.0f", before / all * count)
      if (weights[i] > 0 && n < 2) print n " for part " i
    }
  }')
  [ -z "$shares" ] || fail "SPLIT is $SPLIT, and $1 has $count sequences, ${shares%%$'\n'*}: a part needs 2 or \
more; change SPLIT, or prepare more data"
}
DATA=()
if [ -n "${DATA_PATH:-}" ]; then
  DATASETS=()
  if [ -f "$DATA_PATH.idx" ]; then DATASETS=("$DATA_PATH"); else read -ra DATASETS <<<"$DATA_PATH"; fi
  # Weights may stand between the paths: "60 long 40 short".
  for dataset in "${DATASETS[@]}"; do
    [[ $dataset =~ ^[0-9.]+$ ]] || check_split "$dataset"
  done
  DATA=(--data-path "${DATASETS[@]}" --split "$SPLIT")
  if [ "$EVAL_ITERS" != 0 ] && [[ $SPLIT =~ ^[0-9.]+(,0)*$ ]]; then
    fail "EVAL_ITERS is $EVAL_ITERS, but SPLIT is $SPLIT: give a part of the data to validation, as in SPLIT=95,5,0"
  fi
  if [ -n "${TOKENIZER:-}" ]; then
    DATA+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
  else
    [ "${#OWN_TOKENIZER[@]}" -gt 0 ] || fail "DATA_PATH is set: set TOKENIZER to the tokenizer's folder, too"
    DATA+=("${OWN_TOKENIZER[@]}")
  fi
else
  # Enough to see that everything fits, and how long a step takes.
  VOCABULARY=$(value_of --padded-vocab-size "${MODEL_ARGS[@]}")
  DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size "$VOCABULARY")
fi

# ---- checkpoints: the run goes on from CHECKPOINT if that holds one, else it starts from MODEL.
CHECKPOINTING=(--ckpt-format torch_dist)
if [ -n "${CHECKPOINT:-}" ]; then
  [ "$CHECKPOINT" != "${MODEL:-}" ] || fail "CHECKPOINT is MODEL: give the run a folder of its own"
  CHECKPOINTING+=(--save "$CHECKPOINT" --load "$CHECKPOINT" --save-interval "${SAVE_INTERVAL:-100}")
  [ -z "${MODEL:-}" ] || CHECKPOINTING+=(--pretrained-checkpoint "$MODEL")
elif [ -n "${MODEL:-}" ]; then
  CHECKPOINTING+=(--load "$MODEL")
fi

SCRIPT=(
  "$MEGATRON_LM/pretrain_gpt.py"
  "${MODEL_ARGS[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${ATTENTION[@]}" "${DATA[@]}" "${CHECKPOINTING[@]}" "$@"
)
COMMAND=(torchrun "${LAUNCH[@]}" -m megatron_mtraining.launch "${SCRIPT[@]}")
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with context and tensor parallelism
if [ -n "$DRY_RUN" ]; then
  PROBLEM=$(RANK=0 WORLD_SIZE=$WORLD python -m megatron_mtraining.launch --check "${SCRIPT[@]}" 2>&1) || fail "$PROBLEM"
  [ -z "$PROBLEM" ] || echo "$0: $PROBLEM" >&2
  # A flag a line, quoted for a shell: "mtraining plan memory --flags-file" reads it, too.
  printf 'CUDA_DEVICE_MAX_CONNECTIONS=1'
  for word in "${COMMAND[@]}"; do
    case $word in -[a-z-]*) printf ' \\\n ' ;; esac
    printf ' %q' "$word"
  done
  echo
  exit
fi
exec "${COMMAND[@]}"
