# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""``mtraining eval``: long-context benchmarks of a trained model with dense and with sparse attention.

- ``options``: the command line, checked before a model is read
- ``model``: Hugging Face folders, GGUF files and Megatron checkpoints as a model of transformers, and its
  attention
- ``planned``: what a benchmark is to the command; ``harness``: lm-eval's tasks on that model
- ``ruler``, ``needle``, ``local_tasks`` (LongBench and InfiniteBench): tasks of lm-eval, from local data
- ``perplexity``: by position, and LongPPL
- ``kept_samples``: finished samples, in files; ``noise``, ``results``: means, their intervals, tables
"""
