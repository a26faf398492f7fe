# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance over data-parallel ranks: runs on a mixed set."""
