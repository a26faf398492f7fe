# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""A page on what a run did (``mtraining report``): read from its logs, without torch and Megatron."""
