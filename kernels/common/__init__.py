# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What kernels of all rooms share: dispatch, launches, tile sizes and device functions."""
