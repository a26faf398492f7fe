#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# run.sh on the nodes of a Slurm job, started from the folder of this file:
#
#   MODEL=... sbatch --nodes 2 --gpus-per-node 8 slurm.sh [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# The job inherits the environment of sbatch: activate yours and set MODEL, DATA_PATH and others before. The recipes'
# slurm.sh have their own job sizes, and source this file.
#SBATCH --job-name=mtraining
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

# Slurm runs a copy of the script from elsewhere.
RUN=${SLURM_SUBMIT_DIR:?start this with sbatch}/run.sh
[ -f "$RUN" ] || {
  echo "there is no $RUN: start sbatch in the folder of slurm.sh" >&2
  exit 2
}

export NODES=$SLURM_JOB_NUM_NODES GPUS=${SLURM_GPUS_ON_NODE:?give sbatch --gpus-per-node}
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${HOSTS%%$'\n'*} # the first line; "| head" would end scontrol, and with it this script
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}

# What is missing is said once, before any node starts.
NODE_RANK=0 bash "$RUN" --dry-run "$@" >/dev/null

# One task a node, which starts that node's processes; run.sh takes its number from SLURM_NODEID.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash "$RUN" "$@"
