# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining data prepare``: documents into Megatron's indexed dataset, in samples of an exact length.

A document is read (``readers``), tokenized (``tokenization``), packed (``packing``) and written (``indexed``,
which alone imports Megatron). The first two are done in ``workers``, for one part of the ``inputs`` after the
other; token ids of parts are kept (``store``) until one process packs them all. ``output`` holds the lock and
moves the dataset into place; ``prepare`` calls these in order, and ``tally`` counts.
"""
