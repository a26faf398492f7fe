# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a training setting needs, computed before it is run (``mtraining plan``)."""
