#!/usr/bin/env bash
# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
# mtraining convert megatron-to-hf, with the same arguments: docs/conversion.md, or --help.
set -euo pipefail
exec python -m megatron_mtraining convert megatron-to-hf "$@"
