# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Pictures and tables of what a run did. Knows nothing of Megatron or of torch."""
