# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What the tools share: output that appears whole or not at all, and signals as exceptions."""
