# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining profile``: what attention costs on this machine's GPU, kept in a file."""
