# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: documents into Megatron's indexed dataset, in samples of an exact length.

In two passes: worker processes turn parts of the input into token ids (``inputs``, ``readers``,
``tokenization``), which are kept in a folder until all are done (``output``); then one process packs them
into samples (``packing``, ``indexed``). Only ``indexed`` imports Megatron.
"""
