# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``python -m megatron_mtraining.quickstart``, the same as ``mtraining quickstart``."""

import sys

from ..cli import main

if __name__ == "__main__":  # the training processes import this module too
    sys.exit(main(["quickstart", *sys.argv[1:]]))
