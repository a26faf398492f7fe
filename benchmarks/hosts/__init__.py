# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""All that is measured on one host of several GPUs."""
