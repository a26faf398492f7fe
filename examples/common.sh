# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# shellcheck shell=bash
# What the recipes share. Sourced by their run.sh, with run.sh's arguments and with GPUS (GPUs per node), set
# before; defines MEGATRON_LM, NODES and the arrays LAUNCH, COMMON, ATTENTION, DATA and CHECKPOINTING, and
# takes the checkout's path off the arguments.
# shellcheck disable=SC2034  # the scripts that source this use its arrays

fail() {
  echo "$0: $1" >&2
  exit 2
}
[ $# -ge 1 ] || fail "usage: $0 /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]"
MEGATRON_LM=$1
shift
[ -f "$MEGATRON_LM/pretrain_gpt.py" ] || fail "there is no pretrain_gpt.py in $MEGATRON_LM"
grep -qs -e --yarn-original-max-position-embeddings "$MEGATRON_LM/megatron/training/arguments.py" ||
  fail "$MEGATRON_LM has no options for YaRN: use Megatron-LM 0.19 or later"

NODES=${NODES:-1}
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

# Qwen2.5, whatever its size. Embedding and output layer share their weight, Megatron's default. The
# vocabulary is larger than the tokenizer's, so it is given.
COMMON=(
  --transformer-impl transformer_engine
  --normalization RMSNorm --norm-epsilon 1e-6
  --swiglu --disable-bias-linear --add-qkv-bias
  --attention-dropout 0 --hidden-dropout 0
  --padded-vocab-size 151936
  --position-embedding-type yarn --rotary-base 1000000
  --yarn-original-max-position-embeddings 32768
  # YaRN scales attention's logits, which Transformer Engine's fused rotation cannot.
  --no-rope-fusion
  # Optimizer state and float32 weights are sharded over data- and context-parallel ranks.
  --use-distributed-optimizer
  # Each layer keeps its input and the result of attention; the rest is recomputed.
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  # The logits of a whole sequence would not fit; these are of 4096 tokens.
  --mtraining-loss-chunk 4096
  # Nor would a mask of sequence x sequence; attention is causal without one.
  --no-create-attention-mask-in-dataloader
  # The fused one needs NVIDIA apex.
  --no-gradient-accumulation-fusion
  --bf16 --micro-batch-size 1 --train-iters "${ITERATIONS:=1000}"
  # For a model that is trained already: raise the rate, and the warm-up, to train one from scratch.
  --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.02
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
  --log-interval 1 --eval-interval 1000 --eval-iters 0
)

# PRICE is one price for all layers and heads: higher is sparser (mtraining inspect measures it for a model).
# RECALL moves the price of each head until it keeps that share of its attention: closest to dense.
# SETTINGS is a settings file of mtraining inspect, best with --sensitivity heads. VERTICAL and SLASH are
# fixed numbers of columns and diagonals.
GIVEN=()
[ -z "${SETTINGS:-}" ] || GIVEN+=(SETTINGS)
[ -z "${VERTICAL:-}${SLASH:-}" ] || GIVEN+=("VERTICAL or SLASH")
[ -z "${RECALL:-}" ] || GIVEN+=(RECALL)
[ -z "${PRICE:-}" ] || GIVEN+=(PRICE)
[ "${#GIVEN[@]}" -le 1 ] || fail "${GIVEN[0]} and ${GIVEN[1]} are both set: each selects the pattern, so give one"
# Attention to mock data is even, and a price would keep nearly all of it.
[[ " $*" == *" --mtraining-"* ]] || [ "${#GIVEN[@]}" -eq 1 ] || [ -n "${DATA_PATH:-}" ] || VERTICAL=1000
ATTENTION=(--attention-backend mtraining)
if [ -n "${SETTINGS:-}" ]; then
  [ -f "$SETTINGS" ] || fail "there is no $SETTINGS: SETTINGS is a settings file of mtraining inspect"
  ATTENTION+=(--mtraining-settings "$SETTINGS")
elif [ -n "${VERTICAL:-}${SLASH:-}" ]; then
  ATTENTION+=(--mtraining-vertical "${VERTICAL:-1000}" --mtraining-slash "${SLASH:-100}")
elif [ -n "${RECALL:-}" ]; then
  ATTENTION+=(--mtraining-target-recall "$RECALL")
else
  ATTENTION+=(--mtraining-price "${PRICE:-0.25}")
fi

# Without data, mock data: enough to see that everything fits, and how long a step takes.
if [ -n "${DATA_PATH:-}" ]; then
  [ -f "$DATA_PATH.idx" ] || fail "there is no $DATA_PATH.idx: DATA_PATH is the path without .bin and .idx"
  [ -n "${TOKENIZER:-}" ] || fail "DATA_PATH is set: set TOKENIZER to the tokenizer's folder, too"
  DATA=(
    --data-path "$DATA_PATH" --split "100,0,0"
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
  )
else
  DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 151936)
fi

# Loaded from if it holds a checkpoint, and saved to.
CHECKPOINTING=()
if [ -n "${CHECKPOINT:-}" ]; then
  CHECKPOINTING=(
    --save "$CHECKPOINT" --load "$CHECKPOINT" --save-interval "${SAVE_INTERVAL:-100}"
    --ckpt-format torch_dist
  )
fi
