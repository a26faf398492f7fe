# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance of ranks: the cost of attention, placement of samples, and tuning of sparsity (SparseBalance)."""
