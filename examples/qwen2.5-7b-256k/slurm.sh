#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# This recipe as a Slurm job, started from the folder of this file:
#
#   MODEL=... DATA_PATH=... CHECKPOINT=... sbatch slurm.sh [--dry-run] /path/to/Megatron-LM [MORE MEGATRON ARGUMENTS]
#
# The job inherits the environment of sbatch: activate yours before. ../slurm.sh has what the recipes share.
#SBATCH --job-name=qwen2.5-7b-256k
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

# Slurm runs a copy of this file from elsewhere.
SHARED=${SLURM_SUBMIT_DIR:?start this with sbatch}/../slurm.sh
[ -f "$SHARED" ] || {
  echo "there is no $SHARED: start sbatch in the folder of slurm.sh" >&2
  exit 2
}
# shellcheck source=../slurm.sh
source "$SHARED"
