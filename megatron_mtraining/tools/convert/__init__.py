# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining convert``: checkpoints of Hugging Face to Megatron's torch_dist, and back; prices of a run."""
