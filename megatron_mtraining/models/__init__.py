# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Opening models, checkpoints, tokenizers and texts, for the tools.

``types`` says what a model is to a tool, ``open`` finds out which kind of file or folder it is.
``hugging_face`` and ``megatron_checkpoint`` are the two kinds; a Megatron checkpoint's files are read by
``megatron_folder`` and its GPTModel is built by ``megatron_gpt``. ``tokenizer`` opens tokenizers, ``text``
reads tokens to run over, and ``environment`` chooses device and dtype and runs Megatron in one process.
"""
