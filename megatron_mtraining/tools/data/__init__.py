# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: documents into Megatron's indexed dataset, in exactly-long samples.

In two passes: worker processes turn parts of the input into token ids (``parts``, ``workers``), which
are kept in a folder until all is done, and one process packs these into samples (``packing``,
``indexed``). Only ``indexed`` imports Megatron.
"""
