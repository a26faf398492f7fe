# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Tables, pictures and pages of results; without torch and Megatron."""
