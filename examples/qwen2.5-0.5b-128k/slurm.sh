#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# run.sh on the nodes of a Slurm job, started from the folder of this file:
#
#   sbatch slurm.sh /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#   BATCH=16 sbatch --nodes 2 --gpus-per-node 8 slurm.sh /path/to/Megatron-LM
#
# The environment is that of sbatch: activate it, and set DATA_PATH and others, before.
#SBATCH --job-name=qwen2.5-0.5b-128k
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-gpu=8
#SBATCH --output=%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file from elsewhere.
RUN=${SLURM_SUBMIT_DIR:?start this with sbatch}/run.sh
[ -f "$RUN" ] || {
  echo "there is no $RUN: start sbatch in the folder of slurm.sh" >&2
  exit 2
}

export NODES=$SLURM_JOB_NUM_NODES GPUS=$SLURM_GPUS_ON_NODE
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${HOSTS%%$'\n'*} # the first line; "| head" would end scontrol, and with it this script
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}

# One task a node, which starts that node's processes; run.sh takes its number from SLURM_NODEID.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash "$RUN" "$@"
